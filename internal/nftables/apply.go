package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/nftables/edits"
	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// elementsPerCommit bounds a transaction: the kernel commits each in one go. What is
// one change is split only if it alone is larger, and then in an order in which
// every part is right.
const elementsPerCommit = 1000

// family keeps one family's table as it should be.
type family struct {
	env    dataplane.Env
	fam    plan.Family
	tables nft.Tables
	now    func() time.Time
	first  map[plan.ID]*plan.ServicePort // what the node itself needs

	// What is believed about the kernel.
	known    bool // the rest of this holds
	caughtUp bool // services follows a whole plan
	table    nft.Table
	settings settings
	core     map[string]*nft.Set
	services map[plan.ID]*service
	objects  map[string]*entry
	unused   map[string]struct{} // objects that nobody needs
	refs     references
	ranges   map[string][]nft.Element
	addrs    []netip.Addr // in setNodeAddrs
	sticky   int          // Service ports with affinity
	pinned   pinned
	inForce  bool        // some table handles packets already: owned.Is, or kube-proxy's
	switches bool        // ours gets its base chains when it is complete
	replaced []nft.Table // tables that go once ours is complete
	// Objects that the kernel still holds on to are tried again then; zero: there
	// are none.
	tidyAt    time.Time
	tidyPause time.Duration

	// suspects are elements that others changed, by set, while the rest still
	// holds; nil: nobody did.
	suspects map[string]map[nft.Tuple]bool

	// For the time of one apply.
	trust  bool                                 // what is not among the suspects is as the plan before said
	listed map[string]map[nft.Tuple]nft.Element // what a listing found and nobody asked for yet
	round  int
	batch  []nft.Op
	size   int  // elements in batch
	hold   bool // the batch must not be split
	// leads are verdicts of new Service ports that wait for one commit.
	leads               []nft.Op
	leadSize, leadLimit int
	guards              []reference    // elements of setEndpointAddrs that are still to be added
	underWay            <-chan outcome // of the commit that the kernel works on; nil: none
	err                 error
	ctx                 context.Context
	sweeps              []sweep
}

// pinned is what the chains that are always there depend on.
type pinned struct {
	settings string
	record   bool // some Service has affinity
}

func newFamily(env dataplane.Env, f plan.Family, t nft.Tables) *family {
	return &family{env: env, fam: f, tables: t, now: time.Now}
}

// forget makes the next apply read the kernel's state back.
func (f *family) forget() {
	f.known, f.caughtUp = false, false
	f.listed, f.batch, f.leads = nil, nil, nil
	f.suspects, f.trust = nil, false
	f.tidyAt = time.Time{}
}

// apply makes the kernel do what u says for the family.
func (f *family) apply(ctx context.Context, u plan.Update) error {
	err := f.carryOut(ctx, u)
	var bad *dataplane.ObjectError
	if err != nil {
		if e, ok := errors.AsType[*nft.Error](err); ok {
			f.env.Stats.Add("sync_proxy_rules_nftables_sync_failures_total", 1, f.fam.String())
			if e.Op != nil {
				if id, ok := e.Op.Owner.(plan.ID); ok && id != (plan.ID{}) {
					err = &dataplane.ObjectError{ID: id, Err: err}
				}
			}
		}
		if !errors.As(err, &bad) {
			err = fmt.Errorf("write the %s table: %w", f.fam, err)
		}
		f.forget()
	}
	return err
}

func (f *family) carryOut(ctx context.Context, u plan.Update) error {
	f.await() // nothing, unless the last call panicked
	f.ctx, f.err, f.batch, f.size, f.hold, f.sweeps = ctx, nil, nil, 0, false, nil
	f.leads, f.leadSize, f.leadLimit, f.guards = nil, 0, firstLeads, nil
	f.round++
	if f.suspects != nil {
		if err := f.recheck(); err != nil {
			return err
		}
	}
	if !f.known {
		if err := f.readBack(ctx, u.Plan.Node); err != nil {
			return err
		}
	}
	if u.Partial {
		f.first = maps.Clone(u.Plan.Services)
	}
	if u.Partial && f.inForce {
		return nil
	}
	s, err := newSettings(f.fam, f.env.Mark(), f.env.BeLiberal, u.Plan.Node)
	if err != nil {
		return err
	}
	fresh := !f.caughtUp
	old := f.settings
	f.settings = s
	if fresh {
		f.begin()
	}
	f.setRanges(setPodRanges, u.Plan.Node.Local[f.fam].Prefixes)
	bad := f.follow(u, old, fresh)
	f.setAddrs(u.Plan.Node.NodePorts[f.fam].Addrs)
	f.setRanges(setServiceRanges, u.Plan.Node.ServiceCIDRs)
	f.finish(fresh)
	f.caughtUp = true
	f.commit()
	f.sweep()
	if f.err != nil {
		return errors.Join(append(bad, f.err)...)
	}
	f.inForce = true
	f.tidy()
	return errors.Join(bad...)
}

