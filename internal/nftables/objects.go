package nftables

import (
	"crypto/sha256"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// entry is a chain or set and who needs it.
type entry struct {
	refs   int  // frontends
	pinned bool // needed in any case
	isSet  bool
	exists bool // in the kernel
	sum    [sha256.Size]byte
	seen   int // the last round in which it was compared
}

func (e *entry) needed() bool { return e.refs > 0 || e.pinned }

// ensure makes an object exist as it is, and returns its entry.
func (f *family) ensure(o nft.Object) *entry {
	name := o.Name()
	e := f.objects[name]
	if e == nil {
		e = &entry{isSet: o.Set != nil}
		f.objects[name] = e
	}
	if e.seen == f.round {
		return e
	}
	e.seen = f.round
	sum := o.Sum()
	if e.exists && e.sum == sum {
		return e
	}
	for _, op := range o.Steps(e.exists) {
		f.add(op)
	}
	e.exists, e.sum = true, sum
	return e
}

// retain counts a user of an object.
func (f *family) retain(o nft.Object) { f.ensure(o).refs++ }

// release counts a user less; what nobody needs is deleted later.
func (f *family) release(name string) {
	e := f.objects[name]
	e.refs--
	if !e.needed() {
		f.unused[name] = struct{}{}
	}
}

// pin makes objects exist that are not counted; those of before that are not among
// them are not needed any more.
func (f *family) pin(objects []nft.Object) {
	wanted := map[string]bool{}
	for _, o := range objects {
		f.ensure(o).pinned = true
		wanted[o.Name()] = true
	}
	for name, e := range f.objects {
		if e.pinned && !e.isSet && !wanted[name] {
			e.pinned = false
			f.unused[name] = struct{}{}
		}
	}
}

// surplus are the steps that delete what nobody needs: chains before the sets and
// chains to which they lead.
func (f *family) surplus() []nft.Op {
	names := make([]string, 0, len(f.unused))
	for name := range f.unused {
		e := f.objects[name]
		switch {
		case e.needed():
			delete(f.unused, name)
		case !e.exists:
			delete(f.unused, name)
			delete(f.objects, name)
		default:
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int {
		if r := f.rank(a) - f.rank(b); r != 0 {
			return r
		}
		return strings.Compare(a, b)
	})
	ops := make([]nft.Op, len(names))
	for i, name := range names {
		ops[i] = nft.Op{Kind: nft.DeleteChain, Table: f.table, Name: name}
		if f.objects[name].isSet {
			ops[i].Kind = nft.DeleteSet
		}
	}
	return ops
}

// rank orders deletions.
func (f *family) rank(name string) int {
	switch {
	case f.objects[name].isSet:
		return 3
	case name == chainRecord, strings.Contains(name, prefixDraw):
		return 2
	case strings.HasPrefix(name, prefixAllow):
		return 0
	}
	return 1
}
