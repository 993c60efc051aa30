package plan

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
)

// Compare orders IDs by namespace, name, port name, protocol and family.
func (id ID) Compare(o ID) int {
	return cmp.Or(
		cmp.Compare(id.Namespace, o.Namespace),
		cmp.Compare(id.Name, o.Name),
		cmp.Compare(id.Port, o.Port),
		cmp.Compare(id.Protocol, o.Protocol),
		cmp.Compare(id.Family, o.Family),
	)
}

// Compare orders HealthIDs by namespace, name and family.
func (h HealthID) Compare(o HealthID) int {
	return cmp.Or(
		cmp.Compare(h.Service.Namespace, o.Service.Namespace),
		cmp.Compare(h.Service.Name, o.Service.Name),
		cmp.Compare(h.Family, o.Family),
	)
}

// Equal reports whether both say the same; nil equals only nil.
func (s *ServicePort) Equal(o *ServicePort) bool {
	if s == o || s == nil || o == nil {
		return s == o
	}
	return s.ID == o.ID && s.Affinity == o.Affinity && s.Chosen() == o.Chosen() &&
		slices.EqualFunc(s.Frontends, o.Frontends, Frontend.Equal) &&
		slices.Equal(s.Pools[Cluster], o.Pools[Cluster]) &&
		slices.Equal(s.Pools[Local], o.Pools[Local]) &&
		slices.Equal(s.Serving, o.Serving) &&
		slices.Equal(s.Draining, o.Draining)
}

// Equal reports whether both say the same. An empty Allow, which nobody passes,
// differs from nil.
func (f Frontend) Equal(o Frontend) bool {
	return f.Kind == o.Kind && f.Addr == o.Addr && f.Port == o.Port && f.Route == o.Route &&
		(f.Allow == nil) == (o.Allow == nil) && slices.Equal(f.Allow, o.Allow)
}

// Compare orders frontends by kind, address and port.
func (f Frontend) Compare(o Frontend) int {
	return cmp.Or(cmp.Compare(f.Kind, o.Kind), f.Addr.Compare(o.Addr), cmp.Compare(f.Port, o.Port))
}

// Equal reports whether both say the same; nil equals only nil.
func (n *Node) Equal(o *Node) bool {
	if n == o || n == nil || o == nil {
		return n == o
	}
	return n.Name == o.Name && slices.Equal(n.Addrs, o.Addrs) &&
		slices.Equal(n.ServiceCIDRs, o.ServiceCIDRs) &&
		maps.EqualFunc(n.NodePorts, o.NodePorts, func(a, b NodePorts) bool {
			return a.All == b.All && a.Loopback == b.Loopback && slices.Equal(a.Addrs, b.Addrs)
		}) &&
		maps.EqualFunc(n.Local, o.Local, func(a, b LocalTraffic) bool {
			return a.Kind == b.Kind && a.Name == b.Name && slices.Equal(a.Prefixes, b.Prefixes)
		})
}

// Equal reports whether both plans say the same.
func (p *Plan) Equal(o *Plan) bool {
	return p.Node.Equal(o.Node) && maps.Equal(p.Health, o.Health) &&
		maps.EqualFunc(p.Services, o.Services, (*ServicePort).Equal)
}

// contains reports whether any of the prefixes covers a.
func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
