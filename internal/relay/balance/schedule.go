package balance

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Scheduler is a way of choosing an endpoint.
type Scheduler uint8

const (
	WeightedRoundRobin Scheduler = iota // in turn, in proportion to the weights
	RoundRobin                          // in turn
	Random                              // at random, in proportion to the weights
	LeastConnections                    // the one with the fewest connections
	WeightedLeast                       // the one with the fewest connections for its weight
	ShortestDelay                       // as WeightedLeast, counting the new one too
	NeverQueue                          // one without connections, else as ShortestDelay
	SourceHash                          // by the client's address, in proportion to the weights
	Failover                            // the one with the highest weight
)

// ParseScheduler returns the Scheduler with ip_vs's name, or "random". A name that
// is unknown, or has no meaning here, gives WeightedRoundRobin and false; "" is
// WeightedRoundRobin, which is RoundRobin as long as nobody gives weights.
func ParseScheduler(name string) (Scheduler, bool) {
	switch name {
	case "", "wrr":
		return WeightedRoundRobin, true
	case "rr":
		return RoundRobin, true
	case "random":
		return Random, true
	case "lc":
		return LeastConnections, true
	case "wlc":
		return WeightedLeast, true
	case "sed":
		return ShortestDelay, true
	case "nq":
		return NeverQueue, true
	case "sh", "mh":
		return SourceHash, true
	case "fo":
		return Failover, true
	}
	return WeightedRoundRobin, false
}

// pool is one of a Service's lists of endpoints with its position. Guarded by
// Balancer.mu.
type pool struct {
	members []member // sorted by address
	turn    int      // of RoundRobin: where to look first
}

type member struct {
	*Endpoint
	weight  int64
	current int64 // of WeightedRoundRobin: how far behind its share it is
}

func (p *pool) find(addr netip.AddrPort) (int, bool) {
	return slices.BinarySearchFunc(p.members, addr, func(m member, a netip.AddrPort) int { return m.Addr.Compare(a) })
}

func (p *pool) has(addr netip.AddrPort) bool {
	_, found := p.find(addr)
	return found
}

// takes reports whether e is a member that takes new flows.
func (p *pool) takes(e *Endpoint) bool {
	i, found := p.find(e.Addr)
	return found && p.members[i].weight > 0
}

// choose returns the scheduler's choice among the members that may be tried: those
// that were not, and are not ejected; else those that were not; else those that were
// not tried last; else all.
func (p *pool) choose(policy *plan.Policy, client netip.AddrPort, now time.Time, tried []*Endpoint) *Endpoint {
	how, _ := ParseScheduler(policy.Scheduler)
	if how == SourceHash && !policy.Fallback && len(tried) == 0 {
		return p.hashed(client, policy.SourcePort)
	}
	last := func(m *member) bool { return len(tried) > 0 && tried[len(tried)-1] == m.Endpoint }
	for _, may := range [...]func(*member) bool{
		func(m *member) bool { return !slices.Contains(tried, m.Endpoint) && !m.passedOver(now) },
		func(m *member) bool { return !slices.Contains(tried, m.Endpoint) },
		func(m *member) bool { return !last(m) },
		func(*member) bool { return true },
	} {
		if e := p.schedule(how, client, policy.SourcePort, func(m *member) bool { return m.weight > 0 && may(m) }); e != nil {
			return e
		}
	}
	return nil
}

// schedule returns the choice among the members that may be chosen, nil if none may.
func (p *pool) schedule(how Scheduler, client netip.AddrPort, withPort bool, may func(*member) bool) *Endpoint {
	switch how {
	case RoundRobin:
		return p.inTurn(may)
	case Random:
		return p.random(may)
	case LeastConnections:
		return p.least(may, func(m *member) float64 { return float64(m.active.Load()) })
	case WeightedLeast:
		return p.least(may, func(m *member) float64 { return float64(m.active.Load()) / float64(m.weight) })
	case ShortestDelay:
		return p.least(may, func(m *member) float64 { return float64(m.active.Load()+1) / float64(m.weight) })
	case NeverQueue:
		if e := p.inTurn(func(m *member) bool { return m.active.Load() == 0 && may(m) }); e != nil {
			return e
		}
		return p.schedule(ShortestDelay, client, withPort, may)
	case SourceHash:
		key := hashClient(client, withPort)
		return p.least(may, func(m *member) float64 { return rendezvous(key, m.Addr, m.weight) })
	case Failover:
		return p.least(may, func(m *member) float64 { return -float64(m.weight) })
	}
	return p.weightedInTurn(may)
}

