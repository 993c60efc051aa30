// Package delta compares what should be with what is known to be there, key by
// key, and remembers only what differs. It does no I/O: whoever writes says
// afterwards what became true.
//
// The cost of a change does not depend on the number of keys, and a key that is
// as wanted takes one map entry.
package delta

import (
	"iter"
	"maps"
)

// Tracker holds, for each key, the wanted value and the value that is there. The
// zero Tracker is not usable, see [New]. It is not safe for concurrent use.
type Tracker[K, V comparable] struct {
	cells   map[K]cell[V]
	pending map[K]struct{}
	// grown is how many keys pending had at most since it was made: walking a map takes
	// as long as for its greatest size.
	grown int
}

type cell[V comparable] struct {
	want, have     V
	wanted, exists bool
}

func (c cell[V]) settled() bool {
	return c.wanted == c.exists && (!c.wanted || c.want == c.have)
}

// New returns an empty Tracker.
func New[K, V comparable]() *Tracker[K, V] {
	return &Tracker[K, V]{cells: map[K]cell[V]{}, pending: map[K]struct{}{}}
}

// Want says that k should have the value v. It reports whether something is to
// be done for that.
func (t *Tracker[K, V]) Want(k K, v V) bool {
	c := t.cells[k]
	c.want, c.wanted = v, true
	return t.put(k, c)
}

// Unwant says that k should not be there.
func (t *Tracker[K, V]) Unwant(k K) {
	c := t.cells[k]
	var none V
	c.want, c.wanted = none, false
	t.put(k, c)
}

// Have says that k is there with the value v.
func (t *Tracker[K, V]) Have(k K, v V) {
	c := t.cells[k]
	c.have, c.exists = v, true
	t.put(k, c)
}

// Gone says that k is not there.
func (t *Tracker[K, V]) Gone(k K) {
	c := t.cells[k]
	var none V
	c.have, c.exists = none, false
	t.put(k, c)
}

// Done says that k became as wanted.
func (t *Tracker[K, V]) Done(k K) {
	c := t.cells[k]
	c.have, c.exists = c.want, c.wanted
	t.put(k, c)
}

// put stores c and reports whether it is pending.
func (t *Tracker[K, V]) put(k K, c cell[V]) bool {
	if !c.wanted && !c.exists {
		delete(t.cells, k)
		t.settle(k)
		return false
	}
	t.cells[k] = c
	if c.settled() {
		t.settle(k)
		return false
	}
	t.pending[k] = struct{}{}
	t.grown = max(t.grown, len(t.pending))
	return true
}

// settle takes k off what is pending.
func (t *Tracker[K, V]) settle(k K) {
	delete(t.pending, k)
	const least, share = 256, 16
	if t.grown < least || len(t.pending) > t.grown/share {
		return
	}
	t.grown = len(t.pending)
	smaller := make(map[K]struct{}, t.grown)
	maps.Copy(smaller, t.pending)
	t.pending = smaller
}

// Forget drops everything known about what is there; what is wanted stays.
func (t *Tracker[K, V]) Forget() {
	for k, c := range t.cells {
		if c.exists {
			t.Gone(k)
		}
	}
}

// UnwantAll drops everything wanted; what is there stays.
func (t *Tracker[K, V]) UnwantAll() {
	for k, c := range t.cells {
		if c.wanted {
			t.Unwant(k)
		}
	}
}

// Wanted returns the value that k should have; false if k should not be there.
func (t *Tracker[K, V]) Wanted(k K) (V, bool) {
	c := t.cells[k]
	return c.want, c.wanted
}

// Exists returns the value with which k is there; false if it is not.
func (t *Tracker[K, V]) Exists(k K) (V, bool) {
	c := t.cells[k]
	return c.have, c.exists
}

// Pending reports whether k is not as wanted.
func (t *Tracker[K, V]) Pending(k K) bool {
	_, ok := t.pending[k]
	return ok
}

// Writes yields the keys that are missing or have another value than wanted, in
// no particular order. The Tracker must not be changed meanwhile.
func (t *Tracker[K, V]) Writes() iter.Seq[K] { return t.differing(true) }

// Deletes yields the keys that are there and should not be, in no particular
// order. The Tracker must not be changed meanwhile.
func (t *Tracker[K, V]) Deletes() iter.Seq[K] { return t.differing(false) }

func (t *Tracker[K, V]) differing(wanted bool) iter.Seq[K] {
	return func(yield func(K) bool) {
		for k := range t.pending {
			if t.cells[k].wanted == wanted && !yield(k) {
				return
			}
		}
	}
}

// InSync reports whether everything is as wanted.
func (t *Tracker[K, V]) InSync() bool { return len(t.pending) == 0 }

// Differing returns the number of keys that are not as wanted.
func (t *Tracker[K, V]) Differing() int { return len(t.pending) }

// Len returns the number of keys that are wanted or there.
func (t *Tracker[K, V]) Len() int { return len(t.cells) }

// All yields the keys that are there, in no particular order. The Tracker must
// not be changed meanwhile.
func (t *Tracker[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for k, c := range t.cells {
			if c.exists && !yield(k, c.have) {
				return
			}
		}
	}
}
