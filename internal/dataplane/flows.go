package dataplane

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// A UDP flow keeps the translation of its first packet for as long as packets
// come. So when a Service port changes, each flow whose original destination is
// one of its frontends is looked at: it must lead to an endpoint that still
// serves, or be forgotten, and the next packet is translated anew. That covers
// flows to endpoints that went away, flows to a Service that has none any more,
// and flows that began before the Service had a frontend or an endpoint and are
// not translated at all.

// flowChecks says what to look at, by Service port.
type flowChecks map[plan.ID]flowCheck

type flowCheck struct {
	sp *plan.ServicePort // now; nil: it is gone
	// gone are destinations that led to the Service port; those that still do are
	// sorted out when the rules are made.
	gone map[netip.AddrPort]struct{}
}

// add takes up what u changed; all: look at every Service port of the plan.
func (fc flowChecks) add(u *plan.Update, all bool) {
	for _, c := range u.Changed {
		if c.ID.Protocol != plan.UDP {
			continue
		}
		if _, due := fc[c.ID]; due || staleAfter(c) {
			fc.merge(c.ID, flowCheck{sp: c.New, gone: destinations(c.Old, u.Plan.Node)})
		}
	}
	if !all && !u.Node {
		return
	}
	for id, sp := range u.Plan.Services {
		if id.Protocol == plan.UDP {
			fc.merge(id, flowCheck{sp: sp})
		}
	}
}

// merge adds a later check of the same Service port.
func (fc flowChecks) merge(id plan.ID, later flowCheck) {
	gone := maps.Clone(fc[id].gone)
	if gone == nil {
		gone = map[netip.AddrPort]struct{}{}
	}
	maps.Copy(gone, later.gone)
	fc[id] = flowCheck{sp: later.sp, gone: gone}
}

// staleAfter reports whether c can leave stale flows behind. Endpoints joining
// others cannot.
func staleAfter(c plan.Change) bool {
	if c.Old == nil || c.New == nil || len(c.Old.Serving) == 0 {
		return true
	}
	for _, a := range c.Old.Serving {
		if !slices.Contains(c.New.Serving, a) {
			return true
		}
	}
	return !slices.EqualFunc(c.Old.Frontends, c.New.Frontends, func(a, b plan.Frontend) bool {
		return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port
	})
}

// destinations returns the addresses and ports on which sp answers.
func destinations(sp *plan.ServicePort, node *plan.Node) map[netip.AddrPort]struct{} {
	if sp == nil {
		return nil
	}
	out := make(map[netip.AddrPort]struct{}, len(sp.Frontends))
	for _, f := range sp.Frontends {
		if f.Kind != plan.NodePort {
			out[netip.AddrPortFrom(f.Addr, f.Port)] = struct{}{}
			continue
		}
		if node == nil {
			continue
		}
		for _, a := range node.NodePorts[sp.ID.Family].Addrs {
			out[netip.AddrPortFrom(a, f.Port)] = struct{}{}
		}
	}
	return out
}

// flowRules says for each original destination where its flows may lead. An
// absent destination is none of ours.
type flowRules map[netip.AddrPort]flowRule

type flowRule struct {
	gone    bool // no Service answers there: flows must not be translated
	serving []netip.AddrPort
}

// rules returns the rules of one family.
func (fc flowChecks) rules(f plan.Family, node *plan.Node) flowRules {
	out := flowRules{}
	for id, c := range fc {
		for dst := range c.gone {
			if _, live := out[dst]; id.Family == f && !live {
				out[dst] = flowRule{gone: true}
			}
		}
	}
	for id, c := range fc {
		if id.Family != f || c.sp == nil {
			continue
		}
		serving := slices.SortedFunc(slices.Values(c.sp.Serving), netip.AddrPort.Compare)
		for dst := range destinations(c.sp, node) {
			out[dst] = flowRule{serving: serving}
		}
	}
	return out
}

// stale is the verdict on a flow with original destination to whose replies come
// from from.
func (r flowRules) stale(to, from netip.AddrPort) bool {
	rule, ours := r[to]
	switch {
	case !ours:
		return false
	case rule.gone:
		return from != to
	}
	_, ok := slices.BinarySearchFunc(rule.serving, from, netip.AddrPort.Compare)
	return !ok
}