func (p *pool) inTurn(may func(*member) bool) *Endpoint {
	for i := range p.members {
		at := (p.turn + i) % len(p.members)
		if m := &p.members[at]; may(m) {
			p.turn = at + 1
			return m.Endpoint
		}
	}
	return nil
}

// weightedInTurn is smooth weighted round robin: every member gains its weight, and
// the one that has most pays for all. It begins anywhere when nobody has anything.
func (p *pool) weightedInTurn(may func(*member) bool) *Endpoint {
	var best *member
	var total int64
	for i := range p.members {
		m := &p.members[(p.turn+i)%len(p.members)]
		if !may(m) {
			continue
		}
		total += m.weight
		m.current += m.weight
		if best == nil || m.current > best.current {
			best = m
		}
	}
	if best == nil {
		return nil
	}
	best.current -= total
	return best.Endpoint
}

func (p *pool) random(may func(*member) bool) *Endpoint {
	var total int64
	for i := range p.members {
		if m := &p.members[i]; may(m) {
			total += m.weight
		}
	}
	if total == 0 {
		return nil
	}
	at := rand.Int64N(total)
	for i := range p.members {
		m := &p.members[i]
		if !may(m) {
			continue
		}
		if at < m.weight {
			return m.Endpoint
		}
		at -= m.weight
	}
	return nil
}

// least returns the member with the smallest cost; among equals, they take turns.
func (p *pool) least(may func(*member) bool, cost func(*member) float64) *Endpoint {
	best, lowest := -1, math.Inf(1)
	for i := range p.members {
		at := (p.turn + i) % len(p.members)
		if m := &p.members[at]; may(m) {
			if c := cost(m); best < 0 || c < lowest {
				best, lowest = at, c
			}
		}
	}
	if best < 0 {
		return nil
	}
	p.turn = best + 1
	return p.members[best].Endpoint
}

// hashed returns the endpoint that the client hashes to, nil if that one takes no
// new flows: without Fallback, its clients are refused as ip_vs does.
func (p *pool) hashed(client netip.AddrPort, withPort bool) *Endpoint {
	key := hashClient(client, withPort)
	var chosen *member
	lowest := math.Inf(1)
	for i := range p.members {
		m := &p.members[i]
		if c := rendezvous(key, m.Addr, max(m.weight, 1)); chosen == nil || c < lowest {
			chosen, lowest = m, c
		}
	}
	if chosen == nil || chosen.weight == 0 {
		return nil
	}
	return chosen.Endpoint
}

// rendezvous is an endpoint's cost for a client by weighted rendezvous hashing: the
// lowest wins, in proportion to the weights, and an endpoint that comes or goes moves
// only its own share of the clients. It is the same on every node.
func rendezvous(key uint64, addr netip.AddrPort, weight int64) float64 {
	h := mix(key ^ hashClient(addr, true))
	u := (float64(h>>11) + 0.5) / (1 << 53) // in (0, 1)
	return -math.Log(u) / float64(weight)
}

// hashClient is FNV-1a over the address and, if asked for, the port, mixed.
func hashClient(a netip.AddrPort, withPort bool) uint64 {
	const prime = 1099511628211
	h := uint64(14695981039346656037)
	for _, b := range a.Addr().As16() {
		h = (h ^ uint64(b)) * prime
	}
	if withPort {
		h = (h ^ uint64(a.Port()&0xff)) * prime
		h = (h ^ uint64(a.Port()>>8)) * prime
	}
	return mix(h)
}

// mix spreads every bit over all (the finalizer of SplitMix64).
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
