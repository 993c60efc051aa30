package nftables

import (
	"errors"
	"maps"
	"slices"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// The kernel lists a large map slowly, so a read-back of everything takes seconds in a
// large cluster. When others changed elements or rules it tells exactly which: then the
// next apply asks for these elements and reads what is small, and does to the plan
// before what it would do after a read-back. What follows is an apply as usual.

// suspect notes what others changed.
func (f *family) suspect(e *nft.Event) {
	switch {
	case !f.known || e.Table.Name != "" && e.Table.Family != owned.Family(f.fam):
		return // what is not believed cannot be wrong
	case !f.caughtUp || e.Table != f.table || e.Set == "" && !e.Rules:
		f.forget()
		return
	case f.suspects == nil:
		f.suspects = map[string]map[nft.Tuple]bool{}
	}
	if !f.large(e.Set) {
		return // it is read in any case
	}
	if f.suspects[e.Set] == nil {
		f.suspects[e.Set] = map[nft.Tuple]bool{}
	}
	for _, k := range e.Keys {
		f.suspects[e.Set][k] = true
	}
}

// large reports whether a set grows with the cluster and its elements have keys that
// the kernel can be asked for.
func (f *family) large(set string) bool {
	s := f.core[set]
	return s != nil && !s.Interval && set != setNodeAddrs
}

// trusts reports whether an element of the plan before is there for sure.
func (f *family) trusts(set string, key nft.Tuple) bool {
	return f.trust && f.large(set) && !f.suspects[set][key]
}

// recheck repairs the state of the plan before. If it cannot be trusted in general,
// everything is read back.
func (f *family) recheck() error {
	suspects, before, s := f.suspects, f.services, f.settings
	c, err := f.tables.ReadSome(f.ctx, f.table, func(s *nft.Set) bool { return !f.large(s.Name) })
	if errors.Is(err, nft.ErrNoTable) || err == nil && !(f.fits(c) && c.Hooked() && f.whole(c)) {
		f.forget()
		return nil
	}
	if err != nil {
		return err
	}
	f.start(s)
	f.load(c)
	for set, keys := range suspects {
		found, err := f.tables.Lookup(f.ctx, f.table, f.core[set], slices.Collect(maps.Keys(keys)))
		if err != nil {
			return err
		}
		for _, e := range found {
			f.listed[set][e.Key] = e
		}
	}
	f.suspects, f.trust, f.before, f.inForce = suspects, true, before, true
	f.begin()
	f.restore()
	f.finish(true)
	f.suspects, f.trust, f.before = nil, false, nil
	f.commit()
	f.sweep()
	f.sweeps = nil
	f.round++ // chains may have to look different for the new plan
	return f.err
}

// whole reports whether all sets that are trusted are there.
func (f *family) whole(c *nft.Contents) bool {
	for name := range f.core {
		if c.Sets[name] == nil {
			return false
		}
	}
	return true
}

// restore compares the Services of the plan before.
func (f *family) restore() {
	for _, id := range slices.SortedFunc(maps.Keys(f.before), plan.ID.Compare) {
		p := pending{id: id, sp: f.before[id].sp}
		f.prepare(&p, f.settings, true)
		f.move(&p)
		if f.err != nil {
			return
		}
	}
}
