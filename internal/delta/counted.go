package delta

// Counted is a [Tracker] for what may be wanted several times: it goes when nobody
// wants it any more.
type Counted[K, V comparable] struct {
	*Tracker[K, V]
	more map[K]int // wishes beyond the first
}

// NewCounted returns an empty one.
func NewCounted[K, V comparable]() Counted[K, V] {
	return Counted[K, V]{New[K, V](), map[K]int{}}
}

// Add counts a wish; the latest one's value counts.
func (w Counted[K, V]) Add(k K, v V) {
	if _, again := w.Wanted(k); again {
		w.more[k]++
	}
	w.Want(k, v)
}

// Drop takes a wish back.
func (w Counted[K, V]) Drop(k K) {
	if n := w.more[k]; n > 0 {
		if w.more[k] = n - 1; n == 1 {
			delete(w.more, k)
		}
		return
	}
	w.Unwant(k)
}
