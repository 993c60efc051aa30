// Package dryrun has the seams of ipvs mode with writes that are not carried out, only
// written down: "+" before what is added, "-" before what goes. Reading goes through.
package dryrun

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// Servers are virtual servers whose changes go onto a list.
type Servers struct {
	ipvs.IPVS
	Lines *[]string
}

func note(lines *[]string, sign, format string, args ...any) error {
	*lines = append(*lines, sign+" "+fmt.Sprintf(format, args...))
	return nil
}

func (d Servers) CreateServer(v ipvs.VirtualServer) error {
	return note(d.Lines, "+", "virtual server %s", v)
}

func (d Servers) UpdateServer(v ipvs.VirtualServer) error {
	return note(d.Lines, "+", "virtual server %s, in place of other attributes", v)
}

func (d Servers) DeleteServer(k ipvs.Key) error { return note(d.Lines, "-", "virtual server %s", k) }

func (d Servers) CreateReal(k ipvs.Key, r ipvs.RealServer) error {
	return note(d.Lines, "+", "real server %s of %s", r, k)
}

func (d Servers) UpdateReal(k ipvs.Key, r ipvs.RealServer) error {
	if r.Weight == 0 {
		return note(d.Lines, "-", "real server %s of %s: new flows", r.Addr, k)
	}
	return note(d.Lines, "+", "real server %s of %s, in place of another weight", r, k)
}

func (d Servers) DeleteReal(k ipvs.Key, a netip.AddrPort) error {
	return note(d.Lines, "-", "real server %s of %s", a, k)
}

// Device is the device for addresses, whose changes go onto a list.
type Device struct {
	host.Device
	Lines *[]string
}

func (d Device) Create(context.Context) error { return nil }

func (d Device) Add(a netip.Addr) error {
	return note(d.Lines, "+", "address %s on %s", a, host.VIPDevice)
}

func (d Device) Remove(a netip.Addr) error {
	return note(d.Lines, "-", "address %s on %s", a, host.VIPDevice)
}

// Routing is the host's routing, whose changes go onto a list.
type Routing struct {
	route.Routing
	Lines *[]string
}

func (d Routing) Add(_ context.Context, e route.Entry) error { return note(d.Lines, "+", "%s", e) }

func (d Routing) Delete(_ context.Context, e route.Entry) error {
	return note(d.Lines, "-", "%s", e)
}
