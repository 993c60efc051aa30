package route

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	socket "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/fault"
)

// Kernel is the routing of the calling thread's network namespace. The zero value is
// ready.
type Kernel struct{}

var _ Routing = Kernel{}

// listTries is how often a listing is repeated that a change disturbed.
const listTries = 10

// List implements Routing.
func (Kernel) List(ctx context.Context) ([]Entry, error) {
	for try := 1; ; try++ {
		out, err := list()
		if err == nil || !errors.Is(err, netlink.ErrDumpInterrupted) || try == listTries {
			return out, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}

func list() ([]Entry, error) {
	var out []Entry
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		ours := &netlink.Route{Protocol: Protocol, Table: unix.RT_TABLE_UNSPEC}
		routes, err := netlink.RouteListFiltered(family, ours, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list routes of protocol %d: %w", Protocol, err)
		}
		for i := range routes {
			if p, ok := prefixOf(family, routes[i].Dst); ok {
				source, _ := netip.AddrFromSlice(routes[i].Src) // unset if there is none
				out = append(out, Entry{Local: p, Table: uint32(routes[i].Table), Source: source.Unmap()})
			}
		}
		rules, err := netlink.RuleList(family)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list routing rules: %w", err)
		}
		for i := range rules {
			if r := &rules[i]; r.Protocol == Protocol {
				out = append(out, entryOf(family, r))
			}
		}
	}
	return out, nil
}

func entryOf(family int, r *netlink.Rule) Entry {
	return Entry{
		V6: family == unix.AF_INET6, Mark: r.Mark, Priority: uint32(max(r.Priority, 0)), In: r.IifName,
		Table: uint32(r.Table), Goto: uint32(max(r.Goto, 0)), Nop: r.Table == 0 && r.Goto <= 0,
	}
}

// prefixOf converts a route's destination; nil stands for all addresses.
func prefixOf(family int, n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		if family == unix.AF_INET {
			return netip.PrefixFrom(netip.IPv4Unspecified(), 0), true
		}
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0), true
	}
	a, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if family == unix.AF_INET {
		a = a.Unmap()
	}
	return netip.PrefixFrom(a, bits), ok
}

// Add implements Routing.
func (Kernel) Add(_ context.Context, e Entry) error {
	err := fault.Inject()
	if err != nil {
		return fmt.Errorf("add %s: %w", e, err)
	}
	if e.IsRoute() {
		var r *netlink.Route
		if r, err = e.route(); err == nil {
			err = addRoute(r)
		}
	} else {
		err = netlink.RuleAdd(e.rule())
	}
	if err == nil || errors.Is(err, unix.EEXIST) {
		return nil
	}
	return fmt.Errorf("add %s: %w", e, err)
}

// addRoute adds a route; one with a source in place of the kernel's own.
func addRoute(r *netlink.Route) error {
	switch {
	case r.Src == nil:
		return netlink.RouteAdd(r)
	case r.Dst.IP.To4() != nil:
		return netlink.RouteReplace(r)
	}
	// The kernel's own has a better metric, which no other can have: both are there for
	// a moment.
	err := netlink.RouteAdd(r)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	err = netlink.RouteDel(&netlink.Route{Dst: r.Dst, Table: r.Table, Type: r.Type, Protocol: unix.RTPROT_KERNEL})
	if errors.Is(err, unix.ESRCH) {
		err = nil
	}
	return err
}

// From implements Routing.
func (Kernel) From(to netip.Addr) (netip.Addr, error) {
	routes, err := netlink.RouteGet(to.AsSlice())
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return netip.Addr{}, nil
	}
	if err != nil || len(routes) == 0 {
		return netip.Addr{}, fmt.Errorf("find the way to %s: %w", to, err)
	}
	a, _ := netip.AddrFromSlice(routes[0].Src) // unset if there is none
	return a.Unmap(), nil
}

// Delete implements Routing.
func (Kernel) Delete(_ context.Context, e Entry) error {
	err := fault.Inject()
	if err != nil {
		return fmt.Errorf("delete %s: %w", e, err)
	}
	if e.IsRoute() {
		var r *netlink.Route
		if r, err = e.route(); err == nil {
			err = netlink.RouteDel(r)
		}
	} else {
		err = netlink.RuleDel(e.rule())
	}
	if err == nil || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return fmt.Errorf("delete %s: %w", e, err)
}

func (e Entry) route() (*netlink.Route, error) {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		return nil, err
	}
	p := e.Local.Masked()
	r := &netlink.Route{
		Dst:       &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		LinkIndex: lo.Index, Table: int(e.Table), Type: unix.RTN_LOCAL, Protocol: Protocol, Scope: netlink.SCOPE_HOST,
	}
	if p.Addr().Is6() {
		r.Scope = netlink.SCOPE_UNIVERSE // IPv6 routes have none
	}
	if e.Source.IsValid() {
		r.Src = e.Source.AsSlice()
	}
	return r, nil
}

func (e Entry) rule() *netlink.Rule {
	r := netlink.NewRule()
	r.Family = unix.AF_INET
	if e.V6 {
		r.Family = unix.AF_INET6
	}
	if mask := e.Mark; mask != 0 {
		r.Mark, r.Mask = e.Mark, &mask
	}
	r.Priority, r.Table, r.Protocol, r.IifName = int(e.Priority), int(e.Table), Protocol, e.In
	if e.Goto != 0 {
		r.Goto = int(e.Goto)
	}
	if e.Nop {
		const actionNop = 3 // FR_ACT_NOP (linux/fib_rules.h)
		r.Type = actionNop
	}
	return r
}

// watched are the multicast groups in which entries come and go (rtnetlink(7)).
const watched = 1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1) |
	1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1)

// Watch implements Routing.
func (Kernel) Watch(ctx context.Context, ready chan<- struct{}, gone func(what string)) error {
	c, err := socket.Dial(unix.NETLINK_ROUTE, &socket.Config{Groups: watched})
	if err != nil {
		return fmt.Errorf("subscribe to routing events: %w", err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	close(ready)
	for {
		msgs, err := c.Receive()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.ENOBUFS):
			gone("routing events were lost")
			continue
		case err != nil:
			return fmt.Errorf("receive routing events: %w", err)
		}
		for _, m := range msgs {
			if what := deleted(m); what != "" {
				gone(what)
			}
		}
	}
}

// deleted says what of ours a message reports as deleted, "" if nothing.
func deleted(m socket.Message) string {
	const (
		header   = 12 // of struct rtmsg and struct fib_rule_hdr
		protocol = 5  // where struct rtmsg has it
		fraProto = 21 // FRA_PROTOCOL (linux/fib_rules.h)
	)
	if len(m.Data) < header {
		return ""
	}
	switch m.Header.Type {
	case unix.RTM_DELROUTE:
		attrs, err := socket.NewAttributeDecoder(m.Data[header:])
		source := false
		for err == nil && attrs.Next() {
			source = source || attrs.Type() == unix.RTA_PREFSRC
		}
		if m.Data[protocol] == Protocol && !source {
			return "a route of ours was deleted"
		}
	case unix.RTM_DELRULE:
		attrs, err := socket.NewAttributeDecoder(m.Data[header:])
		for err == nil && attrs.Next() {
			if attrs.Type() == fraProto && attrs.Uint8() == Protocol {
				return "a routing rule of ours was deleted"
			}
		}
	}
	return ""
}
