package ipvs

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// entry is a chain or a set with fixed elements, and who needs it.
type entry struct {
	object
	refs   int  // frontends
	pinned bool // needed in any case
	isSet  bool
	exists bool // in the kernel, with the content that sum stands for
	sum    [sha256.Size]byte
	want   [sha256.Size]byte // of object
}

func (e *entry) needed() bool { return e.refs > 0 || e.pinned }

// sumOf stands for a chain and its rules.
func chainSum(c *nft.Chain, rules []*nft.Rule) [sha256.Size]byte {
	var b strings.Builder
	if c.Hook != nil {
		fmt.Fprintln(&b, *c.Hook)
	}
	for _, r := range rules {
		fmt.Fprintln(&b, r)
	}
	return sha256.Sum256([]byte(b.String()))
}

func setSum(s *nft.Set, elements []nft.Element) [sha256.Size]byte {
	lines := make([]string, len(elements))
	for i := range elements {
		lines[i] = s.ElementText(&elements[i])
	}
	slices.Sort(lines)
	return sha256.Sum256([]byte(declaration(s) + strings.Join(lines, "\n")))
}

func (o *object) sum() [sha256.Size]byte {
	if o.set != nil {
		return setSum(o.set, o.elements)
	}
	return chainSum(o.chain, o.rules)
}

// declaration is what cannot be changed of a set.
func declaration(s *nft.Set) string {
	bare := *s
	bare.Comment = ""
	return bare.String()
}

// place makes an entry stand for an object.
func (f *family) place(o object) *entry {
	e := f.objects[o.name()]
	if e == nil {
		e = &entry{}
		f.objects[o.name()] = e
	}
	e.object, e.isSet, e.want = o, o.set != nil, o.sum()
	return e
}

// retain counts a user of an object.
func (f *family) retain(o object) {
	e := f.objects[o.name()]
	if e == nil || e.refs == 0 || e.chain == nil && e.set == nil {
		e = f.place(o)
		f.touched[o.name()] = struct{}{}
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

// pin makes the objects exist that are always there.
func (f *family) pin() {
	for _, o := range append(f.settings.inner(), f.settings.base()...) {
		f.place(o).pinned = true
		f.touched[o.name()] = struct{}{}
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
		return strings.Compare(a.name(), b.name())
	})
	// Chains come before the rules that lead to them.
	for _, e := range due {
		switch {
		case e.isSet && e.exists:
			f.add(nft.Op{Kind: nft.FlushSet, Name: e.name()})
		case e.isSet:
			f.add(nft.Op{Kind: nft.AddSet, Set: e.set})
		case e.exists:
			f.add(nft.Op{Kind: nft.FlushChain, Name: e.name()})
		default:
			f.add(nft.Op{Kind: nft.AddChain, Chain: e.chain})
		}
		if e.isSet && len(e.elements) > 0 {
			f.add(nft.Op{Kind: nft.AddElements, Set: e.set, Elements: e.elements})
		}
	}
	for _, e := range due {
		if !e.isSet {
			for _, r := range e.rules {
				f.add(nft.Op{Kind: nft.AddRule, Name: e.name(), Rule: r})
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
	case e.chain != nil && e.chain.Hook != nil:
		return 0
	case e.chain != nil && strings.HasPrefix(e.chain.Name, prefixAllow):
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
		ops[i] = nft.Op{Kind: nft.DeleteChain, Table: tableOf(f.fam), Name: e.name()}
		if e.isSet {
			ops[i].Kind = nft.DeleteSet
		}
	}
	return ops
}
