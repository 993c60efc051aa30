package userspace

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// A UDP flow keeps the translation of its first packet for as long as packets come:
// also if there was none because the frontend did not exist yet, and if the listener
// is another one now. So when that changes, the flows to a frontend that do not lead
// to one of its listeners are forgotten, and the next packet is translated anew. What
// becomes of a flow behind the listener is the relay's business.

// flowTable is connection tracking: what of dataplane.FlowTable is needed here.
type flowTable interface {
	DeleteUDP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort) bool) (int, error)
}

// staleFlows are the destinations to look at, until that succeeds.
type staleFlows struct {
	due map[netip.AddrPort]lead
}

// lead says where flows to a destination may lead.
type lead struct {
	gone bool // no Service answers there: flows must not be translated
	to   []netip.AddrPort
}

// from takes up the destinations whose listeners differ, or that are new since the
// addresses for node ports are others.
func (s *staleFlows) from(f *family, changes []*change, addrs []netip.Addr) {
	if s.due == nil {
		s.due = map[netip.AddrPort]lead{}
	}
	gone := map[netip.AddrPort]bool{}
	compare := func(old, now service) {
		was, is := f.leads(old, f.addrs), f.leads(now, addrs)
		for dst := range was {
			gone[dst] = true
		}
		for dst, to := range is {
			if before, ok := was[dst]; !ok || !slices.Equal(before, to) {
				s.due[dst] = lead{to: to}
			}
			delete(gone, dst)
		}
	}
	changed := map[plan.ID]bool{}
	for _, c := range changes {
		changed[c.id] = true
		if c.id.Protocol == plan.UDP && !c.failed {
			compare(c.old, c.new)
		}
	}
	if !slices.Equal(f.addrs, addrs) {
		for id, svc := range f.services {
			if id.Protocol == plan.UDP && !changed[id] {
				compare(svc, svc)
			}
		}
	}
	for dst := range gone {
		s.due[dst] = lead{gone: true}
	}
}

// leads says to which listeners each destination of a Service port may lead.
func (f *family) leads(svc service, addrs []netip.Addr) map[netip.AddrPort][]netip.AddrPort {
	out := map[netip.AddrPort][]netip.AddrPort{}
	if svc.sp == nil {
		return out
	}
	for i := range svc.sp.Frontends {
		fe := &svc.sp.Frontends[i]
		var to []netip.AddrPort
		for _, rt := range fe.Route {
			if rt = effective(svc.sp, rt); rt.Verdict == plan.Forward {
				to = append(to, netip.AddrPortFrom(listeners.ClassOf(rt).Addr(f.settings.block), svc.port))
			}
		}
		slices.SortFunc(to, netip.AddrPort.Compare)
		to = slices.Compact(to)
		if fe.Kind != plan.NodePort {
			out[netip.AddrPortFrom(fe.Addr, fe.Port)] = to
			continue
		}
		for _, a := range addrs {
			out[netip.AddrPortFrom(a, fe.Port)] = to
		}
	}
	return out
}

// remove forgets the stale flows. What fails stays due.
func (s *staleFlows) remove(ctx context.Context, f *family) error {
	if len(s.due) == 0 || f.host.flows == nil {
		return nil
	}
	stale := func(to, from netip.AddrPort) bool {
		l, ours := s.due[to]
		switch {
		case !ours:
			return false
		case l.gone:
			return from != to
		}
		return !slices.Contains(l.to, from)
	}
	deleted, err := f.host.flows.DeleteUDP(ctx, slices.SortedFunc(maps.Keys(s.due), netip.AddrPort.Compare), stale)
	if deleted > 0 {
		f.env.Log.Info("stale UDP flows removed", "family", f.fam, "flows", deleted)
		f.env.Stats.Add("conntrack_reconciler_deleted_entries_total", float64(deleted), f.fam.String())
	}
	if err != nil {
		return fmt.Errorf("remove stale UDP flows: %w", err)
	}
	s.due = nil
	return nil
}
