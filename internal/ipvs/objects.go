package ipvs

import (
	"crypto/sha256"
	"maps"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// entry is a chain or a set with fixed elements, and who needs it.
type entry struct {
	nft.Object
	refs   int  // frontends
	pinned bool // needed in any case
	isSet  bool
	exists bool // in the kernel, with the content that sum stands for
	sum    [sha256.Size]byte
	want   [sha256.Size]byte // of object
}

func (e *entry) needed() bool { return e.refs > 0 || e.pinned }

// place makes an entry stand for an object.
func (f *family) place(o nft.Object) *entry {
	e := f.objects[o.Name()]
	if e == nil {
		e = &entry{}
		f.objects[o.Name()] = e
	}
	e.Object, e.isSet, e.want = o, o.Set != nil, o.Sum()
	return e
}

// retain counts a user of an object.
func (f *family) retain(o nft.Object) {
	e := f.objects[o.Name()]
	if e == nil || e.refs == 0 || e.Chain == nil && e.Set == nil {
		e = f.place(o)
		f.touched[o.Name()] = struct{}{}
	}
	e.refs++
}

// release counts a user less; what nobody needs is deleted later.
func (f *family) release(name string) {
	if e := f.objects[name]; e != nil {
		if e.refs--; e.refs == 0 {
			f.touched[name] = struct{}{}
		}
	}
}

// pin makes objects exist that are always there.
func (f *family) pin(objects []nft.Object) {
	for _, o := range objects {
		f.place(o).pinned = true
		f.touched[o.Name()] = struct{}{}
	}
}

// makeObjects writes the touched objects that are needed and missing or different:
// sets first, then chains in the order in which they lead to each other.
func (f *family) makeObjects() {
	var due []*entry
	for name := range f.touched {
		if e := f.objects[name]; e != nil && e.needed() && !(e.exists && e.sum == e.want) {
			due = append(due, e)
		}
	}
	slices.SortFunc(due, func(a, b *entry) int {
		if r := rank(b) - rank(a); r != 0 {
			return r
		}
		return strings.Compare(a.Name(), b.Name())
	})
	// Chains come before the rules that lead to them.
	for _, e := range due {
		switch {
		case e.isSet && e.exists:
			f.add(nft.Op{Kind: nft.FlushSet, Name: e.Name()})
		case e.isSet:
			f.add(nft.Op{Kind: nft.AddSet, Set: e.Set})
		case e.exists:
			f.add(nft.Op{Kind: nft.FlushChain, Name: e.Name()})
		default:
			f.add(nft.Op{Kind: nft.AddChain, Chain: e.Chain})
		}
		if e.isSet && len(e.Elements) > 0 {
			f.add(nft.Op{Kind: nft.AddElements, Set: e.Set, Elements: e.Elements})
		}
	}
	for _, e := range due {
		if !e.isSet {
			for _, r := range e.Rules() {
				f.add(nft.Op{Kind: nft.AddRule, Name: e.Name(), Rule: r})
			}
		}
		e.exists, e.sum = true, e.want
	}
}

// rank orders deletions: what leads to others goes first.
func rank(e *entry) int {
	switch {
	case e.isSet:
		return 3
	case e.Chain != nil && e.Chain.Hook != nil:
		return 0
	case e.Chain != nil && strings.HasPrefix(e.Chain.Name, table.PrefixAllow):
		return 1
	}
	return 2
}

// surplus are the steps that delete the touched objects that nobody needs.
func (f *family) surplus() []nft.Op {
	var due []*entry
	for _, name := range slices.Sorted(maps.Keys(f.touched)) {
		e := f.objects[name]
		switch {
		case e == nil || e.needed():
			delete(f.touched, name)
		case !e.exists:
			delete(f.touched, name)
			delete(f.objects, name)
		default:
			due = append(due, e)
		}
	}
	slices.SortStableFunc(due, func(a, b *entry) int { return rank(a) - rank(b) })
	ops := make([]nft.Op, len(due))
	for i, e := range due {
		ops[i] = nft.Op{Kind: nft.DeleteChain, Table: table.Of(f.fam), Name: e.Name()}
		if e.isSet {
			ops[i].Kind = nft.DeleteSet
		}
	}
	return ops
}
