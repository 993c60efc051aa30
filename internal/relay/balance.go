package relay

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
// Service.mu.
type pool struct {
	members []member // sorted by address
	turn    int      // of RoundRobin: where to look first
}

type member struct {
	*endpoint
	weight  int64
	current int64 // of WeightedRoundRobin: how far behind its share it is
}

func (p *pool) has(addr netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(p.members, addr, func(m member, a netip.AddrPort) int { return m.addr.Compare(a) })
	return found
}

// newPool returns the pool of eps that takes the place of old. s.mu is held.
func (s *Service) newPool(eps []plan.Endpoint, old pool) pool {
	current := make(map[*endpoint]int64, len(old.members))
	for _, m := range old.members {
		current[m.endpoint] = m.current
	}
	p := pool{members: make([]member, 0, len(eps)), turn: old.turn}
	for _, ep := range eps {
		e := s.endpoints[ep.Addr]
		if e == nil {
			e = &endpoint{addr: ep.Addr}
			s.endpoints[ep.Addr] = e
		}
		p.members = append(p.members, member{endpoint: e, weight: int64(ep.Weight), current: current[e]})
	}
	slices.SortFunc(p.members, func(a, b member) int { return a.addr.Compare(b.addr) })
	if old.members == nil && len(p.members) > 0 {
		p.turn = rand.IntN(len(p.members)) // not every Service of every node begins with the first
	}
	return p
}

// pick chooses an endpoint for a client and counts the flow as one of its active
// ones; release or failed ends that. tried are the endpoints that have failed for
// this flow, the last one last. It returns nil if no endpoint takes new flows.
func (s *Service) pick(client netip.AddrPort, from plan.Pool, tried []*endpoint) *endpoint {
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.pools[from]
	if s.affinity.timeout > 0 && len(tried) == 0 {
		if e := s.endpoints[s.affinity.lookup(client.Addr(), now)]; e != nil && p.takes(e) && !e.passedOver(now) {
			e.active.Add(1)
			return e
		}
	}
	e := p.choose(s.policy.Load(), client, now, tried)
	if e == nil {
		return nil
	}
	e.active.Add(1)
	if s.affinity.timeout > 0 {
		// Already now, so that a client's simultaneous connects go to one endpoint.
		s.affinity.record(client.Addr(), e.addr, now, s.maxAffinity)
	}
	return e
}

// takes reports whether e is a member that takes new flows.
func (p *pool) takes(e *endpoint) bool {
	return slices.ContainsFunc(p.members, func(m member) bool { return m.endpoint == e && m.weight > 0 })
}

func (e *endpoint) passedOver(now time.Time) bool { return now.Before(e.passOver) }

// choose returns the scheduler's choice among the members that may be tried: those
// that were not, and are not ejected; else those that were not; else those that were
// not tried last; else all.
func (p *pool) choose(policy *plan.Policy, client netip.AddrPort, now time.Time, tried []*endpoint) *endpoint {
	how, _ := ParseScheduler(policy.Scheduler)
	if how == SourceHash && !policy.Fallback && len(tried) == 0 {
		return p.hashed(client, policy.SourcePort)
	}
	last := func(m *member) bool { return len(tried) > 0 && tried[len(tried)-1] == m.endpoint }
	for _, may := range [...]func(*member) bool{
		func(m *member) bool { return !slices.Contains(tried, m.endpoint) && !m.passedOver(now) },
		func(m *member) bool { return !slices.Contains(tried, m.endpoint) },
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
func (p *pool) schedule(how Scheduler, client netip.AddrPort, withPort bool, may func(*member) bool) *endpoint {
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
		return p.least(may, func(m *member) float64 { return rendezvous(key, m.addr, m.weight) })
	case Failover:
		return p.least(may, func(m *member) float64 { return -float64(m.weight) })
	}
	return p.weightedInTurn(may)
}

func (p *pool) inTurn(may func(*member) bool) *endpoint {
	for i := range p.members {
		at := (p.turn + i) % len(p.members)
		if m := &p.members[at]; may(m) {
			p.turn = at + 1
			return m.endpoint
		}
	}
	return nil
}

// weightedInTurn is smooth weighted round robin: every member gains its weight, and
// the one that has most pays for all. It begins anywhere when nobody has anything.
func (p *pool) weightedInTurn(may func(*member) bool) *endpoint {
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
	return best.endpoint
}

func (p *pool) random(may func(*member) bool) *endpoint {
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
			return m.endpoint
		}
		at -= m.weight
	}
	return nil
}

// least returns the member with the smallest cost; among equals, they take turns.
func (p *pool) least(may func(*member) bool, cost func(*member) float64) *endpoint {
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
	return p.members[best].endpoint
}

// hashed returns the endpoint that the client hashes to, nil if that one takes no
// new flows: without Fallback, its clients are refused as ip_vs does.
func (p *pool) hashed(client netip.AddrPort, withPort bool) *endpoint {
	key := hashClient(client, withPort)
	var chosen *member
	lowest := math.Inf(1)
	for i := range p.members {
		m := &p.members[i]
		if c := rendezvous(key, m.addr, max(m.weight, 1)); chosen == nil || c < lowest {
			chosen, lowest = m, c
		}
	}
	if chosen == nil || chosen.weight == 0 {
		return nil
	}
	return chosen.endpoint
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

// connected says that e answered: the client sticks to it from now on.
func (s *Service) connected(client netip.Addr, e *endpoint) {
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	e.failures, e.ejected = 0, 0
	if s.affinity.timeout > 0 {
		s.affinity.record(client, e.addr, now, s.maxAffinity)
	}
}

// failed says that e could not be connected to, and ends the flow there.
func (s *Service) failed(e *endpoint) {
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	e.active.Add(-1)
	e.failures++
	if s.ejection.Failures == 0 || e.failures < s.ejection.Failures || e.passedOver(now) || !s.canSpare(now) {
		return
	}
	e.failures = 0
	e.ejected = min(e.ejected+1, 10)
	e.passOver = now.Add(s.ejection.For * time.Duration(e.ejected))
}

// canSpare reports whether one more of the endpoints may be ejected. s.mu is held.
func (s *Service) canSpare(now time.Time) bool {
	all, out := 0, 1
	for _, e := range s.endpoints {
		if e.removed {
			continue
		}
		all++
		if e.passedOver(now) {
			out++
		}
	}
	return 2*out <= all
}

// release ends a flow to e.
func (s *Service) release(e *endpoint) { e.active.Add(-1) }
