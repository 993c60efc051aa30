package planner

import "github.com/svcproxy/svcproxy/internal/plan"

// traffic is all that the routes of a frontend depend on.
type traffic struct {
	external  bool // node port, external or load-balancer address; else ClusterIP
	local     bool // the traffic policy that applies to the frontend is Local
	any       bool // there is a usable endpoint somewhere
	here      bool // there is one on this node
	podsKnown bool // this node's pods can be recognised
	masqAll   bool // masquerade all traffic to ClusterIPs
}

// routes is the policy table: the whole of traffic policies, of the short cut that
// pods and the node take to external addresses, and of masquerading.
func (t traffic) routes() [3]plan.Route {
	switch {
	case !t.any:
		return all(plan.Route{Verdict: plan.Reject})
	case t.external && t.local:
		return t.externalLocal()
	case t.external:
		return all(forward(plan.Cluster, true))
	case t.local && !t.here:
		return all(plan.Route{Verdict: plan.Drop})
	}
	pool := plan.Cluster
	if t.local {
		pool = plan.Local
	}
	// Without a way to tell pods from others nobody is masqueraded: pods must
	// reach a ClusterIP with their own address.
	others := t.masqAll || t.podsKnown
	return [3]plan.Route{
		plan.FromPod:     forward(pool, t.masqAll),
		plan.FromNode:    forward(pool, others),
		plan.FromOutside: forward(pool, others),
	}
}

// externalLocal keeps the client's address, for which traffic from outside must
// stay on this node. Pods and the node itself would have to leave the node to find
// another one with endpoints, so they go to any endpoint right away.
func (t traffic) externalLocal() [3]plan.Route {
	outside := plan.Route{Verdict: plan.Drop}
	if t.here {
		outside = forward(plan.Local, false)
	}
	pod := outside
	if t.podsKnown {
		pod = forward(plan.Cluster, false)
	}
	return [3]plan.Route{
		plan.FromPod:     pod,
		plan.FromNode:    forward(plan.Cluster, true),
		plan.FromOutside: outside,
	}
}

func forward(pool plan.Pool, snat bool) plan.Route {
	return plan.Route{Verdict: plan.Forward, Pool: pool, SNAT: snat}
}

func all(r plan.Route) [3]plan.Route { return [3]plan.Route{r, r, r} }
