package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/balance"
	"github.com/svcproxy/svcproxy/internal/relay/handover"
	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// Options are a Relay's settings. The zero value of each is its default.
type Options struct {
	Log *slog.Logger     // nil: nothing is logged
	Now func() time.Time // the clock of affinity, ejection and removals; nil: time.Now

	// Loops is the number of event loops; 0: one for each processor that the process may
	// use (GOMAXPROCS) but one. As long as one is free, the runtime does not take those of
	// the loops away while they wait; a program that mainly relays has one more.
	Loops int
	// ConnectTimeouts bounds each try to connect to an endpoint, and the number of
	// tries. nil: 250 ms, 500 ms, 1 s and 2 s.
	ConnectTimeouts []time.Duration
	// Ejection passes over endpoints whose connects keep failing; zero: never.
	Ejection Ejection
	// UDPTimeout is the time without a packet after which a UDP flow ends; 0: 250 ms.
	UDPTimeout time.Duration
	// KeepAlive is the time without a byte after which TCP asks whether the peer is
	// still there, on both sides; 0: 15 s. Negative: never.
	KeepAlive time.Duration
	// Descriptors is the number of file descriptors that connections, flows and pipes
	// may use together; 0: the process's limit, less the listening sockets and a reserve
	// for everything else.
	Descriptors int
	// Quarters of the process's limit are this relay's, where another one has the rest;
	// 0: all four. Without effect beside Descriptors.
	Quarters int
	// MaxFlows bounds the UDP flows of all listeners; beyond it the flow that has been
	// idle the longest gives way. 0: 65,536, or as many as Descriptors allows.
	MaxFlows int
	// IdleAfter is the time without a byte from which a TCP connection may be closed in
	// favour of a new one when there are no descriptors left; the Service with the most
	// connections gives first. 0: 10 s. Negative: the new connection is refused.
	IdleAfter time.Duration
	// MaxAffinity bounds the clients remembered for each Service with affinity; beyond
	// it the one that has been away the longest is forgotten. 0: 65,536.
	MaxAffinity int
	// Mark is put on the packets to endpoints, so that the caller's rules do not lead them
	// back here, and can bring the answers to sockets that use a client's address; 0: none.
	Mark uint32
	// Inherited are the listening sockets of a predecessor, which Listen goes on with once
	// Succeed was called.
	Inherited *handover.Inheritance
}

// Ejection says when an endpoint is passed over.
type Ejection = balance.Ejection

// Flow is a new TCP connection, or the first datagram of a UDP flow.
type Flow struct {
	Protocol plan.Protocol
	Client   netip.AddrPort
	Local    netip.AddrPort // where the client's packets arrived
}

// A Router says what happens to a flow that arrived at a listener: the Service that
// it is for, and the plan's route for it. With plan.Reject, or without a Service,
// the flow is refused (a reset, or ICMP port unreachable); with plan.Drop, or when
// Forward finds no endpoint, likewise, as an accepted connection cannot be dropped
// any more; datagrams are dropped silently.
//
// Where the route has no SNAT, or the Service's policy is to keep the client's
// address, the endpoint sees the client's address (with a port of the relay's
// choice), except for clients on loopback and endpoints that would meet themselves.
//
// It is called on the event loops, several at a time: it must be quick and not block.
type Router func(Flow) (*Service, plan.Route)

// Relay is a set of listeners and the event loops that serve them. Safe for
// concurrent use.
type Relay struct {
	opts   Options
	stream []socket.Option // of sockets to endpoints

	// Set by Start.
	limit *budget
	ended sync.WaitGroup

	open     atomic.Int64 // connections and flows
	flows    atomic.Int64
	draining atomic.Bool
	drained  chan struct{} // a token when open gets to 0 while draining

	mu        sync.Mutex // guards the rest
	loops     []*loop    // replaced by Start only
	next      int        // loop that gets the next UDP listener
	listeners map[*Listener]struct{}
	held      []*Listener // inherited, until Succeed
	stopped   bool
}

// New returns a Relay that is not started; it touches nothing.
func New(o Options) *Relay {
	o = o.withDefaults()
	return &Relay{
		opts:      o,
		stream:    socket.StreamOptions(),
		drained:   make(chan struct{}, 1),
		listeners: make(map[*Listener]struct{}),
	}
}

// Start starts the event loops. It is called once, before Listen.
func (r *Relay) Start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.loops != nil {
		return errors.New("starting the relay: it runs already")
	}
	limit, err := newBudget(r.opts.Descriptors, r.opts.Quarters)
	if err != nil {
		return fmt.Errorf("starting the relay: asking for the limit of descriptors: %w", err)
	}
	r.limit = limit
	var loops []*loop
	for range r.opts.Loops {
		l, err := newLoop(r)
		if err != nil {
			for _, l := range loops {
				l.close()
			}
			return fmt.Errorf("starting the relay: %w", err)
		}
		loops = append(loops, l)
	}
	r.loops = loops
	for _, l := range loops {
		r.ended.Go(func() {
			if err := l.run(); err != nil {
				r.opts.Log.Error("an event loop of the relay has ended", "err", err)
			}
		})
	}
	return nil
}

// leastLoaded returns the loop that a connection accepted by l goes to: l, unless it
// has clearly more than another.
func (r *Relay) leastLoaded(l *loop) *loop {
	n := l.conns.n.Load()
	for _, other := range r.loops {
		if other.conns.n.Load()*5/4+64 < n {
			return other
		}
	}
	return l
}

// oneLess says that a connection or flow has ended.
func (r *Relay) oneLess() {
	if r.open.Add(-1) == 0 && r.draining.Load() {
		select {
		case r.drained <- struct{}{}:
		default:
		}
	}
}

// endGoneAfter has every loop look for connections to end in d.
func (r *Relay) endGoneAfter(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.loops {
		l.post(func() { l.timers.start(time.Now().Add(d), l.endGone) })
	}
}

// ListenConfig describes one listening socket.
type ListenConfig struct {
	// Key names the socket for a successor process, which gets it if it listens with
	// the same key, protocol and address. "" is never handed over.
	Key      string
	Protocol plan.Protocol  // TCP or UDP
	Addr     netip.AddrPort // port 0: the kernel's choice. IPv6 sockets take IPv6 only.
	Router   Router
	// FreeBind allows an address that the node does not have (yet).
	FreeBind bool
	// Transparent allows an address that is only routed to the node (IP_TRANSPARENT).
	Transparent bool
}

// Shutdown stops accepting, ends UDP flows, and waits until all connections have ended,
// or ctx; what is open then is reset, and ctx's error returned. Listening sockets that a
// successor took stay open in it. The Relay cannot be started again.
func (r *Relay) Shutdown(ctx context.Context) error {
	r.mu.Lock()
	if r.stopped {
		r.mu.Unlock()
		return nil
	}
	r.stopped = true
	listeners := slices.Collect(maps.Keys(r.listeners))
	clear(r.listeners)
	r.mu.Unlock()
	for _, ln := range listeners {
		ln.stop(func(*served) {})
	}
	r.draining.Store(true)
	for _, l := range r.loops { // what clients send next is for a successor
		l.post(func() {
			if l.flows != nil {
				l.flows.endAll(ShutDown)
			}
		})
	}
	var err error
	if r.open.Load() > 0 {
		select {
		case <-r.drained:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	for _, l := range r.loops {
		l.post(func() {
			l.conns.endAll(ShutDown)
			if l.flows != nil {
				l.flows.endAll(ShutDown)
			}
			l.done = true
		})
	}
	r.ended.Wait()
	return err
}
