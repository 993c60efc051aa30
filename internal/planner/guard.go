package planner

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Guard refuses external and load-balancer addresses with which the author of one
// Service could take traffic that is not theirs (CVE-2020-8554): who may write a
// Service, or its status, may name any address there. The zero value refuses none.
type Guard struct {
	// ClusterRanges refuses what belongs to the cluster itself: the addresses of this
	// Node, its and the cluster's pod ranges as far as they are configured, and the
	// Service ranges.
	ClusterRanges bool
	// Refuse lists further ranges, such as those of all nodes.
	Refuse []netip.Prefix
	// Allow, if there are any of a family, are the only ranges that its addresses may be
	// in.
	Allow []netip.Prefix
}

func (g Guard) clone() Guard {
	return Guard{g.ClusterRanges, slices.Clone(g.Refuse), slices.Clone(g.Allow)}
}

// guarded returns the ranges in which no external address may be.
func (p *Planner) guarded(e *environment) []netip.Prefix {
	g := &p.opt.Guard
	out := slices.Clone(g.Refuse)
	if !g.ClusterRanges {
		return out
	}
	for _, a := range e.own {
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	if e.node != nil {
		out = append(out, e.node.PodCIDRs...)
	}
	out = append(out, p.opt.Local.CIDRs...)
	return append(out, p.state.ServiceCIDRs()...)
}

// refused says why an external or load-balancer address is not served, "" if it is.
func (p *Planner) refused(a netip.Addr) string {
	for _, r := range p.env.guarded {
		if r.Contains(a) {
			return fmt.Sprintf("is in %s, which belongs to the cluster or is refused by externalAddresses.refuse", r)
		}
	}
	if allow := ofFamily(p.opt.Guard.Allow, plan.FamilyOf(a)); len(allow) > 0 && !covers(allow, a) {
		return fmt.Sprintf("is in none of externalAddresses.allow %v", allow)
	}
	return ""
}