// begin makes everything exist that is always there, but what the kernel calls if
// another table is in force still.
func (f *family) begin() {
	f.core = f.settings.coreSets()
	if f.listed == nil {
		f.add(nft.Op{Kind: nft.AddTable, Comment: layout})
		f.listed = map[string]map[nft.Tuple]nft.Element{}
	}
	for _, name := range slices.Sorted(maps.Keys(f.core)) {
		e := f.objects[name]
		if e == nil {
			e = &entry{isSet: true}
			f.objects[name] = e
		}
		if !e.exists {
			f.add(nft.Op{Kind: nft.AddSet, Set: f.core[name]})
		}
		e.exists, e.pinned = true, true
	}
	f.pinChains(!f.switches)
}

// pinChains makes the chains exist that are always there.
func (f *family) pinChains(base bool) {
	chains := f.settings.inner()
	if base {
		chains = append(chains, f.settings.base(f.sticky > 0)...)
	}
	f.pin(chains)
}

// follow brings the services to those of the plan. It returns what is wrong with
// Service ports that stay as they are.
func (f *family) follow(u plan.Update, old settings, fresh bool) []error {
	var bad []error
	var changes []pending
	consider := func(id plan.ID, sp *plan.ServicePort) {
		if sp != nil {
			if err := check(sp); err != nil {
				bad = append(bad, &dataplane.ObjectError{ID: id, Err: err})
				return
			}
		}
		changes = append(changes, pending{id: id, sp: sp})
	}
	seen := map[plan.ID]bool{}
	for _, c := range u.Changed {
		if c.ID.Family == f.fam {
			seen[c.ID] = true
			consider(c.ID, c.New)
		}
	}
	rerender := !fresh && old.key() != f.settings.key()
	if fresh || rerender {
		var rest []plan.ID
		for id := range u.Plan.Services {
			if id.Family == f.fam && !seen[id] {
				rest = append(rest, id)
			}
		}
		slices.SortFunc(rest, func(a, b plan.ID) int {
			return cmp.Or(count(f.first[b] != nil)-count(f.first[a] != nil), a.Compare(b))
		})
		for _, id := range rest {
			consider(id, u.Plan.Services[id])
		}
	}
	for i := range changes {
		f.prepare(&changes[i], old, fresh)
	}
	together := f.yieldFronts(changes)
	for i := range changes {
		f.hold = i < together
		f.move(&changes[i])
		if f.err != nil {
			break
		}
	}
	f.hold = false
	return bad
}

// pending is a Service port on its way to another state.
type pending struct {
	id       plan.ID
	sp       *plan.ServicePort // nil: it goes
	old, new *rendered
	first    bool // it takes part in a frontend's change of hands
}

// prepare finds out between which states a Service port moves.
func (f *family) prepare(p *pending, old settings, fresh bool) {
	was := f.services[p.id]
	if fresh {
		old = f.settings
	}
	p.old = old.render(was)
	var to *service
	if p.sp != nil {
		have := f.adopt(p.sp)
		if was != nil {
			have = was.slots
		}
		to = &service{sp: p.sp}
		for pool := range to.slots {
			to.slots[pool] = slots.Assign(have[pool], p.sp.Pools[pool])
		}
	}
	p.new = f.settings.render(to)
}

