package ipvs

import "github.com/svcproxy/svcproxy/internal/delta"

// wants is what should be and what is there, where something may be wanted several
// times: it goes when nobody wants it any more.
type wants[K, V comparable] struct {
	*delta.Tracker[K, V]
	more map[K]int // wishes beyond the first
}

func newWants[K, V comparable]() wants[K, V] {
	return wants[K, V]{delta.New[K, V](), map[K]int{}}
}

// add counts a wish; the latest one's value counts.
func (w wants[K, V]) add(k K, v V) {
	if _, again := w.Wanted(k); again {
		w.more[k]++
	}
	w.Want(k, v)
}

// drop takes a wish back.
func (w wants[K, V]) drop(k K) {
	if n := w.more[k]; n > 0 {
		if w.more[k] = n - 1; n == 1 {
			delete(w.more, k)
		}
		return
	}
	w.Unwant(k)
}
