package planner

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// candidate is an endpoint that matches a Service port.
type candidate struct {
	addr netip.AddrPort
	ep   *cluster.Endpoint
	// here, elsewhere: it says that it is on this node, or on another one.
	here, elsewhere bool
}

func (c *candidate) ready() bool { return c.ep.Flags&cluster.Ready != 0 }

// fallback: takes traffic if no endpoint is ready.
func (c *candidate) fallback() bool {
	const both = cluster.Serving | cluster.Terminating
	return c.ep.Flags&both == both
}

// rank orders endpoints of one address and port by usefulness, best first.
func (c *candidate) rank() int {
	f := c.ep.Flags
	switch {
	case f&cluster.Ready != 0 && f&cluster.Terminating == 0:
		return 0
	case f&cluster.Ready != 0:
		return 1
	case c.fallback():
		return 2
	case f&cluster.Serving != 0:
		return 3
	}
	return 4
}

// compareCandidates orders by address and port, and those of one address by
// usefulness, then by what makes the choice the same in every order of arrival.
func compareCandidates(a, b candidate) int {
	if c := a.addr.Compare(b.addr); c != 0 {
		return c
	}
	return cmp.Or(
		cmp.Compare(a.rank(), b.rank()),
		cmp.Compare(text(a.ep.Node), text(b.ep.Node)),
		cmp.Compare(topology(a.ep).HintNodes, topology(b.ep).HintNodes),
		cmp.Compare(topology(a.ep).HintZones, topology(b.ep).HintZones),
		cmp.Compare(topology(a.ep).Zone, topology(b.ep).Zone),
	)
}

// collect puts the endpoints of one Service port in one family into buf.found,
// sorted, each address and port once: of duplicates, which slices hold while an
// endpoint moves between them or an address is used again, the most useful stays.
func (p *Planner) collect(sls []*cluster.Slice, port *cluster.ServicePort, f plan.Family) {
	found := p.buf.found[:0]
	name, unset := interned(port.Name), cluster.Intern("")
	for _, sl := range sls {
		if sl.IPv6 != (f == plan.IPv6) {
			continue
		}
		for i := range sl.Ports {
			sp := &sl.Ports[i]
			if sp.Port == 0 || sp.Protocol != port.Protocol || interned(sp.Name) != name {
				continue
			}
			for j := range sl.Endpoints {
				ep := &sl.Endpoints[j]
				if !ep.Addr.IsValid() || plan.FamilyOf(ep.Addr) != f {
					continue
				}
				c := candidate{addr: netip.AddrPortFrom(ep.Addr, sp.Port), ep: ep}
				if node := interned(ep.Node); node != unset && p.env.name != unset {
					c.here = node == p.env.name
					c.elsewhere = !c.here
				}
				found = append(found, c)
			}
		}
	}
	slices.SortFunc(found, compareCandidates)
	p.buf.found = slices.CompactFunc(found, func(a, b candidate) bool { return a.addr == b.addr })
}

// pools fills buf.cluster and buf.local from buf.found: ready endpoints, without
// any the terminating ones that still serve. Hints narrow down the ready ones of
// the cluster pool only. Of each pool those take no new flows that fail their
// health check.
func (d *draft) pools(protocol plan.Protocol) {
	d.choose()
	if c := d.s.choice.policy(protocol); c != nil && c.Check.Method != plan.NoCheck {
		spare(d.p.buf.cluster, d.failing)
		spare(d.p.buf.local, d.failing)
	}
}

// choose fills the pools.
func (d *draft) choose() {
	b := &d.p.buf
	b.cluster, b.local = b.cluster[:0], b.local[:0]
	near := d.p.near(b.found)
	for i := range b.found {
		c := &b.found[i]
		if !c.ready() {
			continue
		}
		if near == nil || near(c.ep) {
			b.cluster = append(b.cluster, d.endpoint(c))
		}
		if c.here {
			b.local = append(b.local, d.endpoint(c))
		}
	}
	needCluster, needLocal := len(b.cluster) == 0, len(b.local) == 0
	if !needCluster && !needLocal {
		return
	}
	for i := range b.found {
		c := &b.found[i]
		if !c.fallback() {
			continue
		}
		if needCluster {
			b.cluster = append(b.cluster, d.endpoint(c))
		}
		if needLocal && c.here {
			b.local = append(b.local, d.endpoint(c))
		}
	}
}

