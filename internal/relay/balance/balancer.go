// Package balance chooses the endpoint of a flow: schedulers with weights, affinity of
// clients, and the passing over of endpoints that keep failing. It holds counts and
// times only; sockets and bytes are the caller's.
package balance

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Options are a Balancer's settings.
type Options struct {
	Now         func() time.Time // the clock of affinity, ejection and removals
	Ejection    Ejection
	MaxAffinity int // clients remembered; beyond it the one away the longest is forgotten
}

// Ejection says when an endpoint is passed over for new flows. Endpoints are never
// ejected when that would leave less than half of them; if none else is left for a
// flow, an ejected one is tried after all.
type Ejection struct {
	Failures int           // connects that failed in a row; 0: endpoints are never ejected
	For      time.Duration // the first time; one more of it each further time, up to ten
}

// Balancer balances the flows to one port of one Service in one family. Safe for
// concurrent use.
type Balancer struct {
	opts   Options
	policy atomic.Pointer[plan.Policy] // of the last Update

	mu        sync.Mutex // guards the rest
	protocol  plan.Protocol
	pools     [2]pool
	endpoints map[netip.AddrPort]*Endpoint // those of the pools, and those that flows are left of
	affinity  affinity
}

// Endpoint is the state of one endpoint, kept for as long as a pool or a flow has it.
type Endpoint struct {
	Addr   netip.AddrPort // immutable
	active atomic.Int64   // flows, those being made included
	// endAt is when flows end because the endpoint was removed, in Unix nanoseconds;
	// 0: they go on.
	endAt atomic.Int64

	// Guarded by Balancer.mu.
	removed  bool
	failures int // connects that failed in a row
	ejected  int // times in a row
	passOver time.Time
}

// Ends reports whether flows to the endpoint have to end by now, as it was removed.
func (e *Endpoint) Ends(now time.Time) bool {
	at := e.endAt.Load()
	return at != 0 && now.UnixNano() >= at
}

// Gone reports whether UDP flows to the endpoint have to move.
func (e *Endpoint) Gone() bool { return e.endAt.Load() != 0 }

// Active returns the number of flows that the endpoint has.
func (e *Endpoint) Active() int64 { return e.active.Load() }

func (e *Endpoint) passedOver(now time.Time) bool { return now.Before(e.passOver) }

// New returns a Balancer without endpoints.
func New(o Options) *Balancer {
	b := &Balancer{opts: o, endpoints: make(map[netip.AddrPort]*Endpoint)}
	b.policy.Store(&plan.Policy{})
	return b
}

// Policy returns what the last Update brought.
func (b *Balancer) Policy() *plan.Policy { return b.policy.Load() }

// Update makes the Balancer what sp says, of which its protocol, pools, Serving,
// Draining, Affinity and Policy count. Affinity and counts of flows are kept.
//
// UDP flows to endpoints that neither a pool nor Serving has end at once. TCP
// connections to endpoints that are gone go on, unless the policy has a DrainTimeout
// or, for those that were never in Draining, a VanishedTimeout. It returns the time
// after which Ends becomes true for connections, the longest of several; 0: none.
func (b *Balancer) Update(sp *plan.ServicePort) time.Duration {
	policy := sp.Chosen()
	b.policy.Store(&policy)
	now := b.opts.Now()

	b.mu.Lock()
	defer b.mu.Unlock()
	if sp.ID.Protocol != 0 {
		b.protocol = sp.ID.Protocol
	}
	for i := range b.pools {
		b.pools[i] = b.newPool(sp.Pools[i], b.pools[i])
	}
	var longest time.Duration
	for addr, e := range b.endpoints {
		switch {
		case b.pools[plan.Cluster].has(addr) || b.pools[plan.Local].has(addr):
			e.removed = false
			e.endAt.Store(0)
		case e.active.Load() == 0:
			delete(b.endpoints, addr)
		default:
			longest = max(longest, b.remove(e, sp, policy, now))
		}
	}
	b.affinity.timeout = sp.Affinity
	b.affinity.expire(now)
	return longest
}

