package dataplane

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

const (
	defaultSyncPeriod   = 30 * time.Second
	defaultFullInterval = time.Hour
	// firstRetry is the pause after the first of several failures.
	firstRetry = 500 * time.Millisecond
	// gather is the least time between two looks at the facts, so that a burst of
	// thousands of events is planned in hundreds of steps.
	gather = 10 * time.Millisecond
)

func (s Settings) withDefaults() Settings {
	if s.SyncPeriod <= 0 {
		s.SyncPeriod = defaultSyncPeriod
	}
	if s.FullInterval <= 0 {
		s.FullInterval = defaultFullInterval
	}
	return s
}

// backoff returns the pause before attempt n+1 (n from 0): first, doubled each
// time, at most limit, and up to a quarter less by chance.
func backoff(n int, first, limit time.Duration, jitter func() float64) time.Duration {
	if jitter == nil {
		jitter = rand.Float64
	}
	d := limit
	if n < 20 && first<<n < limit {
		d = first << n
	}
	return d - time.Duration(jitter()*float64(d)/4)
}

// urgent reports whether u takes something away from somebody: a frontend, an
// endpoint, a right. Whoever waits with that sends packets to where nobody is.
func urgent(u *plan.Update) bool {
	return slices.ContainsFunc(u.Changed, func(c plan.Change) bool {
		switch {
		case c.Old == nil:
			return false
		case c.New == nil:
			return true
		}
		return loses(c.Old.Pools[plan.Cluster], c.New.Pools[plan.Cluster]) ||
			loses(c.Old.Pools[plan.Local], c.New.Pools[plan.Local]) ||
			closes(c.Old.Frontends, c.New.Frontends)
	})
}

// loses reports whether an endpoint that takes new flows in old does not in new.
// Both are sorted by address.
func loses(old, new []plan.Endpoint) bool {
	i := 0
	for _, o := range old {
		for i < len(new) && new[i].Addr.Compare(o.Addr) < 0 {
			i++
		}
		gone := i == len(new) || new[i].Addr != o.Addr || new[i].Weight == 0
		if gone && o.Weight > 0 {
			return true
		}
	}
	return false
}

// closes reports whether a frontend of old is missing in new, or admits fewer.
func closes(old, new []plan.Frontend) bool {
	type key struct {
		kind plan.Kind
		dst  netip.AddrPort
	}
	now := make(map[key]*plan.Frontend, len(new))
	for i := range new {
		now[key{new[i].Kind, netip.AddrPortFrom(new[i].Addr, new[i].Port)}] = &new[i]
	}
	return slices.ContainsFunc(old, func(o plan.Frontend) bool {
		n := now[key{o.Kind, netip.AddrPortFrom(o.Addr, o.Port)}]
		if n == nil || n.Allow != nil && !slices.Equal(n.Allow, o.Allow) {
			return true
		}
		for _, from := range plan.Origins {
			if o.Route[from].Verdict == plan.Forward && n.Route[from].Verdict != plan.Forward {
				return true
			}
		}
		return false
	})
}