func (d *draft) endpoint(c *candidate) plan.Endpoint {
	return plan.Endpoint{
		Addr: c.addr, OnNode: c.here, Elsewhere: c.elsewhere,
		Weight: d.s.choice.weights.of(c.ep, c.here, d.p.env.zone),
	}
}

// serving fills buf.serving with the endpoints whose flows stay valid: those that have
// any of the flags with, 0: whatever they have, and none of without.
func (p *Planner) serving(with, without cluster.EndpointFlags) {
	p.buf.serving = p.buf.serving[:0]
	for i := range p.buf.found {
		c := &p.buf.found[i]
		if (with == 0 || c.ep.Flags&with != 0) && c.ep.Flags&without == 0 {
			p.buf.serving = append(p.buf.serving, c.addr)
		}
	}
}

// draining returns the terminating endpoints that no pool of a TCP port has.
func (p *Planner) draining(sp *plan.ServicePort) []netip.AddrPort {
	out := p.buf.draining[:0]
	for i := range p.buf.found {
		c := &p.buf.found[i]
		if sp.ID.Protocol == plan.TCP && c.ep.Flags&cluster.Terminating != 0 &&
			!pooled(sp.Pools[plan.Cluster], c.addr) && !pooled(sp.Pools[plan.Local], c.addr) {
			out = append(out, c.addr)
		}
	}
	p.buf.draining = out
	return out
}

// pooled reports whether a pool has an address.
func pooled(pool []plan.Endpoint, a netip.AddrPort) bool {
	_, ok := slices.BinarySearchFunc(pool, a, func(e plan.Endpoint, a netip.AddrPort) int { return e.Addr.Compare(a) })
	return ok
}

// near returns the test that hints put on ready endpoints, nil: none. Hints of
// a kind count only if every ready endpoint has them and one of them is for this
// node, or its zone; hints for nodes go first.
func (p *Planner) near(found []candidate) func(*cluster.Endpoint) bool {
	nodes, zones := true, p.env.zone != ""
	forNode, forZone := false, false
	var last cluster.Topology // neighbours share theirs: look at each once
	seen := false
	for i := range found {
		c := &found[i]
		if !c.ready() || seen && c.ep.Topology == last {
			continue
		}
		last, seen = c.ep.Topology, true
		h := topology(c.ep)
		nodes = nodes && h.HintNodes != ""
		zones = zones && h.HintZones != ""
		if !nodes && !zones {
			return nil
		}
		forNode = forNode || listed(h.HintNodes, p.opt.NodeName)
		forZone = forZone || listed(h.HintZones, p.env.zone)
	}
	switch {
	case !seen:
		return nil
	case nodes && forNode:
		return func(ep *cluster.Endpoint) bool { return listed(topology(ep).HintNodes, p.opt.NodeName) }
	case zones && forZone:
		return func(ep *cluster.Endpoint) bool { return listed(topology(ep).HintZones, p.env.zone) }
	}
	return nil
}

// listed reports whether a list as in cluster.TopologySet has the name.
func listed(list, name string) bool {
	for list != "" && name != "" {
		head, tail, _ := strings.Cut(list, "\n")
		if head == name {
			return true
		}
		list = tail
	}
	return false
}

// topology returns an endpoint's zone and hints, none for the zero handle.
func topology(ep *cluster.Endpoint) cluster.TopologySet {
	if ep.Topology == (cluster.Topology{}) {
		return cluster.TopologySet{}
	}
	return ep.Topology.Value()
}

// text returns s as a string, "" for the zero handle.
func text(s cluster.String) string {
	if s == (cluster.String{}) {
		return ""
	}
	return s.Value()
}

// interned returns s, the handle of "" for the zero handle.
func interned(s cluster.String) cluster.String {
	if s == (cluster.String{}) {
		return cluster.Intern("")
	}
	return s
}
