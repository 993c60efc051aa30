package ipvs

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

// A TCP endpoint that goes keeps its flows: its real server gets weight 0, and is
// deleted when no connection is left or at its deadline. A virtual server stays for as
// long as one of its real servers does. The state is the kernel's: after a restart, a
// real server that nobody wants drains with a new deadline.

// Pauses between two looks at the connections of a virtual server.
const (
	firstLook = time.Second
	lastLook  = 15 * time.Second
)

// drain is a real server whose flows are waited for.
type drain struct {
	until time.Time // the deadline
	look  time.Time // when its connections are counted next
	pause time.Duration
}

// due is when something is to be done.
func (d *drain) due() time.Time {
	if d.until.Before(d.look) {
		return d.until
	}
	return d.look
}

// Due returns when the family has to be applied again though nothing changed; zero:
// never.
func (f *family) due() time.Time {
	var first time.Time
	for _, d := range f.draining {
		if at := d.due(); first.IsZero() || at.Before(first) {
			first = at
		}
	}
	return first
}

// drains reports whether flows to a real server may go on when it is removed.
func (f *family) drains(k ipvs.Key) bool {
	if k.Mark == 0 {
		return k.Protocol == ipvs.TCP
	}
	owner, known := f.owners[k]
	return !known || owner.Protocol == plan.TCP
}

// lower takes new flows away from the real servers that nobody wants, and deletes
// those that have no flows to wait for.
func (f *family) lower() {
	counted := map[ipvs.Key]map[netip.AddrPort]ipvs.Live{}
	now := f.k.now()
	var due []realKey
	for k := range f.reals.Deletes() {
		due = append(due, k)
	}
	for _, k := range due {
		if _, stays := f.servers.Wanted(k.server); !stays && !f.drains(k.server) {
			continue // they go with their virtual server
		}
		if !f.drains(k.server) {
			f.deleteReal(k)
			continue
		}
		d := f.draining[k]
		if d == nil {
			f.beginDrain(k, now)
			continue
		}
		if d.due().After(now) {
			continue
		}
		if d.until.After(now) && !f.isIdle(k, counted) {
			d.pause = min(2*d.pause, lastLook)
			d.look = now.Add(d.pause)
			continue
		}
		f.deleteReal(k)
	}
	// Those that came back are raised where they are.
	for k := range f.draining {
		if _, wanted := f.reals.Wanted(k); wanted {
			delete(f.draining, k)
		}
	}
}

// beginDrain gives a real server weight 0.
func (f *family) beginDrain(k realKey, now time.Time) {
	have, _ := f.reals.Exists(k)
	if have.weight > 0 {
		err := f.k.servers.UpdateReal(k.server, ipvs.RealServer{Addr: k.addr, Forwarding: have.forwarding})
		if errors.Is(err, ipvs.ErrNoReal) || errors.Is(err, ipvs.ErrNoServer) {
			f.reals.Gone(k)
			return
		}
		if err != nil {
			f.fail(f.owners[k.server], err)
			return
		}
		f.reals.Have(k, real{forwarding: have.forwarding})
	}
	until, ok := f.deadlines[k]
	if !ok {
		until = now.Add(f.limitOf(k))
	}
	delete(f.deadlines, k)
	delete(f.limits, k)
	f.draining[k] = &drain{until: until, look: now.Add(firstLook), pause: firstLook}
}

// limitOf is for how long flows to a real server that goes may go on.
func (f *family) limitOf(k realKey) time.Duration {
	limit, ok := f.limits[k]
	if !ok { // it was gone before this process looked
		if svc := f.services[f.owners[k.server]]; svc != nil {
			limit = svc.sp.Chosen().DrainTimeout
		}
		limit = cmp.Or(limit, f.opts.drainTimeout())
	}
	return limit
}

// isIdle reports whether a real server has no connections. Clients that are remembered
// do not count: whoever of them comes gets another real server.
func (f *family) isIdle(k realKey, counted map[ipvs.Key]map[netip.AddrPort]ipvs.Live) bool {
	live, ok := counted[k.server]
	if !ok {
		list, err := f.k.servers.RealServers(k.server)
		if err != nil && !errors.Is(err, ipvs.ErrNoServer) {
			f.fail(f.owners[k.server], err)
			return false
		}
		live = map[netip.AddrPort]ipvs.Live{}
		for _, l := range list {
			live[l.Addr] = l
		}
		counted[k.server] = live
	}
	l := live[k.addr]
	return l.Active == 0 && l.Inactive == 0
}

