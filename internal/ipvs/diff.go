package ipvs

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// Diff implements dataplane.Differ: it does what an Apply at start does, with writes
// that only go onto a list.
func (b *backend) Diff(ctx context.Context, p *plan.Plan) ([]string, error) {
	listed, err := b.k.servers.Dump(ctx)
	if err != nil {
		return nil, fmt.Errorf("compare the virtual servers: %w", err)
	}
	var out []string
	for _, fam := range b.env.Families {
		var lines []string
		tables := &nft.DryRun{Tables: b.k.tables}
		dry := b.k
		dry.tables = tables
		dry.servers = dryServers{b.k.servers, &lines}
		dry.device = dryDevice{b.k.device, &lines}
		dry.routing = dryRouting{b.k.routing, &lines}
		f := newFamily(b.env, b.opts, fam, dry, newRemarks())
		if err := f.carryOut(ctx, plan.Update{Plan: p, Node: true}, listed); err != nil {
			return nil, fmt.Errorf("compare %s: %w", fam, err)
		}
		out = append(append(out, tables.Lines...), lines...)
	}
	return out, nil
}

// dryServers writes changes down.
type dryServers struct {
	ipvs.IPVS
	lines *[]string
}

func note(lines *[]string, sign, format string, args ...any) error {
	*lines = append(*lines, sign+" "+fmt.Sprintf(format, args...))
	return nil
}

func (d dryServers) CreateServer(v ipvs.VirtualServer) error {
	return note(d.lines, "+", "virtual server %s", v)
}

func (d dryServers) UpdateServer(v ipvs.VirtualServer) error {
	return note(d.lines, "+", "virtual server %s, in place of other attributes", v)
}

func (d dryServers) DeleteServer(k ipvs.Key) error { return note(d.lines, "-", "virtual server %s", k) }

func (d dryServers) CreateReal(k ipvs.Key, r ipvs.RealServer) error {
	return note(d.lines, "+", "real server %s of %s", r, k)
}

func (d dryServers) UpdateReal(k ipvs.Key, r ipvs.RealServer) error {
	if r.Weight == 0 {
		return note(d.lines, "-", "real server %s of %s: new flows", r.Addr, k)
	}
	return note(d.lines, "+", "real server %s of %s, in place of another weight", r, k)
}

func (d dryServers) DeleteReal(k ipvs.Key, a netip.AddrPort) error {
	return note(d.lines, "-", "real server %s of %s", a, k)
}

// dryDevice writes changes down.
type dryDevice struct {
	host.Device
	lines *[]string
}

func (d dryDevice) Create(context.Context) error { return nil }

func (d dryDevice) Add(a netip.Addr) error {
	return note(d.lines, "+", "address %s on %s", a, host.VIPDevice)
}

func (d dryDevice) Remove(a netip.Addr) error {
	return note(d.lines, "-", "address %s on %s", a, host.VIPDevice)
}

// dryRouting writes changes down.
type dryRouting struct {
	route.Routing
	lines *[]string
}

func (d dryRouting) Add(_ context.Context, e route.Entry) error { return note(d.lines, "+", "%s", e) }

func (d dryRouting) Delete(_ context.Context, e route.Entry) error {
	return note(d.lines, "-", "%s", e)
}
