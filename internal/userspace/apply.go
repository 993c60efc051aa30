package userspace

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/delta"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// sockets are where the relay listens: a *listeners.Ports, or none for a comparison.
type sockets interface {
	Serve(sp *plan.ServicePort, on listeners.Set, prefer uint16) (uint16, error)
	Trim(id plan.ID, on listeners.Set)
	Drop(id plan.ID)
	Known(f plan.Family) []plan.ID
}

// elementsPerCommit bounds a transaction: the kernel commits each in one go.
const elementsPerCommit = 1000

// family keeps one family's table, sockets and flows as they should be.
type family struct {
	*backend
	fam     plan.Family
	tables  nft.Tables
	sockets sockets

	// What is believed about the kernel.
	known    bool // the rest of this holds
	caughtUp bool // services follows a whole plan
	inForce  bool // the table handles packets
	renew    bool // the table must be made anew
	settings settings
	services map[plan.ID]service
	elements *delta.Tracker[place, content]
	shared   map[place]int // Service ports that need an element
	guards   map[string]int
	chains   map[string][sha256.Size]byte // what is in the chains that are there, by name
	sets     map[string]bool
	ranges   map[string][]nft.Element
	addrs    []netip.Addr // that accept node ports
	unused   map[string]bool
	found    map[place]content // what was there at the start, until all Service ports have their listeners
	stale    staleFlows

	// For the time of one apply.
	ctx     context.Context
	guarded map[string][]netip.Prefix // source ranges that are needed, by nft.PrefixesName
	batch   []nft.Op
	size    int // elements in batch
	err     error
}

// service is a Service port as the table has it.
type service struct {
	sp   *plan.ServicePort
	port uint16
}

func newFamily(b *backend, f plan.Family) *family {
	fam := &family{backend: b, fam: f, tables: b.host.tables}
	fam.forget()
	return fam
}

// forget makes the next apply read the kernel's state back. The relay goes on with
// the Service ports that it knows.
func (f *family) forget() { f.known, f.caughtUp, f.batch = false, false, nil }

// apply makes the family do what u says.
func (f *family) apply(ctx context.Context, u plan.Update) error {
	err := f.carryOut(ctx, u)
	if err == nil {
		return nil
	}
	var bad *dataplane.ObjectError
	if e, ok := errors.AsType[*nft.Error](err); ok && e.Op != nil {
		if id, ok := f.owner(e.Op); ok {
			err = &dataplane.ObjectError{ID: id, Err: err}
		}
	}
	if !errors.As(err, &bad) {
		err = fmt.Errorf("write the %s table: %w", f.fam, err)
	}
	f.forget()
	return err
}

// owner finds the Service port that needs the elements of a step.
func (f *family) owner(o *nft.Op) (plan.ID, bool) {
	if o.Set == nil || len(o.Elements) == 0 {
		return plan.ID{}, false
	}
	at := place{o.Set.Name, o.Elements[0].Key}
	for id, svc := range f.services {
		if _, ok := f.settings.render(svc.sp, svc.port).elements[at]; ok {
			return id, true
		}
	}
	return plan.ID{}, false
}

func (f *family) carryOut(ctx context.Context, u plan.Update) error {
	f.ctx, f.err, f.batch, f.size, f.guarded = ctx, nil, nil, 0, map[string][]netip.Prefix{}
	if !f.known {
		if err := f.readBack(ctx); err != nil {
			return err
		}
	}
	if u.Partial && f.inForce {
		return nil
	}
	s, err := f.baseSettings().follow(u.Plan.Node)
	if err != nil {
		return err
	}
	fresh, old := !f.caughtUp, f.settings
	changes, bad := f.changes(u, fresh || s.key() != old.key())
	f.settings = s
	bad = append(bad, f.serve(changes)...)
	addrs := u.Plan.Node.NodePorts[f.fam].Addrs
	f.stale.from(f, changes, addrs)
	f.want(changes, old)
	f.setAddrs(addrs)
	f.write(u.Plan.Node, fresh)
	if f.err != nil {
		return errors.Join(append(bad, f.err)...)
	}
	f.caughtUp, f.inForce, f.renew, f.found = true, true, false, nil
	for _, c := range changes {
		f.settle(c)
	}
	if fresh {
		for _, id := range f.sockets.Known(f.fam) {
			if f.services[id].sp == nil {
				f.sockets.Drop(id)
			}
		}
	}
	f.tidy()
	if err := f.stale.remove(ctx, f); err != nil {
		bad = append(bad, err)
	}
	return errors.Join(bad...)
}

// baseSettings are those that no node changes.
func (f *family) baseSettings() settings {
	return settings{family: f.fam, block: f.opts.Blocks.Of(f.fam), own: f.env.Mark(), route: 1 << f.opts.RouteBit}
}

// change is a Service port on its way to another state.
type change struct {
	id     plan.ID
	old    service
	new    service // without a ServicePort: it goes
	leads  *rendered
	failed bool // it stays as it is
}

