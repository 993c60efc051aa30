package iptables

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// vigilPatience is how long the first look at the tables waits for the watch.
const vigilPatience = 2 * time.Second

// Vigil has the first look at several tables wait until changes by others are seen: what
// changes between the two would stay. The zero value is not ready, see NewVigil.
type Vigil struct {
	begun  atomic.Bool
	seen   chan struct{} // closed once all is seen
	once   sync.Once     // closes seen
	blind  atomic.Int32  // watches that are not ready
	unseen atomic.Bool   // the look did not wait
}

// NewVigil returns one that nobody keeps yet.
func NewVigil() *Vigil { return &Vigil{seen: make(chan struct{})} }

// Begin says that there will be a watch.
func (v *Vigil) Begin() { v.begun.Store(true) }

// Expect says of how many watches it consists; each calls Ready once.
func (v *Vigil) Expect(n int) { v.blind.Store(int32(n)) }

// Ready says that one more of the watches sees changes. It reports whether there was a
// look before, of which somebody has to make sure that it still holds.
func (v *Vigil) Ready() (late bool) {
	if v.blind.Add(-1) <= 0 {
		v.once.Do(func() { close(v.seen) })
	}
	return v.unseen.Load()
}

// Await waits until all changes are seen, if somebody watches, for 2 s at most.
func (v *Vigil) Await(ctx context.Context) {
	select {
	case <-v.seen:
		return
	default:
	}
	if v.begun.Load() {
		select {
		case <-v.seen:
			return
		case <-ctx.Done():
		case <-time.After(vigilPatience):
		}
	}
	v.unseen.Store(true)
}
