package table

import (
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// ClassOf says how packets to a frontend are treated, and which pool the virtual
// server at its address has. That is the pool for packets from outside wherever
// origins differ, so that nothing from outside leaves the node by mistake.
func (s Settings) ClassOf(fe *plan.Frontend) (*Class, plan.Pool) {
	routes := fe.Route
	c := &Class{PodsUnknown: s.Local.Kind == plan.LocalUnknown}
	if c.PodsUnknown {
		routes[plan.FromPod] = routes[plan.FromOutside]
	}
	var uses [2]bool
	drops := false
	for _, rt := range routes {
		uses[rt.Pool] = uses[rt.Pool] || rt.Verdict == plan.Forward
		drops = drops || rt.Verdict == plan.Drop
	}
	base := plan.Cluster
	if uses[plan.Local] || uses[plan.Cluster] && drops {
		base = plan.Local
	}
	splits := false
	for o, rt := range routes {
		c.Routes[o] = Treatment{Verdict: rt.Verdict}
		if rt.Verdict == plan.Forward {
			c.Routes[o].Masq = rt.SNAT
			c.Routes[o].Marked = rt.Pool != base
			splits = splits || rt.Pool != base
		}
	}
	// The node reaches an address of its own with that address as source, which no
	// endpoint could answer to. Behind a mark that is left to the last hook.
	if n := &c.Routes[plan.FromNode]; n.Verdict == plan.Forward {
		n.Masq = !n.Marked
	}
	switch {
	case fe.Kind == plan.ExternalIP || fe.Kind == plan.LoadBalancerIP:
		c.Place = Steered
	case fe.Kind == plan.NodePort && splits:
		c.Place = OnNode
	}
	return c, base
}

// Marks reports whether some frontend of a Service port needs a virtual server by mark.
// Only then it has a number: two seldom want the same, so that nearly all have theirs
// whatever the order in which they came.
func (s Settings) Marks(sp *plan.ServicePort) bool {
	return slices.ContainsFunc(sp.Frontends, func(fe plan.Frontend) bool {
		c, _ := s.ClassOf(&fe)
		return c.Marks()
	})
}
