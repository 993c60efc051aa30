package userspace

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// write brings the table to what is wanted. Up to every step packets meet what was
// there or what is wanted: sets and what leads to listeners first, then the chains,
// then what leads to nothing any more.
func (f *family) write(n *plan.Node, fresh bool) {
	if f.renew {
		f.add(nft.Op{Kind: nft.DeleteTable})
	}
	if len(f.sets) == 0 {
		f.add(nft.Op{Kind: nft.AddTable, Comment: layout})
	}
	core := map[string]*nft.Set{}
	for _, set := range f.settings.sets() {
		core[set.Name] = set
		if !f.sets[set.Name] {
			f.add(nft.Op{Kind: nft.AddSet, Set: set})
			f.sets[set.Name] = true
		}
	}
	f.setRanges(core[setOwn], []netip.Prefix{f.settings.block})
	f.setRanges(core[setPodRanges], f.settings.local.Prefixes)
	chains := f.settings.chains()
	for _, c := range chains { // those that verdicts may lead to
		if _, exists := f.chains[c.Name()]; c.Chain.Hook == nil && !exists {
			f.putChain(c)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.guarded)) {
		f.putGuard(name, f.guarded[name])
	}
	for at := range f.elements.Writes() {
		f.replace(core[at.set], at)
	}
	for _, c := range chains {
		f.putChain(c)
	}
	f.setRanges(core[setRanges], n.ServiceCIDRs)
	for at := range f.elements.Deletes() {
		have, _ := f.elements.Exists(at)
		f.addElements(nft.DeleteElements, core[at.set], have.element(at.key))
	}
	if fresh {
		f.dropUnknown(core, chains)
	}
	f.commit()
	if f.err != nil {
		return
	}
	for at := range f.pending() {
		f.elements.Done(at)
	}
}

// pending are the elements that differ.
func (f *family) pending() map[place]bool {
	out := map[place]bool{}
	for at := range f.elements.Writes() {
		out[at] = true
	}
	for at := range f.elements.Deletes() {
		out[at] = true
	}
	return out
}

// replace writes one element, in one transaction with the end of what is there.
func (f *family) replace(set *nft.Set, at place) {
	if f.size >= elementsPerCommit && !f.renew {
		f.commit()
	}
	if have, ok := f.elements.Exists(at); ok {
		f.addElements(nft.DeleteElements, set, have.element(at.key))
	}
	want, _ := f.elements.Wanted(at)
	f.addElements(nft.AddElements, set, want.element(at.key))
}

// addElements appends to the last step if it is of the same kind.
func (f *family) addElements(k nft.Kind, set *nft.Set, e nft.Element) {
	f.size++
	if n := len(f.batch); n > 0 {
		if last := &f.batch[n-1]; last.Kind == k && last.Set != nil && last.Set.Name == set.Name {
			last.Elements = append(last.Elements, e)
			return
		}
	}
	f.batch = append(f.batch, nft.Op{Kind: k, Table: tableOf(f.fam), Set: set, Elements: []nft.Element{e}})
}

func (f *family) add(o nft.Op) {
	o.Table = tableOf(f.fam)
	f.batch = append(f.batch, o)
}

// putChain makes a chain as it should be.
func (f *family) putChain(c nft.Object) {
	sum := c.Sum()
	have, exists := f.chains[c.Name()]
	if exists && have == sum {
		return
	}
	for _, o := range c.Steps(exists) {
		f.add(o)
	}
	f.chains[c.Name()] = sum
}

// setRanges replaces the elements of an interval set if they differ.
func (f *family) setRanges(set *nft.Set, prefixes []netip.Prefix) {
	want := nft.Intervals(f.fam.Prefixes(prefixes))
	for _, o := range nft.ReplaceIntervals(set, f.ranges[set.Name], want) {
		f.add(o)
	}
	f.ranges[set.Name] = want
}

// putGuard makes the objects for source ranges as they should be.
func (f *family) putGuard(name string, ranges []netip.Prefix) {
	set, c := f.settings.guardObjects(name)
	delete(f.unused, set.Name)
	delete(f.unused, c.Name())
	if !f.sets[set.Name] {
		f.add(nft.Op{Kind: nft.AddSet, Set: set})
		f.sets[set.Name] = true
	}
	f.setRanges(set, ranges)
	f.putChain(c)
}

// dropUnknown deletes what a table holds that this layout does not.
func (f *family) dropUnknown(core map[string]*nft.Set, chains []nft.Object) {
	keep := map[string]bool{}
	for _, c := range chains {
		keep[c.Name()] = true
	}
	for name := range f.guards {
		if f.guards[name] > 0 {
			keep[prefixAllow+name], keep[prefixSources+name] = true, true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.chains)) {
		if !keep[name] {
			f.unused[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.sets)) {
		if core[name] == nil && !keep[name] {
			f.unused[name] = true
		}
	}
}

// commit writes the batch. After an error nothing more is written.
func (f *family) commit() {
	batch := f.batch
	f.batch, f.size = nil, 0
	if f.err != nil || len(batch) == 0 {
		return
	}
	f.err = f.tables.Commit(f.ctx, batch)
}

// tidy deletes chains and sets that nobody needs any more. What the kernel still
// holds on to is tried again with the next change: before Linux 6.2 it lets go of a
// chain only some time after the last element that led there.
func (f *family) tidy() {
	for name, users := range f.guards {
		if users <= 0 {
			delete(f.guards, name)
			f.unused[prefixAllow+name], f.unused[prefixSources+name] = true, true
		}
	}
	isSet := func(name string) bool { _, isChain := f.chains[name]; return !isChain }
	names := slices.Sorted(maps.Keys(f.unused))
	slices.SortStableFunc(names, func(a, b string) int { // chains refer to sets
		switch {
		case isSet(a) == isSet(b):
			return 0
		case isSet(a):
			return 1
		}
		return -1
	})
	for _, name := range names {
		o := nft.Op{Kind: nft.DeleteChain, Table: tableOf(f.fam), Name: name}
		if isSet(name) {
			o.Kind = nft.DeleteSet
		}
		err := f.tables.Commit(f.ctx, []nft.Op{o})
		switch {
		case err == nil || errors.Is(err, nft.ErrNotExist):
			delete(f.unused, name)
			delete(f.chains, name)
			delete(f.sets, name)
			delete(f.ranges, name)
		case !errors.Is(err, nft.ErrBusy):
			f.env.Log.Warn("an unused nftables object cannot be deleted; it is tried again with the next change", "error", err)
		}
	}
}
