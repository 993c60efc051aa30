package planner

import (
	"slices"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// planService plans s, whose slices are sls, and adds the differences to u.
func (p *Planner) planService(s *service, sls []*cluster.Slice, u *plan.Update) {
	n := s.name
	d := draft{p: p, s: s, svc: s.facts, slices: sls, failing: p.state.Failing(n), notes: noter{kind: "Service", namespace: n.Namespace, name: n.Name}}
	if s.facts != nil {
		d.notes.uid = string(s.facts.UID)
	}
	p.buf.ports, p.buf.kept = p.buf.ports[:0], p.buf.kept[:0]
	health := [...]plan.HealthPort{{}, {}}
	ignored := d.remark()
	for i, f := range plan.Families {
		if !ignored && slices.Contains(p.opt.Families, f) {
			health[i] = d.planFamily(f)
		}
	}
	p.keepHeld(n)
	p.replace(s, u)
	for i, f := range plan.Families {
		p.replaceHealth(plan.HealthID{Service: plan.Name(n), Family: f}, health[i], u)
	}
	u.Notes = appendNew(u.Notes, s.notes, d.notes.list)
	s.notes = slices.Clip(d.notes.list)
	if s.facts == nil && len(s.notes) == 0 && len(s.ports) == 0 {
		delete(p.services, n)
	}
}

// build makes a ServicePort of what is in the buffers; it returns base if that
// says the same, and shares with it, and with the Service's other ports, what is
// equal.
func (d *draft) build(id plan.ID, base *plan.ServicePort) *plan.ServicePort {
	p := d.p
	var old plan.ServicePort
	if base != nil {
		old = *base
	}
	b := &p.buf
	b.serving = b.serving[:0]
	next := plan.ServicePort{ID: id, Affinity: d.svc.Affinity, Policy: d.s.choice.policy(id.Protocol)}
	switch {
	case id.Protocol == plan.UDP:
		p.serving(cluster.Serving|cluster.Ready, 0)
	case id.Protocol == plan.TCP && next.Chosen().FlowsEndAfter(false) != 0:
		p.serving(0, cluster.Terminating)
	}
	sibling := &plan.ServicePort{}
	if n := len(b.ports); n > 0 && b.ports[n-1] != nil {
		sibling = b.ports[n-1]
	}
	next.Pools[plan.Cluster] = share(b.cluster, old.Pools[plan.Cluster], sibling.Pools[plan.Cluster])
	next.Pools[plan.Local] = share(b.local, next.Pools[plan.Cluster], old.Pools[plan.Local], sibling.Pools[plan.Local])
	next.Serving = share(b.serving, old.Serving)
	next.Draining = share(p.draining(&next), old.Draining)
	if next.Frontends = old.Frontends; !slices.EqualFunc(b.frontends, old.Frontends, plan.Frontend.Equal) {
		next.Frontends = exact(b.frontends)
	}
	if next.Equal(base) {
		return base
	}
	made := next // a variable of its own, so that only a new one is allocated
	return &made
}

// share returns the first of have that equals s, else a copy of s.
func share[T comparable](s []T, have ...[]T) []T {
	if len(s) == 0 {
		return nil
	}
	for _, h := range have {
		if slices.Equal(s, h) {
			return h
		}
	}
	return exact(s)
}

// exact copies s without spare capacity.
func exact[T any](s []T) []T {
	out := make([]T, len(s))
	copy(out, s)
	return out
}

// keepHeld settles the Service's held ports that the facts do not ask for: one that
// was held against its removal stays, for the others the hold has ended.
func (p *Planner) keepHeld(n cluster.Name) {
	for id, h := range p.held {
		switch {
		case cluster.Name(id.Service()) != n || slices.Contains(p.buf.kept, id):
		case h.refused != nil:
			delete(p.held, id)
		case h.good != nil:
			p.buf.ports = append(p.buf.ports, h.good)
		}
	}
}

// replace puts buf.ports in the place of the Service's ports and adds the
// differences to u.
func (p *Planner) replace(s *service, u *plan.Update) {
	now := p.buf.ports
	slices.SortFunc(now, func(a, b *plan.ServicePort) int { return a.ID.Compare(b.ID) })
	was := s.ports
	changed := false
	for len(was)+len(now) > 0 {
		c := 0
		switch {
		case len(now) == 0:
			c = -1
		case len(was) == 0:
			c = 1
		default:
			c = was[0].ID.Compare(now[0].ID)
		}
		var change plan.Change
		if c <= 0 {
			change.ID, change.Old = was[0].ID, was[0]
			was = was[1:]
		}
		if c >= 0 {
			change.ID, change.New = now[0].ID, now[0]
			now = now[1:]
		}
		if change.Old == change.New {
			continue
		}
		changed = true
		u.Changed = append(u.Changed, change)
		if change.New == nil {
			delete(p.plan.Services, change.ID)
		} else {
			p.plan.Services[change.ID] = change.New
		}
	}
	if changed {
		s.ports = exact(p.buf.ports)
	}
}

// replaceHealth puts h, zero: none, in the place of the health-check port id.
func (p *Planner) replaceHealth(id plan.HealthID, h plan.HealthPort, u *plan.Update) {
	if p.plan.Health[id] == h {
		return
	}
	u.Health = append(u.Health, id)
	if h.Port == 0 {
		delete(p.plan.Health, id)
	} else {
		p.plan.Health[id] = h
	}
}
