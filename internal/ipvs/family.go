package ipvs

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/delta"
	"github.com/svcproxy/svcproxy/internal/ipvs/fronts"
	"github.com/svcproxy/svcproxy/internal/ipvs/hostfilter"
	"github.com/svcproxy/svcproxy/internal/ipvs/remark"
	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipset"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// kernel is what the mode writes to, and the clock.
type kernel struct {
	tables  nft.Tables
	servers ipvs.IPVS
	device  host.Device
	routing route.Routing
	sets    ipset.Sets // nil: none
	sysctls host.Sysctls
	modules host.Modules                        // nil: whether ip_vs is there is found out by trying
	host    func(plan.Family) hostfilter.Filter // nil: there is none
	beside  io.Closer                           // what host uses; nil: nothing
	now     func() time.Time
}

// hasServers reports whether ip_vs is there, without loading it.
func (k kernel) hasServers() bool { return k.modules == nil || k.modules.Module("ip_vs") == nil }

// close releases the sockets; they are opened again when needed.
func (k kernel) close() error {
	errs := []error{k.tables.Close()}
	if k.beside != nil {
		errs = append(errs, k.beside.Close())
	}
	for _, opened := range []any{k.servers, k.device} {
		if c, ok := opened.(io.Closer); ok {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// family keeps one family's part of the kernel as it should be.
type family struct {
	env  dataplane.Env
	opts Options
	fam  plan.Family
	k    kernel
	// remarks are shared by both families.
	remarks *remark.Log

	// What is believed about the kernel.
	known    bool // the rest of this holds
	caughtUp bool // services follows a whole plan
	inForce  bool // packets pass here already: ours, or kube-proxy's
	settings settings
	fronts   fronts.Fronts
	services map[plan.ID]*service
	marks    table.Numbers
	elements delta.Counted[table.Element, table.Content]
	objects  map[string]*entry
	touched  map[string]struct{}      // objects whose users or content changed
	ranges   map[string][]nft.Element // of interval sets
	hasTable bool
	replace  bool // the table is there in a form that cannot be repaired
	hooked   bool // the kernel calls into it, for all that is believed
	begun    bool // this process has applied a plan before
	servers  delta.Counted[ipvs.Key, ipvs.VirtualServer]
	owners   map[ipvs.Key]plan.ID // of wanted virtual servers, and of those that retire
	reals    delta.Counted[realKey, real]
	bound    delta.Counted[netip.Addr, struct{}]
	steering bool                   // the rule and the route are there
	onNode   map[table.Element]bool // elements that follow from the node
	// foreign are virtual servers that others made. adopting: nobody can tell, for
	// what is recorded is gone; those that the plan wants are ours.
	foreign  map[ipvs.Key]ipvs.Entry
	adopting bool
	// met are those of foreign that came while this process knew the kernel: they may be
	// in the record of ours by mistake.
	met map[ipvs.Key]bool

	draining map[realKey]*drain
	retiring map[ipvs.Key]retired
	limits   map[realKey]time.Duration // of flows to real servers that go, unless it is the default
	// mine are the virtual servers that were ours when the kernel was known last,
	// deadlines those of the real servers that drained then, and lingering what retired.
	mine      map[ipvs.Key]bool
	deadlines map[realKey]time.Time
	lingering map[ipvs.Key]retired

	// For the time of one apply.
	ctx    context.Context
	batch  []nft.Op // of one transaction
	bulk   []nft.Op // new elements, which may come in transactions after it
	failed []error
	node   string // its name
	// outdated: the kernel is not as it is believed to be.
	outdated bool
}

func newFamily(env dataplane.Env, opts Options, f plan.Family, k kernel, r *remark.Log) *family {
	return &family{env: env, opts: opts, fam: f, k: k, remarks: r}
}

// forget makes the next apply read the kernel's state back.
func (f *family) forget() {
	if f.known {
		f.mine = map[ipvs.Key]bool{}
		for k := range f.servers.All() {
			f.mine[k] = true
		}
		// Where a write failed before they began to drain again those of before hold.
		if f.deadlines == nil {
			f.deadlines, f.lingering = map[realKey]time.Time{}, map[ipvs.Key]retired{}
		}
		maps.Copy(f.lingering, f.retiring)
		for k, d := range f.draining {
			f.deadlines[k] = d.until
		}
	}
	f.known, f.caughtUp = false, false
}

// start forgets everything that is believed and wanted.
func (f *family) start() {
	f.services = map[plan.ID]*service{}
	f.marks = table.NewNumbers()
	f.elements = delta.NewCounted[table.Element, table.Content]()
	f.objects, f.touched = map[string]*entry{}, map[string]struct{}{}
	f.ranges = map[string][]nft.Element{}
	f.hasTable, f.replace, f.hooked = false, false, false
	f.servers = delta.NewCounted[ipvs.Key, ipvs.VirtualServer]()
	f.owners = map[ipvs.Key]plan.ID{}
	f.reals = delta.NewCounted[realKey, real]()
	f.bound = delta.NewCounted[netip.Addr, struct{}]()
	f.steering, f.onNode = false, nil
	f.foreign, f.adopting = map[ipvs.Key]ipvs.Entry{}, false
	f.draining, f.retiring = map[realKey]*drain{}, map[ipvs.Key]retired{}
	f.limits = map[realKey]time.Duration{}
	f.inForce = false
}

// carryOut makes the kernel do what u says for the family. listed are all virtual
// servers, if the family is not known.
func (f *family) carryOut(ctx context.Context, u plan.Update, listed []ipvs.Entry) error {
	f.ctx, f.batch, f.bulk, f.failed, f.node, f.outdated = ctx, nil, nil, nil, u.Plan.Node.Name, false
	if !f.known {
		if err := f.readBack(listed); err != nil {
			return err
		}
	}
	if u.Partial && f.inForce {
		return nil
	}
	rules, err := table.NewSettings(f.fam, f.env.MasqueradeBit, f.env.BeLiberal, u.Plan.Node)
	if err != nil {
		return err
	}
	coinciding := f.fronts.Follow(u, rules.Family, rules.Addrs, !f.caughtUp)
	f.follow(u, settings{rules, f.remarks.Choice(f.opts.Scheduler), f.others(), coinciding})
	f.followNode(u)
	// The loop begins with a part of the plan, unless another mode is in force.
	others := !f.begun && !u.Partial && !f.inForce
	f.begun = true
	if err := f.write(u.Plan.Node, others); err != nil {
		return err
	}
	f.caughtUp, f.inForce, f.deadlines, f.lingering = true, true, nil, nil
	return errors.Join(f.failed...)
}

// pending is a Service port on its way to another state.
type pending struct {
	id       plan.ID
	sp       *plan.ServicePort // nil: it goes
	old, new *rendered
}

// follow brings what is wanted to what the plan says.
func (f *family) follow(u plan.Update, s settings) {
	changes := f.changes(u, s)
	old := f.settings
	f.settings = s
	for i := range changes {
		p := &changes[i]
		p.old = old.render(f.services[p.id])
		f.unwant(p.old)
		var to *service
		if p.sp != nil {
			to = &service{sp: p.sp}
			f.services[p.id] = to
		} else {
			delete(f.services, p.id)
		}
		if to != nil && s.Marks(to.sp) {
			to.number = f.marks.Take(p.id)
		} else {
			f.marks.Release(p.id)
		}
		p.new = s.render(to)
	}
	for i := range changes {
		if p := &changes[i]; p.sp != nil {
			f.want(p.new)
			f.remarks.On(p.sp)
			f.remarkOnOthers(p.new)
		} else {
			f.remarks.Unsay(p.id)
		}
	}
	for i := range changes {
		f.limit(&changes[i])
	}
}

// changes lists the Service ports to look at; what the kernel cannot have stays as
// it is.
func (f *family) changes(u plan.Update, s settings) []pending {
	var out []pending
	seen := map[plan.ID]bool{}
	consider := func(id plan.ID, sp *plan.ServicePort) {
		if sp != nil {
			err := sp.Validate()
			if err == nil {
				err = f.contested(sp, s)
			}
			if err != nil {
				f.fail(id, err)
				return
			}
		}
		out = append(out, pending{id: id, sp: sp})
	}
	for _, c := range u.Changed {
		if c.ID.Family == f.fam {
			seen[c.ID] = true
			consider(c.ID, c.New)
		}
	}
	if f.caughtUp && f.settings.key() == s.key() {
		return out
	}
	var rest []plan.ID
	for id := range u.Plan.Services {
		if id.Family == f.fam && !seen[id] {
			rest = append(rest, id)
		}
	}
	slices.SortFunc(rest, plan.ID.Compare)
	for _, id := range rest {
		consider(id, u.Plan.Services[id])
	}
	return out
}

// fail notes a failure that one Service port causes. It does not cause those that say
// that others have changed virtual servers.
func (f *family) fail(id plan.ID, err error) {
	switch {
	case errors.Is(err, ipvs.ErrNoServer), errors.Is(err, ipvs.ErrNoReal), errors.Is(err, ipvs.ErrExist):
		f.outdated = true
	case id != (plan.ID{}):
		err = &dataplane.ObjectError{ID: id, Err: err}
	}
	f.failed = append(f.failed, err)
}

// want adds what a Service port needs.
func (f *family) want(r *rendered) {
	for _, o := range r.objects {
		f.retain(o)
	}
	for _, i := range r.items {
		f.elements.Add(i.Element, i.Content)
	}
	for _, a := range r.bound {
		f.bound.Add(a, struct{}{})
	}
	for _, v := range r.servers {
		f.servers.Add(v.Key, v.VirtualServer)
		f.owners[v.Key] = r.sp.ID
		eps := r.sp.Pools[v.pool]
		weights := scheduler.Weights(v.Scheduler, eps)
		for i := range eps {
			f.reals.Add(realKey{v.Key, eps[i].Addr}, real{weight: weights[i]})
		}
	}
}

// unwant takes it back.
func (f *family) unwant(r *rendered) {
	for _, v := range r.servers {
		f.servers.Drop(v.Key)
		for _, e := range r.sp.Pools[v.pool] {
			f.reals.Drop(realKey{v.Key, e.Addr})
		}
	}
	for _, a := range r.bound {
		f.bound.Drop(a)
	}
	for _, i := range r.items {
		f.elements.Drop(i.Element)
	}
	for _, o := range r.objects {
		f.release(o.Name())
	}
}

// limit notes for how long flows to the endpoints that a Service port loses may go on.
func (f *family) limit(p *pending) {
	if p.old.service == nil {
		return
	}
	policy := p.old.sp.Chosen()
	policy.VanishedTimeout = 0 // the endpoints of a Service that goes may be there still
	if p.new.service != nil {
		policy = p.new.sp.Chosen()
	}
	policy.DrainTimeout = cmp.Or(policy.DrainTimeout, f.opts.drainTimeout())
	for _, v := range p.old.servers {
		for _, e := range p.old.sp.Pools[v.pool] {
			k := realKey{v.Key, e.Addr}
			_, wanted := f.reals.Wanted(k)
			_, exists := f.reals.Exists(k)
			if wanted || !exists || f.draining[k] != nil {
				continue
			}
			listed := p.new.service != nil && (slices.Contains(p.new.sp.Draining, e.Addr) || p.new.sp.Keeps(e.Addr))
			f.limits[k] = policy.FlowsEndAfter(listed)
		}
	}
}

// followNode brings what depends on the node alone to what the plan says.
func (f *family) followNode(u plan.Update) {
	if f.caughtUp && !u.Node && len(u.Health) == 0 {
		return
	}
	now := f.nodeElements(u)
	for e := range f.onNode {
		if !now[e] {
			f.elements.Unwant(e)
		}
	}
	for e := range now {
		f.elements.Want(e, table.Content{})
	}
	f.onNode = now
}

// nodeElements are the elements that follow from the node.
func (f *family) nodeElements(u plan.Update) map[table.Element]bool {
	out := map[table.Element]bool{}
	for _, a := range f.settings.Addrs {
		out[table.OnAddr(table.NodeAddrs, a)] = true
	}
	for id, h := range u.Plan.Health {
		if id.Family == f.fam {
			out[table.Element{Kind: table.HealthPorts, Port: h.Port}] = true
		}
	}
	return out
}
