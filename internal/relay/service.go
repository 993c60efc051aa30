package relay

import (
	"sync/atomic"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/balance"
)

// Service is what flows are balanced over: one port of one Service in one family.
// Several listeners may lead to it; its affinity, its counts of connections and its
// figures are shared by them. Safe for concurrent use.
type Service struct {
	name     string
	relay    *Relay
	balancer *balance.Balancer
	meter    meter
	// descriptors are those of its connections and flows, pipes apart.
	descriptors atomic.Int64
}

// NewService returns a Service without endpoints. name is for its figures and for
// logs.
func (r *Relay) NewService(name string) *Service {
	return &Service{
		name:     name,
		relay:    r,
		balancer: balance.New(balance.Options{Now: r.opts.Now, Ejection: r.opts.Ejection, MaxAffinity: r.opts.MaxAffinity}),
	}
}

// Name returns what NewService was told.
func (s *Service) Name() string { return s.name }

// Update makes the Service what sp says, of which its protocol, pools, Serving,
// Draining, Affinity and Policy count. Affinity and counts of connections are kept.
// The zero ServicePort takes all endpoints from it, as before it is dropped.
//
// UDP flows to endpoints that neither a pool nor Serving has move with their next
// datagram. TCP connections to endpoints that are gone go on, unless the policy has
// a DrainTimeout (for those in Draining) or a VanishedTimeout (for the others).
func (s *Service) Update(sp *plan.ServicePort) {
	if d := s.balancer.Update(sp); d > 0 {
		s.relay.endGoneAfter(d)
	}
}
