package probe

import (
	"container/heap"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// firstRound is the time in which the endpoints that are there at the start are probed
// first, if the limit allows it.
const firstRound = time.Second

// Follow takes up which endpoints there are to probe. What is new counts as healthy;
// an endpoint whose Service changed its health check keeps its state until the new
// check knows better.
func (p *Prober) Follow(u plan.Update) {
	p.mu.Lock()
	defer p.mu.Unlock()
	touched := map[user]struct{}{}
	for _, c := range u.Changed {
		if probedAlike(c.Old, c.New) { // as after a result of ours
			continue
		}
		for e := range endpoints(c.New) {
			p.join(e, c.New.Policy.Check, touched)
		}
		for e := range endpoints(c.Old) {
			p.leave(e, c.Old.Policy.Check, touched)
		}
	}
	p.started = p.started || !u.Partial
	if len(touched) == 0 {
		return
	}
	for user := range touched {
		p.tell(user)
	}
	p.gauge()
	p.nudge()
}

// probedAlike reports whether both have the same endpoints and check.
func probedAlike(a, b *plan.ServicePort) bool {
	if a == nil || b == nil || a.Chosen().Check != b.Chosen().Check {
		return false
	}
	sameAddr := func(a, b plan.Endpoint) bool { return a.Addr == b.Addr }
	return slices.EqualFunc(a.Pools[plan.Cluster], b.Pools[plan.Cluster], sameAddr) &&
		slices.EqualFunc(a.Pools[plan.Local], b.Pools[plan.Local], sameAddr)
}

// endpoints returns the endpoints of sp that are to be probed.
func endpoints(sp *plan.ServicePort) map[user]struct{} {
	if sp == nil || sp.Chosen().Check.Method == plan.NoCheck {
		return nil
	}
	out := make(map[user]struct{}, len(sp.Pools[plan.Cluster]))
	for _, pool := range sp.Pools {
		for _, e := range pool {
			out[user{sp.ID.Service(), e.Addr}] = struct{}{}
		}
	}
	return out
}

// join adds one Service port's use of a target.
func (p *Prober) join(u user, check plan.HealthCheck, touched map[user]struct{}) {
	k := keyOf(u.endpoint, check)
	before := p.users[u]
	t := p.targets[k]
	if t == nil {
		t = &target{key: k, index: -1}
		soon := check.Interval
		if !p.started {
			soon, t.streak = min(soon, firstRound), check.Fall-1
		}
		t.next = time.Now().Add(time.Duration(p.cfg.Spread() * float64(soon)))
		if before != nil && before.failing {
			t.failing, t.reason, t.since = true, before.reason, before.since
			p.failing++
		}
		p.targets[k] = t
		heap.Push(&p.due, t)
	}
	if i := t.find(u); i >= 0 {
		t.uses[i].ports++
	} else {
		t.uses = append(t.uses, use{u, 1})
	}
	if before != t {
		p.users[u] = t
		touched[u] = struct{}{}
	}
}

// leave ends one Service port's use of a target, and the target with its last.
func (p *Prober) leave(u user, check plan.HealthCheck, touched map[user]struct{}) {
	k := keyOf(u.endpoint, check)
	t := p.targets[k]
	if t == nil {
		return
	}
	i := t.find(u)
	if i < 0 {
		return
	}
	if t.uses[i].ports--; t.uses[i].ports > 0 {
		return
	}
	t.uses = slices.Delete(t.uses, i, i+1)
	if p.users[u] == t {
		delete(p.users, u)
		touched[u] = struct{}{}
	}
	if len(t.uses) > 0 {
		return
	}
	t.gone = true
	delete(p.targets, k)
	if t.index >= 0 {
		heap.Remove(&p.due, t.index)
	}
	if t.failing {
		p.failing--
	}
	touched[u] = struct{}{}
}

// find returns the index of a user in uses, -1: it has none.
func (t *target) find(u user) int {
	return slices.IndexFunc(t.uses, func(o use) bool { return o.user == u })
}
