package iptables

import (
	"iter"
	"maps"
	"slices"

	"github.com/svcproxy/svcproxy/internal/delta"
	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// manyEndpoints is from where on a cluster is large: rules per endpoint lose their
// comments and, if the kernel can do without, chains. It is so down to half of that:
// a cluster near the limit must not be rewritten back and forth.
const manyEndpoints = 1000

// desired is what one family's rules should be, and by which sums they are known
// to be in the kernel. It does no I/O. Texts are not kept: a chain that has to be
// written is rendered again.
type desired struct {
	family  plan.Family
	mark    uint32
	liberal bool

	hash     rule.Hasher
	track    *delta.Tracker[rule.Chain, uint64]
	services map[plan.ID]*plan.ServicePort
	node     *plan.Node
	health   map[plan.HealthID]plan.HealthPort
	comments bool
	many     int  // manyEndpoints, but for tests
	toItself bool // the kernel can tell packets of an endpoint to itself
	r        *renderer

	dirty     map[plan.ID]struct{} // some chain of it may have to be written
	shared    []rule.Chain         // chains that all packets pass, as wanted now
	stale     bool                 // these have to be rendered again
	staleEnds bool                 // only the one that depends on endpoints has to be
	text      *rule.Set            // of those that are pending; nil if not rendered
	rules     map[sys.Table]int    // number of rules wanted, by table
	sharedNum map[sys.Table]int    // of these, in the shared chains
	recount   bool                 // rules is being summed up from nothing
}

func newDesired(f plan.Family, mark uint32, liberal bool) *desired {
	return &desired{
		family: f, mark: mark, liberal: liberal,
		hash: rule.NewHasher(), track: delta.New[rule.Chain, uint64](),
		services: map[plan.ID]*plan.ServicePort{}, dirty: map[plan.ID]struct{}{},
		health: map[plan.HealthID]plan.HealthPort{}, comments: true, many: manyEndpoints,
		rules: map[sys.Table]int{}, sharedNum: map[sys.Table]int{},
	}
}

// follow makes d what p says. changed is what differs from the last plan followed;
// with all, everything is looked at. It returns the Service ports that cannot be
// written as rules, which stay as they were, and what each ServicePort that changed
// was before.
func (d *desired) follow(p *plan.Plan, changed []plan.Change, all bool) (undo map[plan.ID]*plan.ServicePort, bad map[plan.ID]error, err error) {
	if !p.Node.Equal(d.node) {
		all = true
	}
	s := settings{family: d.family, mark: d.mark, liberal: d.liberal, comments: d.commented(p, changed, all), node: p.Node}
	s.compact = !s.comments && d.toItself
	if all = all || d.r == nil || s.comments != d.comments || s.compact != d.r.compact; all {
		r, err := newRenderer(s)
		if err != nil {
			return nil, nil, err
		}
		for _, sp := range d.services { // by now in other chains, perhaps
			for _, c := range d.r.service(sp).Chains {
				d.track.Unwant(c.Chain)
			}
		}
		d.r, d.node, d.comments, d.stale = r, p.Node, s.comments, true
	}
	undo, bad = map[plan.ID]*plan.ServicePort{}, map[plan.ID]error{}
	set := func(id plan.ID, sp *plan.ServicePort) {
		if sp != nil {
			if why := sp.Validate(); why != nil {
				bad[id] = why
				return
			}
		}
		if old := d.services[id]; old != sp {
			undo[id] = old
		}
		d.set(id, sp)
	}
	if all {
		d.recount = true
		clear(d.rules)
		for id := range d.services {
			if _, ok := p.Services[id]; !ok {
				set(id, nil)
			}
		}
		for id, sp := range p.Services {
			if id.Family == d.family {
				set(id, sp)
			}
		}
		d.recount = false
	} else {
		for _, c := range changed {
			if c.ID.Family == d.family {
				set(c.ID, p.Services[c.ID])
			}
		}
	}
	d.followHealth(p.Health)
	return undo, bad, nil
}

// commented decides whether rules per endpoint carry comments.
func (d *desired) commented(p *plan.Plan, changed []plan.Change, all bool) bool {
	if !all && len(changed) == 0 {
		return d.comments
	}
	n := 0
	for id, sp := range p.Services {
		if id.Family == d.family {
			n += len(sp.Pools[plan.Cluster]) + len(sp.Pools[plan.Local])
		}
	}
	switch {
	case n > d.many:
		return false
	case n < d.many/2:
		return true
	}
	return d.comments
}

func (d *desired) followHealth(all map[plan.HealthID]plan.HealthPort) {
	now := map[plan.HealthID]plan.HealthPort{}
	for id, h := range all {
		if id.Family == d.family {
			now[id] = plan.HealthPort{Port: h.Port} // how many are ready does not matter here
		}
	}
	if !maps.Equal(now, d.health) {
		d.health, d.stale = now, true
	}
}

// set makes sp, nil for none, the wanted Service port of an ID.
func (d *desired) set(id plan.ID, sp *plan.ServicePort) {
	old := d.services[id]
	before := map[rule.Chain]struct{}{}
	if old != nil {
		r := d.r.service(old)
		for _, c := range r.Chains {
			before[c.Chain] = struct{}{}
			if !d.recount {
				d.rules[c.Chain.Table()] -= c.Rules
			}
		}
	}
	if sp == nil {
		delete(d.services, id)
		delete(d.dirty, id)
	} else {
		d.services[id] = sp
		r := d.r.service(sp)
		for _, c := range r.Chains {
			delete(before, c.Chain)
			d.rules[c.Chain.Table()] += c.Rules
			if d.track.Want(c.Chain, d.hash.Sum(r.Text(c))) {
				d.dirty[id] = struct{}{}
			}
		}
	}
	for c := range before {
		d.track.Unwant(c)
	}
	if old != sp {
		d.stale = d.stale || !sameDispatch(old, sp)
		d.staleEnds = d.staleEnds || id.Protocol == plan.TCP && !d.liberal
	}
}

// sameDispatch reports whether the two contribute the same to the dispatch.
func sameDispatch(a, b *plan.ServicePort) bool {
	if a == nil || b == nil || !slices.EqualFunc(a.Frontends, b.Frontends, plan.Frontend.Equal) {
		return false
	}
	return newView(a).takes == newView(b).takes
}

// each yields the wanted Service ports; those in replaced as given there.
func (d *desired) each(replaced map[plan.ID]*plan.ServicePort) iter.Seq[*plan.ServicePort] {
	return func(yield func(*plan.ServicePort) bool) {
		for id, sp := range d.services {
			if other, ok := replaced[id]; ok {
				sp = other
			}
			if sp != nil && !yield(sp) {
				return
			}
		}
	}
}

// renderShared renders the chains that all packets pass, as far as they may have
// changed, and makes them wanted.
func (d *desired) renderShared() {
	switch {
	case d.stale:
		r := d.r.common(d.each(nil), d.health)
		before := map[rule.Chain]struct{}{}
		for _, c := range d.shared {
			before[c] = struct{}{}
		}
		d.shared = d.shared[:0]
		clear(d.sharedNum)
		for _, c := range r.Chains {
			delete(before, c.Chain)
			d.shared = append(d.shared, c.Chain)
			d.sharedNum[c.Chain.Table()] += c.Rules
		}
		for c := range before {
			d.track.Unwant(c)
		}
		d.wantShared(r)
	case d.staleEnds:
		d.r.Reset()
		d.r.ends(d.each(nil))
		d.wantShared(&d.r.Set)
	}
	d.stale, d.staleEnds = false, false
}

// wantShared makes r's chains wanted and keeps their text if it has to be written.
func (d *desired) wantShared(r *rule.Set) {
	pending := false
	for _, c := range r.Chains {
		pending = d.track.Want(c.Chain, d.hash.Sum(r.Text(c))) || pending
	}
	if pending {
		d.text = r.Clone()
	}
}

// sharedText returns the chains that all packets pass, if any is pending.
func (d *desired) sharedText() *rule.Set {
	if !slices.ContainsFunc(d.shared, d.track.Pending) {
		return &rule.Set{}
	}
	if d.text == nil || !d.text.HasAll(d.shared, d.track.Pending) {
		d.text = d.r.common(d.each(nil), d.health).Clone()
	}
	return d.text
}

// total returns how many rules the table should have of ours.
func (d *desired) total(t sys.Table) int { return d.rules[t] + d.sharedNum[t] + len(jumps(t)) }

// begins reports whether a Service port forwards to an external frontend from some
// origin after, and did not before. A packet must always meet either the translation
// or the refusal, and the tables change one after the other.
func begins(before, after *plan.ServicePort) bool {
	if before == nil || after == nil {
		return false
	}
	a, b := newView(before), newView(after)
	for _, f := range b.frontends {
		at := slices.IndexFunc(a.frontends, func(o viewed) bool {
			return o.Kind == f.Kind && o.Addr == f.Addr && o.Port == f.Port
		})
		if at < 0 || f.Kind == plan.ClusterIP {
			continue
		}
		for o := range f.route {
			if f.route[o].Verdict == plan.Forward && a.frontends[at].route[o].Verdict != plan.Forward {
				return true
			}
		}
	}
	return false
}