// yieldFronts takes frontends from Service ports that lose them to others in the
// same update, so that none is there twice. Those Service ports come first then, in
// one transaction; their number is returned.
func (f *family) yieldFronts(changes []pending) int {
	if len(changes) < 2 || f.listed != nil {
		return 0 // after a listing, an element that is there is replaced
	}
	gained, contested := map[string]bool{}, map[string]bool{}
	for i := range changes {
		p := &changes[i]
		for j := range p.new.fronts {
			if key := string(p.new.fronts[j].key); !p.old.has(key) {
				gained[key] = true
			}
		}
	}
	involved := 0
	for i := range changes {
		p := &changes[i]
		keeps := &rendered{service: p.old.service, objects: p.old.objects, local: p.old.local}
		for _, fr := range p.old.fronts {
			if key := string(fr.key); gained[key] && !p.new.has(key) {
				contested[key] = true
				continue
			}
			keeps.fronts = append(keeps.fronts, fr)
		}
		if len(keeps.fronts) < len(p.old.fronts) {
			f.hold = true
			f.emit(f.diff(p.id, p.old, keeps))
			p.old = keeps
			p.first = true
		}
	}
	if len(contested) == 0 {
		return 0
	}
	for i := range changes {
		p := &changes[i]
		p.first = p.first || slices.ContainsFunc(p.new.fronts, func(fr front) bool { return contested[string(fr.key)] })
		involved += count(p.first)
	}
	slices.SortStableFunc(changes, func(a, b pending) int { return count(b.first) - count(a.first) })
	return involved
}

func (r *rendered) has(key string) bool {
	return slices.ContainsFunc(r.fronts, func(f front) bool { return string(f.key) == key })
}

// move writes what differs and takes over the new state.
func (f *family) move(p *pending) {
	for _, o := range p.new.objects {
		f.retain(o)
	}
	e := f.diff(p.id, p.old, p.new)
	if was, is := p.old.hasAffinity(), p.new.hasAffinity(); was || is {
		f.sticky += count(is) - count(was)
		f.forgetClients(p, e)
	}
	if p.old.service == nil {
		f.emitNew(e)
	} else {
		f.emit(e)
	}
	for _, o := range p.old.objects {
		f.release(o.Name())
	}
	if p.new.service == nil {
		delete(f.services, p.id)
	} else {
		f.services[p.id] = p.new.service
	}
	p.old, p.new = nil, nil
}

func (r *rendered) hasAffinity() bool { return r.service != nil && r.sp.Affinity > 0 }

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// finish removes what a listing found and nobody wants, and puts the table in force.
func (f *family) finish(fresh bool) {
	f.lead()
	f.guard()
	if fresh {
		rest := &edits.Edits{}
		for name, elements := range f.listed {
			s := edits.Stale
			if set := f.core[name]; set != nil && set.Verdicts {
				s = edits.Verdict
			}
			for _, e := range elements {
				rest.Remove(s, name, e)
			}
		}
		f.emit(rest)
	}
	f.listed = nil
	if is := (pinned{f.settings.key(), f.sticky > 0}); fresh || is != f.pinned {
		f.pinChains(true)
		f.pinned = is
	}
	f.switches = false
	for _, t := range f.replaced {
		f.batch = append(f.batch, nft.Op{Kind: nft.DeleteTable, Table: t})
	}
	f.replaced = nil
}

// setRanges replaces the elements of an interval set if they differ.
func (f *family) setRanges(name string, prefixes []netip.Prefix) {
	want := nft.Intervals(f.fam.Prefixes(prefixes))
	for _, o := range nft.ReplaceIntervals(f.core[name], f.ranges[name], want) {
		f.add(o)
	}
	f.ranges[name] = want
}

// setAddrs brings the addresses that accept node ports to those of the plan.
func (f *family) setAddrs(want []netip.Addr) {
	own := slices.DeleteFunc(slices.Clone(want), func(a netip.Addr) bool { return plan.FamilyOf(a) != f.fam })
	if slices.Equal(own, f.addrs) {
		return
	}
	e := &edits.Edits{}
	for _, a := range f.addrs {
		if !slices.Contains(own, a) {
			e.Remove(edits.Stale, setNodeAddrs, nft.Element{Key: nft.AddrTuple(a)})
		}
	}
	for _, a := range own {
		if !slices.Contains(f.addrs, a) {
			e.Insert(edits.Fresh, setNodeAddrs, nft.Element{Key: nft.AddrTuple(a)})
		}
	}
	f.addrs = own
	f.emit(e)
}
