package plan

import (
	"iter"
	"net/netip"
	"slices"
)

// ExternalWithin returns the external and load-balancer addresses of Services, of one
// family, that lie within ServiceCIDRs, sorted: undefined ports of these are left alone,
// unlike those of addresses that no Service has.
func (n *Node) ExternalWithin(services iter.Seq[*ServicePort], family Family) []netip.Addr {
	var out []netip.Addr
	for sp := range services {
		for i := range sp.Frontends {
			f := &sp.Frontends[i]
			external := f.Kind == ExternalIP || f.Kind == LoadBalancerIP
			if external && FamilyOf(f.Addr) == family && contains(n.ServiceCIDRs, f.Addr) {
				out = append(out, f.Addr)
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}
