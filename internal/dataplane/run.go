package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Planner turns the newest facts into plans. Only the loop's goroutine calls it,
// Changed apart.
type Planner interface {
	// Changed has a value whenever Update may have something new.
	Changed() <-chan struct{}
	// Ready reports whether the facts are complete enough for a first plan, and
	// if not, what is awaited.
	Ready() (ok bool, missing []string)
	// First is the part of the plan that the node itself needs.
	First() plan.Update
	// Update is the plan and what changed since the last call.
	Update() plan.Update
	// Hold keeps sp (nil: nothing) in the plan under id, whatever the facts say,
	// until they change or Release.
	Hold(id plan.ID, sp *plan.ServicePort)
	Release(id plan.ID)
}

// Health learns how far the kernel follows the facts. The calls must not block.
type Health interface {
	// Queued: a change waits for the kernel since at. An older one stays.
	Queued(at time.Time)
	// Updated: everything known at the time is in the kernel.
	Updated(at time.Time)
	// SetPorts replaces the health-check ports of all Services. The map stays the
	// caller's.
	SetPorts(ports map[plan.HealthID]plan.HealthPort, node *plan.Node)
}

// FlowTable is the kernel's connection tracking table.
type FlowTable interface {
	// DeleteUDP removes those UDP flows with an original destination among to
	// (all of one family) for which stale is true; from is where replies come
	// from, which is the endpoint of a translated flow. It returns how many it
	// deleted, also with an error.
	DeleteUDP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort) bool) (int, error)
	// DeleteTCP does the same to TCP flows; answered: the endpoint sent something.
	// Clients of those that were answered are to see a reset with their next packet,
	// which instead, an endpoint for flows to to, sends if need be; invalid: none.
	DeleteTCP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort, answered bool) bool, instead func(to netip.AddrPort) netip.AddrPort) (int, error)
}

// Settings may change while the loop runs.
type Settings struct {
	// MinInterval is the least time from the end of one Apply to the start of the
	// next. A change that takes an endpoint, a frontend or a Service away does not
	// wait for it.
	MinInterval time.Duration
	// SyncPeriod is the longest pause between two attempts after a failure; 0: 30 s.
	SyncPeriod time.Duration
	// FullInterval is the time after which the kernel's state is read back and
	// compared although nothing happened; 0: one hour.
	FullInterval time.Duration
}

// Config is what a Loop works with. Planner, Backend and Families are required.
type Config struct {
	Mode     string // the mode's name
	Planner  Planner
	Backend  Backend
	Families []plan.Family

	Log    *slog.Logger
	Stats  Stats
	Health Health               // nil: nobody is told
	Flows  FlowTable            // nil: all flows are left alone
	Follow []Follower           // are told of each update that was applied, in order
	Notes  func([]plan.Note)    // receives the planner's and the loop's remarks; must not block
	Age    func() time.Duration // since the facts were last confirmed
	First  func()               // called once, after the first full Apply that succeeded
	Jitter func() float64       // in [0,1); nil: random
	// Whole: another mode is in force. Nothing is written before the whole plan can be,
	// because what a part of it lacks would be refused or dropped that still works.
	Whole bool

	Settings Settings
}

// Loop is the one way from plan to kernel. Its exported methods are safe for
// concurrent use.
type Loop struct {
	cfg   Config // immutable after New
	wake  chan struct{}
	calls chan func()
	ended chan struct{} // closed when Run returns
	flows *flowCleaner  // nil without a FlowTable

	mu        sync.Mutex // guards all below
	settings  Settings
	status    Status
	suspected []string // reasons to read the kernel's state back
}

// New returns a Loop that has touched nothing.
func New(cfg Config) *Loop {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Stats == nil {
		cfg.Stats = noStats{}
	}
	if cfg.Health == nil {
		cfg.Health = noHealth{}
	}
	if cfg.Notes == nil {
		cfg.Notes = func([]plan.Note) {}
	}
	if cfg.Age == nil {
		cfg.Age = func() time.Duration { return 0 }
	}
	if cfg.First == nil {
		cfg.First = func() {}
	}
	l := &Loop{
		cfg: cfg, wake: make(chan struct{}, 1), calls: make(chan func()), ended: make(chan struct{}),
		settings: cfg.Settings.withDefaults(),
	}
	if cfg.Flows != nil {
		l.flows = newFlowCleaner(cfg.Flows, cfg.Stats, cfg.Log)
	}
	return l
}

// Run carries out plans until ctx ends and returns nil then; the kernel keeps
// forwarding. It fails only if the Config is incomplete. Call it once.
func (l *Loop) Run(ctx context.Context) error {
	if l.cfg.Planner == nil || l.cfg.Backend == nil || len(l.cfg.Families) == 0 {
		return errors.New("dataplane: Config needs a Planner, a Backend and at least one family")
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer close(l.ended)
	defer wg.Wait()
	defer cancel()
	if w, ok := l.cfg.Backend.(Watcher); ok {
		wg.Go(func() { l.watch(ctx, w) })
	}
	if l.flows != nil {
		wg.Go(func() { l.flows.run(ctx) })
	}
	newCycle(l).run(ctx)
	return nil
}

// Do runs f on the loop's goroutine, between two Applies, and plans again: the
// way to change a planner's options or to look at its plan. It waits for f.
func (l *Loop) Do(ctx context.Context, f func()) error {
	done := make(chan struct{})
	select {
	case l.calls <- func() { defer close(done); f() }:
	case <-l.ended:
		return errors.New("the loop has ended")
	case <-ctx.Done():
		return fmt.Errorf("wait for the loop: %w", ctx.Err())
	}
	<-done
	return nil
}

// SetSettings takes effect at once.
func (l *Loop) SetSettings(s Settings) {
	l.mu.Lock()
	l.settings = s.withDefaults()
	l.mu.Unlock()
	l.poke()
}

// Disturbed says that somebody else changed the kernel's state; what is put into
// messages. The state is read back and repaired at once, later if it keeps
// happening.
func (l *Loop) Disturbed(what string) {
	l.mu.Lock()
	l.status.Interference++
	l.status.LastInterference = what
	l.mu.Unlock()
	l.cfg.Stats.Add("svcproxy_interference_total", 1)
	l.suspect(what)
}

// suspect asks for a read-back of the kernel's state.
func (l *Loop) suspect(why string) {
	l.mu.Lock()
	if len(l.suspected) < maxSuspected {
		l.suspected = append(l.suspected, why)
	}
	l.mu.Unlock()
	l.poke()
}

// maxSuspected bounds what is remembered between two looks of the loop.
const maxSuspected = 16

func (l *Loop) poke() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// watch keeps the Backend's watch running.
func (l *Loop) watch(ctx context.Context, w Watcher) {
	for n := 0; ; n++ {
		start := time.Now()
		err := guard("watch the kernel for outside changes", func() error { return w.Watch(ctx, l.Disturbed) })
		if ctx.Err() != nil {
			return
		}
		if time.Since(start) > time.Minute {
			n = 0
		}
		pause := backoff(n, time.Second, time.Minute, l.cfg.Jitter)
		l.cfg.Log.Warn("outside changes of the kernel's state go unnoticed for now", "error", err, "retry", pause)
		if n == 0 { // what happened from here on is seen by nobody
			l.suspect("the watch for outside changes was interrupted")
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}