// changes lists what has to move: all Service ports if everything is to be looked at.
// It returns what is wrong with those that stay as they are.
func (f *family) changes(u plan.Update, all bool) ([]*change, []error) {
	ids := map[plan.ID]bool{}
	var order []plan.ID
	add := func(id plan.ID) {
		if id.Family == f.fam && !ids[id] {
			ids[id] = true
			order = append(order, id)
		}
	}
	for _, c := range u.Changed {
		add(c.ID)
	}
	if all {
		rest := slices.Collect(maps.Keys(u.Plan.Services))
		for id := range f.services {
			rest = append(rest, id)
		}
		slices.SortFunc(rest, plan.ID.Compare)
		for _, id := range rest {
			add(id)
		}
	}
	var out []*change
	var bad []error
	for _, id := range order {
		c := &change{id: id, old: f.services[id], new: service{sp: u.Plan.Services[id]}}
		if sp := c.new.sp; sp != nil {
			if err := sp.Validate(); err != nil {
				bad = append(bad, &dataplane.ObjectError{ID: id, Err: err})
				continue
			}
		}
		if c.old.sp != nil || c.new.sp != nil {
			out = append(out, c)
		}
	}
	return out, bad
}

// serve has the relay listen for Service ports that are new or need more, before
// anything leads there.
func (f *family) serve(changes []*change) []error {
	var bad []error
	for _, c := range changes {
		if c.new.sp == nil {
			c.leads = f.settings.render(nil, 0)
			continue
		}
		prefer := c.old.port
		if prefer == 0 {
			prefer = f.adopt(c.new.sp)
		}
		f.remarkProtocol(c.id)
		on := f.settings.render(c.new.sp, prefer).classes
		port, err := f.sockets.Serve(c.new.sp, on, prefer)
		if err != nil {
			bad = append(bad, &dataplane.ObjectError{ID: c.id, Err: err})
			c.failed = true
			continue
		}
		c.new.port = port
		c.leads = f.settings.render(c.new.sp, port)
	}
	return bad
}

// adopt finds the port that the table has for a Service port, so that a restart
// keeps it; 0 if none.
func (f *family) adopt(sp *plan.ServicePort) uint16 {
	for i := range sp.Frontends {
		fe := &sp.Frontends[i]
		set := setListeners
		if fe.Kind == plan.NodePort {
			set = setPorts
		}
		for _, o := range plan.Origins {
			at := place{set, frontKey(sp.ID.Protocol, fe).Number(originNumber(o)).Tuple()}
			have, ok := f.found[at]
			if !ok || have.comment != remark(sp.ID) {
				continue
			}
			_, rest := have.data.Addr(familyOf(f.fam))
			if port, _ := rest.Port(); port != 0 {
				return port
			}
		}
	}
	return 0
}

// want says what the elements should be. What goes is said first: a frontend may
// change hands.
func (f *family) want(changes []*change, old settings) {
	for _, c := range changes {
		if c.failed || c.old.sp == nil {
			continue
		}
		was := old.render(c.old.sp, c.old.port)
		for at := range was.elements {
			if have, ok := f.elements.Wanted(at); ok && have.comment == remark(c.id) {
				f.elements.Unwant(at)
			}
		}
		for _, at := range was.shared {
			f.release(at)
		}
		for name := range was.guards {
			f.guards[name]--
		}
	}
	for _, c := range changes {
		if c.failed {
			continue
		}
		for at, what := range c.leads.elements {
			f.elements.Want(at, what)
		}
		for _, at := range c.leads.shared {
			f.shared[at]++
			f.elements.Want(at, content{})
		}
		for name, ranges := range c.leads.guards {
			f.guards[name]++
			f.guarded[name] = ranges
		}
		if c.new.sp == nil {
			delete(f.services, c.id)
		} else {
			f.services[c.id] = c.new
		}
	}
}

func (f *family) release(at place) {
	if f.shared[at]--; f.shared[at] <= 0 {
		delete(f.shared, at)
		f.elements.Unwant(at)
	}
}

// setAddrs says which addresses accept node ports.
func (f *family) setAddrs(addrs []netip.Addr) {
	for _, a := range f.addrs {
		f.elements.Unwant(place{setNodeAddrs, nft.AddrTuple(a)})
	}
	for _, a := range addrs {
		f.elements.Want(place{setNodeAddrs, nft.AddrTuple(a)}, content{})
	}
	f.addrs = slices.Clone(addrs)
}

// settle closes what nothing leads to any more.
func (f *family) settle(c *change) {
	switch {
	case c.failed:
	case c.new.sp == nil:
		f.sockets.Drop(c.id)
		if c.id.Protocol == plan.SCTP {
			delete(f.refused, c.id.Service())
		}
	default:
		f.sockets.Trim(c.id, c.leads.classes)
	}
}