// deleteReal deletes a real server.
func (f *family) deleteReal(k realKey) {
	err := f.k.servers.DeleteReal(k.server, k.addr)
	if err != nil && !errors.Is(err, ipvs.ErrNoReal) && !errors.Is(err, ipvs.ErrNoServer) {
		f.fail(f.owners[k.server], err)
		return
	}
	f.reals.Gone(k)
	delete(f.draining, k)
	delete(f.limits, k)
}

// retired is a virtual server that nobody wants while old flows go on: what it needs
// to catch their packets still.
type retired struct {
	items []item
	bound netip.Addr // invalid: none
}

// retire keeps what virtual servers that go need while they have real servers, and
// lets go of it for those that are wanted again or done.
func (f *family) retire() {
	left := map[ipvs.Key]bool{}
	for k := range f.reals.Deletes() {
		left[k.server] = true
	}
	for k, r := range f.retiring {
		_, wanted := f.servers.Wanted(k)
		if _, exists := f.servers.Exists(k); wanted || !exists || !left[k] {
			f.letGo(k)
			continue
		}
		// A frontend that somebody else has got is all theirs.
		f.retiring[k] = retired{bound: r.bound, items: slices.DeleteFunc(r.items, func(i item) bool {
			content, _ := f.elements.Wanted(i.Element)
			if content == i.Content {
				return false
			}
			f.elements.Drop(i.Element)
			return true
		})}
	}
	var byMark map[uint32][]table.Element
	for k := range f.servers.Deletes() {
		if _, already := f.retiring[k]; already || !left[k] || !f.drains(k) {
			continue
		}
		r, known := f.lingering[k] // others may have deleted what tells
		if !known {
			if k.Mark != 0 && byMark == nil {
				byMark = f.byMark()
			}
			r = f.needsOf(k, byMark[k.Mark&^f.settings.Mark()])
		}
		r.items = slices.DeleteFunc(slices.Clone(r.items), func(i item) bool {
			content, wanted := f.elements.Wanted(i.Element)
			return wanted && content != i.Content
		})
		for _, i := range r.items {
			f.elements.Add(i.Element, i.Content)
		}
		if r.bound.IsValid() {
			f.bound.Add(r.bound, struct{}{})
		}
		f.retiring[k] = r
	}
}

func (f *family) letGo(k ipvs.Key) {
	r := f.retiring[k]
	delete(f.retiring, k)
	for _, i := range r.items {
		f.elements.Drop(i.Element)
	}
	if r.bound.IsValid() {
		f.bound.Drop(r.bound)
	}
}

// byMark lists the frontends that lead to virtual servers by mark.
func (f *family) byMark() map[uint32][]table.Element {
	out := map[uint32][]table.Element{}
	for e, c := range f.elements.All() {
		if e.Kind == table.Marks {
			out[c.Mark] = append(out[c.Mark], e)
		}
	}
	return out
}

// needsOf reads off the kernel what a virtual server needs for its packets to come;
// marked are the frontends that lead to one by mark.
func (f *family) needsOf(k ipvs.Key, marked []table.Element) retired {
	r := retired{items: []item{{Element: recordOf(k)}}}
	steered := func(at table.Element) bool {
		external, services := at, at
		external.Kind, services.Kind = table.External, table.Services
		_, yes := f.elements.Exists(external)
		_, taken := f.elements.Wanted(services)
		if !yes || taken && !f.isRetired(services) { // another's frontend there decides for itself
			return false
		}
		r.items = append(r.items, item{services, table.Content{Chain: table.ChainRetired}}, item{Element: external})
		return true
	}
	if k.Mark != 0 {
		for _, e := range marked {
			if content, _ := f.elements.Exists(e); steered(e) { // by the mark it is found again after a restart
				r.items = append(r.items, item{e, content})
			}
		}
		return r
	}
	steered(r.items[0].Element)
	if _, bound := f.bound.Exists(k.Addr.Addr()); bound {
		r.bound = k.Addr.Addr()
		r.items = append(r.items, item{Element: table.OnAddr(table.ClusterIPs, r.bound)})
	}
	return r
}

// isRetired reports whether a frontend is there for old flows only.
func (f *family) isRetired(services table.Element) bool {
	content, wanted := f.elements.Wanted(services)
	return wanted && content.Chain == table.ChainRetired
}