// remove decides how long flows to an endpoint that no pool has may go on, and returns
// the time for connections, if one begins now.
func (b *Balancer) remove(e *Endpoint, sp *plan.ServicePort, policy plan.Policy, now time.Time) time.Duration {
	first := !e.removed
	e.removed = true
	if slices.Contains(sp.Serving, e.Addr) { // it is there, only not ready
		e.removed = b.protocol == plan.UDP
		e.endAt.Store(0)
		return 0
	}
	if b.protocol == plan.UDP {
		e.endAt.CompareAndSwap(0, now.UnixNano())
		return 0
	}
	after := policy.FlowsEndAfter(slices.Contains(sp.Draining, e.Addr))
	if !first || after == 0 {
		return 0
	}
	e.endAt.Store(now.Add(after).UnixNano())
	return after
}

// HasOther reports whether another endpoint than e takes new flows.
func (b *Balancer) HasOther(from plan.Pool, e *Endpoint) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.pools[from].members, func(m member) bool { return m.Endpoint != e && m.weight > 0 })
}

// Pick chooses an endpoint for a client and counts the flow as one of its active
// ones; Release or Failed ends that. tried are the endpoints that have failed for
// this flow, the last one last. It returns nil if no endpoint takes new flows.
func (b *Balancer) Pick(client netip.AddrPort, from plan.Pool, tried []*Endpoint) *Endpoint {
	now := b.opts.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	p := &b.pools[from]
	if b.affinity.timeout > 0 && len(tried) == 0 {
		if e := b.endpoints[b.affinity.lookup(client.Addr(), now)]; e != nil && p.takes(e) && !e.passedOver(now) {
			e.active.Add(1)
			return e
		}
	}
	e := p.choose(b.policy.Load(), client, now, tried)
	if e == nil {
		return nil
	}
	e.active.Add(1)
	if b.affinity.timeout > 0 {
		// Already now, so that a client's simultaneous connects go to one endpoint.
		b.affinity.record(client.Addr(), e.Addr, now, b.opts.MaxAffinity)
	}
	return e
}

// Resume counts a flow that was made elsewhere as one of the active ones of its
// endpoint; Release ends that. It returns nil if flows there have to move, or nobody
// knows the endpoint.
func (b *Balancer) Resume(endpoint netip.AddrPort) *Endpoint {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.endpoints[endpoint]
	if e == nil || e.Gone() {
		return nil
	}
	e.active.Add(1)
	return e
}

// newPool returns the pool of eps that takes the place of old. b.mu is held.
func (b *Balancer) newPool(eps []plan.Endpoint, old pool) pool {
	current := make(map[*Endpoint]int64, len(old.members))
	for _, m := range old.members {
		current[m.Endpoint] = m.current
	}
	p := pool{members: make([]member, 0, len(eps)), turn: old.turn}
	for _, ep := range eps {
		e := b.endpoints[ep.Addr]
		if e == nil {
			e = &Endpoint{Addr: ep.Addr}
			b.endpoints[ep.Addr] = e
		}
		p.members = append(p.members, member{Endpoint: e, weight: int64(ep.Weight), current: current[e]})
	}
	slices.SortFunc(p.members, func(a, b member) int { return a.Addr.Compare(b.Addr) })
	if old.members == nil && len(p.members) > 0 {
		p.turn = rand.IntN(len(p.members)) // not every Service of every node begins with the first
	}
	return p
}

// Connected says that e answered: the client sticks to it from now on.
func (b *Balancer) Connected(client netip.Addr, e *Endpoint) {
	now := b.opts.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	e.failures, e.ejected = 0, 0
	if b.affinity.timeout > 0 {
		b.affinity.record(client, e.Addr, now, b.opts.MaxAffinity)
	}
}

// Failed says that e could not be connected to, and ends the flow there.
func (b *Balancer) Failed(e *Endpoint) {
	now := b.opts.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	e.active.Add(-1)
	e.failures++
	if b.opts.Ejection.Failures == 0 || e.failures < b.opts.Ejection.Failures || e.passedOver(now) || !b.canSpare(now) {
		return
	}
	e.failures = 0
	e.ejected = min(e.ejected+1, 10)
	e.passOver = now.Add(b.opts.Ejection.For * time.Duration(e.ejected))
}

// canSpare reports whether one more of the endpoints may be ejected. b.mu is held.
func (b *Balancer) canSpare(now time.Time) bool {
	all, out := 0, 1
	for _, e := range b.endpoints {
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

// Release ends a flow to e.
func (b *Balancer) Release(e *Endpoint) { e.active.Add(-1) }
