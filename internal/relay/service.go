package relay

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Service is what flows are balanced over: one port of one Service in one family.
// Several listeners may lead to it; its affinity, its counts of connections and its
// figures are shared by them. Safe for concurrent use.
type Service struct {
	name        string
	relay       *Relay
	now         func() time.Time
	ejection    Ejection
	maxAffinity int

	policy atomic.Pointer[plan.Policy] // of the last Update
	meter  meter

	mu        sync.Mutex // guards the rest, which new flows and updates need; not moving bytes
	protocol  plan.Protocol
	pools     [2]pool
	endpoints map[netip.AddrPort]*endpoint // those of the pools, and those that flows are left of
	affinity  affinity
}

// endpoint is the state of one endpoint, kept for as long as a pool or a flow has it.
type endpoint struct {
	addr netip.AddrPort
	// active counts connections, those being made included, and UDP flows.
	active atomic.Int64
	// endAt is when flows end because the endpoint was removed, in Unix nanoseconds;
	// 0: they go on.
	endAt atomic.Int64

	// Guarded by Service.mu.
	removed  bool
	failures int // connects that failed in a row
	ejected  int // times in a row
	passOver time.Time
}

// ends reports whether flows to the endpoint have to end by now.
func (e *endpoint) ends(now time.Time) bool {
	at := e.endAt.Load()
	return at != 0 && now.UnixNano() >= at
}

// NewService returns a Service without endpoints. name is for its figures and for
// logs.
func (r *Relay) NewService(name string) *Service {
	s := &Service{
		name:        name,
		relay:       r,
		now:         r.opts.Now,
		ejection:    r.opts.Ejection,
		maxAffinity: r.opts.MaxAffinity,
		endpoints:   make(map[netip.AddrPort]*endpoint),
	}
	s.policy.Store(&plan.Policy{})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.services[s] = struct{}{}
	return s
}

// RemoveService takes all endpoints from s: UDP flows end, TCP connections go on.
// Its figures are gone when its last connection has ended.
func (r *Relay) RemoveService(s *Service) {
	s.Update(&plan.ServicePort{})
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.services, s)
}

// Name returns what NewService was told.
func (s *Service) Name() string { return s.name }

// Update makes the Service what sp says, of which its protocol, pools, Serving,
// Draining, Affinity and Policy count. Affinity and counts of connections are kept.
//
// UDP flows to endpoints that neither a pool nor Serving has move with their next
// datagram. TCP connections to endpoints that are gone go on, unless the policy has
// a DrainTimeout (for those in Draining) or a VanishedTimeout (for the others).
func (s *Service) Update(sp *plan.ServicePort) {
	policy := sp.Chosen()
	s.policy.Store(&policy)
	now := s.now()

	s.mu.Lock()
	defer s.mu.Unlock()
	if sp.ID.Protocol != 0 {
		s.protocol = sp.ID.Protocol
	}
	for i := range s.pools {
		s.pools[i] = s.newPool(sp.Pools[i], s.pools[i])
	}
	var last time.Time
	for addr, e := range s.endpoints {
		switch {
		case s.pools[plan.Cluster].has(addr) || s.pools[plan.Local].has(addr):
			e.removed = false
			e.endAt.Store(0)
		case e.active.Load() == 0:
			delete(s.endpoints, addr)
		default:
			if at := e.remove(s.protocol, sp, policy, now); at.After(last) {
				last = at
			}
		}
	}
	s.affinity.timeout = sp.Affinity
	s.affinity.expire(now)
	if last.After(now) {
		s.relay.endGoneAfter(last.Sub(now))
	}
}

// hasOther reports whether another endpoint than e takes new flows.
func (s *Service) hasOther(from plan.Pool, e *endpoint) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.pools[from].members, func(m member) bool { return m.endpoint != e && m.weight > 0 })
}

// remove decides how long flows to the endpoint, which no pool has, may go on, and
// returns when connections are to be ended for it, if a time for that begins now. A
// time that runs already is kept.
func (e *endpoint) remove(protocol plan.Protocol, sp *plan.ServicePort, policy plan.Policy, now time.Time) time.Time {
	first := !e.removed
	e.removed = true
	var after time.Duration
	switch {
	case protocol == plan.UDP:
		if !slices.Contains(sp.Serving, e.addr) {
			e.endAt.CompareAndSwap(0, now.UnixNano())
		}
		return time.Time{}
	case slices.Contains(sp.Draining, e.addr):
		after = policy.DrainTimeout
	default:
		after = policy.VanishedTimeout
	}
	if !first || after == 0 {
		return time.Time{}
	}
	at := now.Add(after)
	e.endAt.Store(at.UnixNano())
	return at
}
