package relay

import (
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// reserve is what of the process's descriptors is left to everything else.
const reserve = 64

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Loops == 0 {
		o.Loops = max(runtime.GOMAXPROCS(0)-1, 1)
	}
	if o.ConnectTimeouts == nil {
		o.ConnectTimeouts = []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second}
	}
	if o.Ejection.For == 0 {
		o.Ejection.For = 10 * time.Second
	}
	if o.UDPTimeout == 0 {
		o.UDPTimeout = 250 * time.Millisecond
	}
	if o.KeepAlive == 0 {
		o.KeepAlive = 15 * time.Second
	}
	if o.Quarters == 0 {
		o.Quarters = 4
	}
	if o.MaxFlows == 0 {
		o.MaxFlows = 65536
	}
	if o.IdleAfter == 0 {
		o.IdleAfter = 10 * time.Second
	}
	if o.MaxAffinity == 0 {
		o.MaxAffinity = 65536
	}
	return o
}

// budget counts the descriptors in use against their limit.
type budget struct {
	limit int64
	whole bool // all of the process: listeners count too
	used  atomic.Int64
}

// newBudget returns a budget of limit descriptors; 0: so many quarters of what the
// process may have, less a reserve, which is a quarter where the limit is low.
func newBudget(limit, quarters int) (*budget, error) {
	if limit > 0 {
		return &budget{limit: int64(limit)}, nil
	}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return nil, err
	}
	most := int64(min(r.Cur, 1<<30))
	return &budget{limit: (most - min(reserve, most/4)) * int64(quarters) / 4, whole: true}, nil
}

// take reserves n descriptors, or none and returns false.
func (b *budget) take(n int) bool {
	if b.used.Add(int64(n)) > b.limit {
		b.used.Add(int64(-n))
		return false
	}
	return true
}

// share bounds what one Service may have of the descriptors: so many times what is
// left. One alone gets three quarters, the next one that is as greedy three quarters of
// the rest: whoever comes finds something left, at once and without waiting for others
// to be idle (dynamic thresholds, Choudhury and Hahne 1998).
const share = 3

// crowds reports whether a Service has its share already, though n descriptors are left.
func (b *budget) crowds(s *Service, n int) bool {
	left := b.limit - b.used.Load()
	return left >= int64(n) && s.descriptors.Load() > share*left
}

// takeFor reserves n descriptors for a connection or flow of a Service, or none and
// returns false.
func (b *budget) takeFor(s *Service, n int) bool {
	if b.crowds(s, n) || !b.take(n) {
		return false
	}
	s.descriptors.Add(int64(n))
	return true
}

func (b *budget) giveFor(s *Service, n int) {
	s.descriptors.Add(int64(-n))
	b.give(n)
}

// listens counts n more listening sockets, which are never refused.
func (b *budget) listens(n int) {
	if b.whole {
		b.used.Add(int64(n))
	}
}

func (b *budget) give(n int) { b.used.Add(int64(-n)) }
