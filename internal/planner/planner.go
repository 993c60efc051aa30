// Package planner turns facts into a plan: all Service semantics live here, and
// nowhere else. Which Services, addresses and endpoints count, what traffic
// policies, hints, conditions and masquerading mean, and who wins where two
// Services want the same, follows kube-proxy 1.37; where its modes differ from
// each other, one answer is taken for all.
//
// The planner is pure: facts and options in, a plan out, no clock and no kernel.
// It is incremental: the cost of one changed Service does not depend on how many
// there are, and the plan never depends on the order in which facts arrived.
package planner

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// Planner keeps the plan of one node up to date. It is not safe for concurrent
// use; only the channel that Changed returns may be used from anywhere.
type Planner struct {
	state *cluster.State

	opt     Options
	env     environment // what all Services depend on, as of the last update
	plan    plan.Plan
	started bool    // the plan covers all Services
	stale   bool    // everything has to be planned again
	plain   *choice // of Services without annotations

	services map[cluster.Name]*service // those that exist or have notes
	claims   claims
	held     map[plan.ID]hold
	touched  map[cluster.Name]struct{} // to be planned again though no fact changed
	notes    []plan.Note               // on the Node

	buf buffers
}

// hold keeps one ServicePort at a version of its own.
type hold struct {
	good    *plan.ServicePort // nil: not at all
	refused *plan.ServicePort // what the facts asked for, nil if nothing
}

// service is what was planned for one Service.
type service struct {
	name    cluster.Name
	facts   *cluster.Service    // nil: it does not exist
	created int64               // of the facts, Unix seconds
	first   bool                // a new node needs it before all others
	ports   []*plan.ServicePort // in the plan now, sorted by ID
	wanted  []wanted            // frontends that it claims, sorted as by wantedBy
	choice  *choice             // of the facts
	notes   []plan.Note
}

// New returns a Planner of the facts in s. It reads nothing yet.
func New(s *cluster.State, o Options) *Planner {
	return &Planner{
		state: s,
		opt:   o.clone(),
		plain: parseAnnotations(nil, o.DefaultCheck),
		plan: plan.Plan{
			Services: map[plan.ID]*plan.ServicePort{},
			Health:   map[plan.HealthID]plan.HealthPort{},
		},
		services: map[cluster.Name]*service{},
		claims:   newClaims(),
		held:     map[plan.ID]hold{},
		touched:  map[cluster.Name]struct{}{},
	}
}

// Changed has a value whenever facts changed that Update has not seen yet. After
// SetOptions, Hold and Release the caller has to call Update by itself.
func (p *Planner) Changed() <-chan struct{} { return p.state.Changed() }

// SetOptions replaces the options. The next Update plans what they change.
func (p *Planner) SetOptions(o Options) {
	p.opt = o.clone()
	p.plain = parseAnnotations(nil, o.DefaultCheck)
	p.stale = true
}

// Hold keeps id at the version good, nil: out of the plan, because what the facts
// ask for now cannot be carried out. It ends when the facts ask for something
// else, or with Release. The next Update carries it.
func (p *Planner) Hold(id plan.ID, good *plan.ServicePort) {
	refused := p.plan.Services[id]
	if h, ok := p.held[id]; ok {
		refused = h.refused
	}
	p.held[id] = hold{good, refused}
	p.touched[cluster.Name(id.Service())] = struct{}{}
}

// Release ends a Hold, so that the next Update carries what the facts ask for.
func (p *Planner) Release(id plan.ID) {
	if _, ok := p.held[id]; ok {
		delete(p.held, id)
		p.touched[cluster.Name(id.Service())] = struct{}{}
	}
}

// Ready reports whether the facts suffice for a plan that may replace an earlier
// one; missing names what is awaited, and the remedy where waiting may not help.
func (p *Planner) Ready() (ok bool, missing []string) {
	if ok, missing = p.state.Complete(); !ok {
		return false, missing // what is absent may only not have come yet
	}
	n := p.state.Node()
	if n == nil {
		n = p.lastNode()
	}
	podCIDRs := p.opt.Local.Kind == NodeCIDR
	switch {
	case n == nil && (!p.opt.NodeOptional || podCIDRs):
		missing = append(missing, fmt.Sprintf("there is no Node named %q: set --hostname-override to the name that this node's Node object has", p.opt.NodeName))
	case podCIDRs && len(n.PodCIDRs) == 0:
		missing = append(missing, fmt.Sprintf("Node %q has no spec.podCIDRs, which detectLocalMode NodeCIDR needs: let the controller manager allocate them or choose another detectLocalMode", n.Name))
	}
	return len(missing) == 0, missing
}

