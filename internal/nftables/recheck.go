package nftables

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/nftables/edits"
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
	suspects, before, refs, s := f.suspects, f.services, f.refs, f.settings
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
	f.suspects, f.trust, f.refs, f.inForce = suspects, true, refs, true
	f.begin()
	f.restore(before)
	f.finish(true)
	f.suspects, f.trust = nil, false
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

// restore puts the Services of the plan before in place again, and writes what is
// missing of those whose elements others changed.
func (f *family) restore(before map[plan.ID]*service) {
	touched, all := f.touchedFronts()
	none := f.settings.render(nil)
	for id, svc := range before {
		r := f.settings.render(svc)
		for _, o := range r.objects {
			f.retain(o)
		}
		f.services[id] = svc
		f.sticky += count(r.hasAffinity())
		if !all && !slices.ContainsFunc(r.fronts, func(fr front) bool { return touched[nft.Tuple(fr.key)] }) {
			continue
		}
		c := &change{f: f, old: none, new: r, edits: &edits.Edits{Owner: id}}
		for i := range r.fronts {
			c.addFront(&r.fronts[i])
		}
		f.emitNew(c.edits)
	}
	c := &change{f: f, edits: &edits.Edits{}}
	for k := range f.refs.counts {
		if set := k.kind.set(); len(f.suspects[set]) > 0 {
			c.add(edits.Fresh, set, k.element(f.fam))
		}
	}
	f.emit(c.edits)
}

// touchedFronts returns the keys of frontends whose elements others changed; all if
// it cannot be told.
func (f *family) touchedFronts() (keys map[nft.Tuple]bool, all bool) {
	const slot = 4 // bytes of its number, at the end of a key
	keys = map[nft.Tuple]bool{}
	for set, suspects := range f.suspects {
		for k := range suspects {
			switch {
			case set == setServices || set == setNodePorts:
				keys[k] = true
			case set == setEndpoints || set == setPortEndpoints:
				keys[k[:max(0, len(k)-slot)]] = true
			case strings.HasPrefix(set, setSticky):
				all = true
			}
		}
	}
	return keys, all
}
