package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// Where open connections lead ip_vs alone knows: when another mode takes over, the
// virtual servers, the addresses and the routes stay until the connections have ended,
// or the drain time-out is over.

// handover is under way while it has a deadline.
type handover struct {
	until atomic.Int64 // in nanoseconds since 1970; 0: none
}

func (h *handover) underWay() bool { return h.until.Load() != 0 }

// next goes on with it: see dataplane.Mode.HandOver.
func (h *handover) next(ctx context.Context, env dataplane.Env, o Options, k kernel) error {
	yes, err := takesFlows(ctx, k)
	if err == nil && yes {
		err = giveUp(ctx, env, k)
	}
	if err != nil {
		return errors.Join(err, k.close())
	}
	began := h.until.CompareAndSwap(0, k.now().Add(o.drainTimeout()).UnixNano())
	servers, err := ourServers(ctx, o, k)
	if err != nil {
		return errors.Join(err, k.close())
	}
	open := 0
	for _, v := range servers {
		for _, r := range v.Real {
			open += int(r.Active)
		}
	}
	// Right after new flows were given up some are on their way to be connections.
	if until := time.Unix(0, h.until.Load()); (began && yes || open > 0) && k.now().Before(until) {
		return errors.Join(&dataplane.Draining{Mode: Name, Connections: open, Until: until}, k.close())
	}
	h.until.Store(0)
	return cleanup(ctx, env, o, k)
}

// Addresses to which the host surely has no way of its own (RFC 5737, RFC 3849).
var (
	elsewhere4 = netip.AddrFrom4([4]byte{203, 0, 113, 0})
	elsewhere6 = netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8})
)

// giveUp leaves new flows to another mode. Those of the node itself to an address on
// the device would begin at the same address, and end with it: they get another one
// before.
func giveUp(ctx context.Context, env dataplane.Env, k kernel) error {
	addrs, err := k.device.Addrs()
	if err != nil && !errors.Is(err, host.ErrNoDevice) {
		return err
	}
	var errs []error
	for _, f := range plan.Families {
		elsewhere := map[plan.Family]netip.Addr{plan.IPv4: elsewhere4, plan.IPv6: elsewhere6}[f]
		source, err := k.routing.From(elsewhere)
		errs = append(errs, err)
		for _, a := range addrs {
			if plan.FamilyOf(a) == f && !a.IsLinkLocalUnicast() && source.IsValid() {
				errs = append(errs, k.routing.Add(ctx, route.Entry{Local: netip.PrefixFrom(a, a.BitLen()), Table: route.LocalTable, Source: source}))
			}
		}
		c, err := shape(ctx, k, f)
		if err == nil && c != nil && !table.IsGivenUp(c) {
			err = table.GiveUp(ctx, k.tables, f, env.MasqueradeBit, c)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// takeBack undoes what a hand-over that did not come to its end has left: addresses
// whose routes are not the kernel's own are bound anew.
func (f *family) takeBack(entries []route.Entry) error {
	for _, e := range entries {
		if !e.Source.IsValid() || plan.FamilyOf(e.Local.Addr()) != f.fam {
			continue
		}
		if err := errors.Join(f.k.device.Remove(e.Local.Addr()), f.k.routing.Delete(f.ctx, e)); err != nil {
			return err
		}
		f.bound.Gone(e.Local.Addr())
	}
	return nil
}
