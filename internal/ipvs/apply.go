package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// write makes the kernel what is wanted, in an order in which every step leaves packets
// a way that was right before or is right after:
//
//   - what leads nowhere yet: sets, chains, our record of virtual servers; and the
//     treatment of frontends that are there and need no mark, so that nothing is sent
//     unmasqueraded to endpoints that come now;
//   - virtual servers and real servers that come or get more;
//   - real servers that go or get less;
//   - the treatment of new and all other frontends, then their addresses;
//   - what nothing leads to any more.
//
// In a table that is new, the chains that the kernel calls come when all that they need
// is there; while another mode is in force, the addresses too.
func (f *family) write(n *plan.Node, others bool) error {
	if fresh := !f.caughtUp; fresh {
		if err := f.k.device.Create(f.ctx); err != nil {
			return err
		}
		f.begin()
	}
	f.retire()
	f.makeObjects()
	f.setRanges(table.PodRanges, n.Local[f.fam].Prefixes)
	f.writeElements(early)
	if f.replace { // nothing of the old table is left: all at once
		f.writeElements(late)
		f.setRanges(table.ServiceRanges, n.ServiceCIDRs)
	}
	if err := f.commit(); err != nil {
		return err
	}
	f.replace = false
	f.raise()
	f.lower()
	f.retire()
	if err := f.steer(); err != nil {
		return err
	}
	if others {
		f.bind()
	}
	f.writeElements(late)
	f.setRanges(table.ServiceRanges, n.ServiceCIDRs)
	if err := f.commit(); err != nil {
		return err
	}
	if err := f.hook(); err != nil {
		return err
	}
	f.bind()
	f.deleteServers()
	f.retire()
	f.unbind()
	f.writeElements(final)
	if err := f.commit(); err != nil {
		return err
	}
	f.tidy()
	return nil
}

// hook makes the chains exist that the kernel calls.
func (f *family) hook() error {
	if f.hooked {
		return nil
	}
	f.hooked = true
	f.pin(f.settings.Base())
	f.makeObjects()
	return f.commit()
}

// begin makes everything exist that is always there.
func (f *family) begin() {
	f.hooked = f.hooked || f.replace // one that is replaced handles packets all the time
	if f.replace {
		f.add(nft.Op{Kind: nft.DeleteTable})
		f.hasTable = false
	}
	if !f.hasTable {
		f.add(nft.Op{Kind: nft.AddTable, Comment: table.Layout})
		f.hasTable = true
	}
	for _, s := range f.settings.Sets() {
		if e := f.objects[s.Name]; e != nil && e.exists {
			e.pinned = true
			continue
		}
		f.objects[s.Name] = &entry{Object: nft.Object{Set: s}, isSet: true, exists: true, pinned: true}
		f.add(nft.Op{Kind: nft.AddSet, Set: s})
	}
	f.pin(f.settings.Inner())
	if f.hooked {
		f.pin(f.settings.Base())
	}
}

// phase is when an element is written.
type phase uint8

const (
	early phase = iota
	late
	final
)

// phaseOf says when a pending element is written.
func (f *family) phaseOf(e table.Element) phase {
	want, wanted := f.elements.Wanted(e)
	_, exists := f.elements.Exists(e)
	switch e.Kind {
	case table.Services, table.NodePorts:
		if wanted && exists && !table.LeadsByMark(want.Chain) {
			return early
		}
		return late
	case table.External, table.NodeAddrs:
		return late
	case table.ClusterIPs:
		if wanted {
			return late
		}
	default:
		if wanted {
			return early
		}
	}
	return final
}

// elementsPerCommit bounds a transaction: the kernel commits each in one go.
const elementsPerCommit = 4000

// writeElements appends the pending elements of a phase to the batch.
func (f *family) writeElements(p phase) {
	if f.elements.InSync() {
		return
	}
	var del, change, add [table.Kinds][]nft.Element
	var done []table.Element
	for e := range f.elements.Writes() {
		if f.phaseOf(e) != p {
			continue
		}
		want, _ := f.elements.Wanted(e)
		if have, exists := f.elements.Exists(e); exists {
			del[e.Kind] = append(del[e.Kind], e.Encode(f.fam, have))
			change[e.Kind] = append(change[e.Kind], e.Encode(f.fam, want))
		} else {
			add[e.Kind] = append(add[e.Kind], e.Encode(f.fam, want))
		}
		done = append(done, e)
	}
	for e := range f.elements.Deletes() {
		if f.phaseOf(e) == p {
			have, _ := f.elements.Exists(e)
			del[e.Kind] = append(del[e.Kind], e.Encode(f.fam, have))
			done = append(done, e)
		}
	}
	for k := range table.Kinds {
		set := k.Set(f.fam)
		if len(del[k]) > 0 {
			f.add(nft.Op{Kind: nft.DeleteElements, Set: set, Elements: del[k]})
		}
		if len(change[k]) > 0 {
			f.add(nft.Op{Kind: nft.AddElements, Set: set, Elements: change[k]})
		}
		for part := range slices.Chunk(add[k], elementsPerCommit) {
			f.bulk = append(f.bulk, nft.Op{Kind: nft.AddElements, Table: table.Of(f.fam), Set: set, Elements: part})
		}
	}
	for _, e := range done {
		f.elements.Done(e) // after a failure all of it is read back
	}
}

// setRanges replaces the elements of an interval set if they differ.
func (f *family) setRanges(name string, prefixes []netip.Prefix) {
	want := nft.Intervals(f.fam.Prefixes(prefixes))
	for _, o := range nft.ReplaceIntervals(f.objects[name].Set, f.ranges[name], want) {
		f.add(o)
	}
	f.ranges[name] = want
}

