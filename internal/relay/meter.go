package relay

import (
	"sync/atomic"
	"time"
)

// Reason says why a flow was refused or ended before its time.
type Reason uint8

const (
	NoEndpoint     Reason = iota // no endpoint takes new flows, or the route rejects
	ConnectRefused               // the last endpoint tried refused
	ConnectTimeout               // the last endpoint tried did not answer in time
	ConnectFailed                // the last endpoint tried could not be reached
	NoDescriptors                // a new flow: the limit of descriptors was reached
	GaveWay                      // an idle one: the limit was reached and another needed its descriptors
	EndpointGone                 // its endpoint was removed and its time had run out
	ShutDown                     // the relay ended before the flow
	reasons
)

// Reasons lists all.
var Reasons = [reasons]Reason{NoEndpoint, ConnectRefused, ConnectTimeout, ConnectFailed, NoDescriptors, GaveWay, EndpointGone, ShutDown}

// String is the value of the metric's label.
func (r Reason) String() string {
	return [...]string{
		"no-endpoint", "connect-refused", "connect-timeout", "connect-failed", "no-descriptors", "gave-way", "endpoint-gone", "shut-down",
	}[r]
}

// LatencyBounds are the upper bounds of the buckets of Figures.Latency; what takes
// longer is counted in one more.
var LatencyBounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond,
	2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2500 * time.Millisecond,
}

// Figures are what a Service has done since it is there. Their number does not
// depend on clients or endpoints.
type Figures struct {
	Open       int64  // TCP connections and UDP flows with an endpoint, now
	Total      uint64 // of those, ever
	FromClient uint64 // bytes that endpoints were sent
	ToClient   uint64 // bytes that clients were sent
	Retries    uint64 // connects that were tried again at another endpoint
	Failures   [reasons]uint64
	// Latency counts successful TCP connects by the time from accepting the client to
	// having the endpoint, retries included.
	Latency        [len(LatencyBounds) + 1]uint64
	LatencySeconds float64 // sum
}

// meter holds Figures while they change.
type meter struct {
	open                 atomic.Int64
	total                atomic.Uint64
	fromClient, toClient atomic.Uint64
	retries              atomic.Uint64
	failures             [reasons]atomic.Uint64
	latency              [len(LatencyBounds) + 1]atomic.Uint64
	latencyNanos         atomic.Int64
}

func (m *meter) opened() {
	m.open.Add(1)
	m.total.Add(1)
}

func (m *meter) connected(took time.Duration) {
	m.opened()
	i := 0
	for i < len(LatencyBounds) && took > LatencyBounds[i] {
		i++
	}
	m.latency[i].Add(1)
	m.latencyNanos.Add(int64(took))
}

func (m *meter) failed(r Reason) { m.failures[r].Add(1) }

// Figures returns what the Service has done. Its parts are read one after the other.
func (s *Service) Figures() Figures {
	m := &s.meter
	f := Figures{
		Open:           m.open.Load(),
		Total:          m.total.Load(),
		FromClient:     m.fromClient.Load(),
		ToClient:       m.toClient.Load(),
		Retries:        m.retries.Load(),
		LatencySeconds: time.Duration(m.latencyNanos.Load()).Seconds(),
	}
	for i := range f.Failures {
		f.Failures[i] = m.failures[i].Load()
	}
	for i := range f.Latency {
		f.Latency[i] = m.latency[i].Load()
	}
	return f
}