// First plans only what a new node needs to come up: the API server's Service and
// cluster DNS. The next Update carries the rest.
func (p *Planner) First() plan.Update {
	u := plan.Update{Plan: &p.plan, Partial: true}
	p.env = p.environment()
	names := map[cluster.Name]struct{}{}
	for _, n := range p.state.Names() {
		if svc, _ := p.state.Service(n); svc != nil && neededFirst(svc) {
			names[n] = struct{}{}
		}
	}
	p.planServices(names, &u)
	p.planNode(&u)
	return u
}

// Update plans everything that changed since the last call. Its Changed lists the
// Services that a new node needs first, then the others, by ID.
func (p *Planner) Update() plan.Update {
	u := plan.Update{Plan: &p.plan}
	d := p.state.Drain()
	u.Triggers = d.Triggers
	env := p.environment()
	everything := !p.started || p.stale || !env.equal(&p.env)
	if !slices.Equal(env.guarded, p.env.guarded) {
		p.stale = true // Services may claim other frontends
	}
	p.env = env
	if everything {
		for n := range p.services {
			d.Services[n] = struct{}{}
		}
		for _, n := range p.state.Names() {
			d.Services[n] = struct{}{}
		}
	}
	for n := range p.touched {
		d.Services[n] = struct{}{}
	}
	clear(p.touched)
	if p.planServices(d.Services, &u) || everything || d.Node || d.Host || d.CIDRs {
		p.planNode(&u)
	}
	p.started, p.stale = true, false
	return u
}

// work is one Service to plan.
type work struct {
	s      *service
	slices []*cluster.Slice
}

// planServices plans the named Services and all others that this affects, and
// adds the differences to u. It reports whether the Node's part of the plan may
// have changed with them.
func (p *Planner) planServices(names map[cluster.Name]struct{}, u *plan.Update) (node bool) {
	p.claims.begin(p.env.host)
	todo := make([]work, 0, len(names))
	for n := range names {
		todo = append(todo, p.admit(n))
	}
	for n := range p.claims.affected {
		if _, ok := names[n]; !ok {
			_, sls := p.state.Service(n)
			todo = append(todo, work{p.services[n], sls})
		}
	}
	slices.SortFunc(todo, func(a, b work) int { return compareServices(a.s, b.s) })
	for _, w := range todo {
		p.planService(w.s, w.slices, u)
	}
	return p.claims.nodeTouched
}

// admit takes over the facts of one Service and claims its frontends.
func (p *Planner) admit(n cluster.Name) work {
	svc, sls := p.state.Service(n)
	s := p.services[n]
	if s == nil {
		s = &service{name: n}
		p.services[n] = s
	}
	if svc == s.facts && !p.stale {
		return work{s, sls}
	}
	recreated := svc != nil && s.facts != nil && svc.Created != s.created
	s.facts, s.first = svc, svc != nil && neededFirst(svc)
	if svc != nil {
		s.created = svc.Created
	}
	s.choice = p.plain
	if svc != nil && len(svc.Annotations) > 0 {
		s.choice = parseAnnotations(svc.Annotations, p.opt.DefaultCheck)
	}
	p.claims.set(s, p.wantedBy(svc), recreated)
	return work{s, sls}
}

// compareServices orders Services as they are to be carried out.
func compareServices(a, b *service) int {
	if a.first != b.first {
		if a.first {
			return -1
		}
		return 1
	}
	return compareNames(a.name, b.name)
}

func compareNames(a, b cluster.Name) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// neededFirst: nothing comes up in a cluster without these.
func neededFirst(svc *cluster.Service) bool {
	return svc.DNS || svc.Name == cluster.Name{Namespace: "default", Name: "kubernetes"}
}

// Why returns the notes on all objects for which keep is true, nil: all, sorted.
func (p *Planner) Why(keep func(plan.Note) bool) []plan.Note {
	var out []plan.Note
	add := func(notes []plan.Note) {
		for _, n := range notes {
			if keep == nil || keep(n) {
				out = append(out, n)
			}
		}
	}
	add(p.notes)
	for _, s := range p.services {
		add(s.notes)
	}
	slices.SortFunc(out, compareNotes)
	return out
}