// add appends a step to the batch.
func (f *family) add(o nft.Op) {
	o.Table = table.Of(f.fam)
	f.batch = append(f.batch, o)
}

// commit writes the batch, and new elements with it or behind it.
func (f *family) commit() error {
	batch, bulk := f.batch, f.bulk
	f.batch, f.bulk = nil, nil
	for len(batch) > 0 || len(bulk) > 0 {
		size := 0
		for _, o := range batch {
			size += len(o.Elements)
		}
		for len(bulk) > 0 && (f.replace || size == 0 || size+len(bulk[0].Elements) <= elementsPerCommit) {
			size += len(bulk[0].Elements)
			batch, bulk = append(batch, bulk[0]), bulk[1:]
		}
		if err := f.k.tables.Commit(f.ctx, batch); err != nil {
			return fmt.Errorf("write the %s table: %w", f.fam, err)
		}
		batch = nil
	}
	return nil
}

// raise creates and changes virtual servers, and gives real servers new flows.
func (f *family) raise() {
	var due []ipvs.Key
	for k := range f.servers.Writes() {
		due = append(due, k)
	}
	slices.SortFunc(due, ipvs.Key.Compare)
	for _, k := range due {
		v, _ := f.servers.Wanted(k)
		op := f.k.servers.CreateServer
		if _, exists := f.servers.Exists(k); exists {
			op = f.k.servers.UpdateServer
		}
		err := f.withScheduler(v, op)
		if errors.Is(err, ipvs.ErrExist) {
			f.meet(k)
		}
		if err != nil {
			f.fail(f.owners[k], err)
			continue
		}
		f.servers.Done(k)
	}
	var reals []realKey
	for k := range f.reals.Writes() {
		reals = append(reals, k)
	}
	slices.SortFunc(reals, func(a, b realKey) int {
		if c := a.server.Compare(b.server); c != 0 {
			return c
		}
		return a.addr.Compare(b.addr)
	})
	lowered := reals[:0]
	for _, k := range reals {
		want, _ := f.reals.Wanted(k)
		have, exists := f.reals.Exists(k)
		if exists && want.weight < have.weight {
			lowered = append(lowered, k)
			continue
		}
		f.writeReal(k, want, exists)
	}
	for _, k := range lowered {
		want, _ := f.reals.Wanted(k)
		f.writeReal(k, want, true)
	}
}

func (f *family) writeReal(k realKey, want real, exists bool) {
	if _, there := f.servers.Exists(k.server); !there {
		return // its creation failed
	}
	op := f.k.servers.CreateReal
	if exists {
		op = f.k.servers.UpdateReal
	}
	if err := op(k.server, ipvs.RealServer{Addr: k.addr, Weight: want.weight, Forwarding: want.forwarding}); err != nil {
		f.fail(f.owners[k.server], err)
		return
	}
	f.reals.Done(k)
}

// deleteServers deletes the virtual servers that nobody wants and no flow uses.
func (f *family) deleteServers() {
	reals := map[ipvs.Key][]realKey{}
	for k := range f.reals.Deletes() {
		reals[k.server] = append(reals[k.server], k)
	}
	var due []ipvs.Key
	for k := range f.servers.Deletes() {
		if len(reals[k]) == 0 || !f.drains(k) {
			due = append(due, k)
		}
	}
	slices.SortFunc(due, ipvs.Key.Compare)
	for _, k := range due {
		if err := f.k.servers.DeleteServer(k); err != nil && !errors.Is(err, ipvs.ErrNoServer) {
			f.fail(f.owners[k], err)
			continue
		}
		f.servers.Gone(k)
		delete(f.owners, k)
		for _, r := range reals[k] {
			f.reals.Gone(r)
			delete(f.draining, r)
			delete(f.limits, r)
		}
	}
}

// bind puts addresses onto the device.
func (f *family) bind() {
	for _, a := range sortedKeys(f.bound.Writes()) {
		if err := f.k.device.Add(a); err != nil {
			f.fail(plan.ID{}, err)
			continue
		}
		f.bound.Done(a)
	}
}

// unbind takes addresses off the device.
func (f *family) unbind() {
	for _, a := range sortedKeys(f.bound.Deletes()) {
		if err := f.k.device.Remove(a); err != nil {
			f.fail(plan.ID{}, err)
			continue
		}
		f.bound.Done(a)
	}
}

func sortedKeys(keys func(func(netip.Addr) bool)) []netip.Addr {
	return slices.SortedFunc(keys, netip.Addr.Compare)
}

// steer makes the routes exist.
func (f *family) steer() error {
	if f.steering {
		return nil
	}
	for _, e := range f.routes() {
		if err := f.k.routing.Add(f.ctx, e); err != nil {
			return err
		}
	}
	f.steering = true
	return nil
}

// tidy deletes what nobody needs any more. What the kernel still holds on to is
// tried again with the next change: before Linux 6.2 it lets go of a chain only some
// time after the last element that led there.
func (f *family) tidy() {
	ops := f.surplus()
	if len(ops) == 0 {
		return
	}
	gone := func(name string) {
		delete(f.touched, name)
		delete(f.objects, name)
	}
	if err := f.k.tables.Commit(f.ctx, ops); err == nil {
		for i := range ops {
			gone(ops[i].Name)
		}
		return
	}
	for i := range ops {
		err := f.k.tables.Commit(f.ctx, ops[i:i+1])
		switch {
		case err == nil || errors.Is(err, nft.ErrNotExist):
			gone(ops[i].Name)
		case !errors.Is(err, nft.ErrBusy):
			f.env.Log.Warn("an unused nftables object cannot be deleted; it is tried again with the next change", "error", err)
		}
	}
}
