package iptables

import (
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// view is a Service port as the rules see it: which pools are used, and through
// which chain each frontend leads to them.
type view struct {
	sp         *plan.ServicePort
	name       string
	proto      rule.Proto
	takes      [2]bool        // by Pool: some endpoint takes new flows
	candidates [2][]candidate // by Pool: those that do, if used; see nameCandidates
	used       [2]bool        // by Pool
	frontends  []viewed
	direct     []viewed // frontends that lead to a pool's chain without one of their own
	externals  []external
	sources    []sources
}

// candidate is an endpoint that takes new flows, and its chain.
type candidate struct {
	plan.Endpoint
	chain string
}

// viewed is a frontend with its effective routes.
type viewed struct {
	*plan.Frontend
	route  [3]plan.Route // a pool without candidates counts as Reject
	target string        // chain of the nat table; "" if nothing is forwarded
	source string        // chain of the filter table that checks source ranges, or ""
}

// external is a chain for frontends with the same routes.
type external struct {
	chain  string
	routes [3]plan.Route
}

// sources is a chain for one frontend's source ranges.
type sources struct {
	chain  string
	target string // where the allowed go on to; "" if nothing is forwarded
	allow  []netip.Prefix
}

func newView(sp *plan.ServicePort) *view {
	v := &view{sp: sp, name: sp.ID.String(), proto: rule.Proto(sp.ID.Protocol)}
	for pool, eps := range sp.Pools {
		v.takes[pool] = slices.ContainsFunc(eps, func(e plan.Endpoint) bool { return e.Weight > 0 })
	}
	v.frontends = make([]viewed, 0, len(sp.Frontends))
	for i := range sp.Frontends {
		v.look(&sp.Frontends[i])
	}
	return v
}

// nameCandidates fills in the candidates of the used pools; chained: they have chains.
func (v *view) nameCandidates(chained bool) {
	for pool, eps := range v.sp.Pools {
		if !v.used[pool] {
			continue
		}
		v.candidates[pool] = make([]candidate, 0, len(eps))
		for _, e := range eps {
			if e.Weight == 0 {
				continue
			}
			c := candidate{Endpoint: e}
			if chained {
				c.chain = endpointChain(v.sp.ID, e.Addr)
			}
			v.candidates[pool] = append(v.candidates[pool], c)
		}
	}
}

// look adds a frontend.
func (v *view) look(f *plan.Frontend) {
	w := viewed{Frontend: f, route: f.Route}
	forwards := false
	for o := range w.route {
		rt := &w.route[o]
		if rt.Verdict == plan.Forward && !v.takes[rt.Pool] {
			*rt = plan.Route{Verdict: plan.Reject}
		}
		if rt.Verdict != plan.Forward {
			rt.Pool, rt.SNAT = plan.Cluster, false
			continue
		}
		forwards = true
		v.used[rt.Pool] = true
	}
	switch {
	case !forwards:
	case f.Kind == plan.ClusterIP && isDirect(w.route):
		w.target = poolChain(v.sp.ID, w.route[0].Pool)
		v.direct = append(v.direct, w)
	default:
		w.target = v.externalChain(w.route)
	}
	if f.Allow != nil {
		s := sources{chain: v.sourcesChain(f), target: w.target, allow: f.Allow}
		if !slices.ContainsFunc(v.sources, func(o sources) bool { return o.chain == s.chain }) {
			v.sources = append(v.sources, s)
		}
		w.source = s.chain
		if w.target != "" {
			w.target = s.chain
		}
	}
	v.frontends = append(v.frontends, w)
}

// isDirect reports whether one masquerading rule in the pool's chain is all that
// the routes need: everything goes to one pool, and who is masqueraded is nobody,
// everybody, or all but pods.
func isDirect(r [3]plan.Route) bool {
	pod, node, outside := r[plan.FromPod], r[plan.FromNode], r[plan.FromOutside]
	return pod.Verdict == plan.Forward && node == outside && node.Verdict == plan.Forward &&
		pod.Pool == node.Pool && (node.SNAT || !pod.SNAT)
}

// externalChain returns the chain for the routes; the first has the classic name.
func (v *view) externalChain(routes [3]plan.Route) string {
	for _, e := range v.externals {
		if e.routes == routes {
			return e.chain
		}
	}
	name := prefixExternal + portHash(v.sp.ID)
	if len(v.externals) > 0 {
		var key []byte
		for _, rt := range routes {
			key = append(key, byte(rt.Verdict)+'0', byte(rt.Pool)+'0', map[bool]byte{false: '0', true: '1'}[rt.SNAT])
		}
		name = prefixExternal + nameHash(v.name, protoName(v.sp.ID.Protocol), "routes", string(key))
	}
	v.externals = append(v.externals, external{chain: name, routes: routes})
	return name
}

// sourcesChain returns the name of the chain for a frontend's source ranges; the
// first one's is the classic name.
func (v *view) sourcesChain(f *plan.Frontend) string {
	if len(v.sources) == 0 {
		return prefixSources + portHash(v.sp.ID)
	}
	return prefixSources + nameHash(v.name, protoName(v.sp.ID.Protocol), f.Kind.String(), f.Addr.String())
}
