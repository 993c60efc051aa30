// Package probe checks the health of the endpoints whose Services ask for it, from
// this node, by TCP connections or HTTP requests. It follows what a mode was made to
// do, and reports endpoints that fail and those that pass again; what that means for
// traffic is the planner's to decide.
//
// What several Service ports have in common, the place to probe and the way, is
// probed once. An endpoint counts as healthy until it failed often enough; for those
// that are there when the process starts, and may have been failing before, the first
// probe comes soon and is enough. There is a limit of probes per second for all
// together: above it every probe is late, the oldest due first. At rest an endpoint
// costs a few hundred bytes and no goroutine.
package probe

import (
	"container/heap"
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"
	"unique"

	"golang.org/x/time/rate"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// mostAtOnce bounds the probes under way, so that long timeouts cannot take all
// file descriptors.
const mostAtOnce = 256

// Config is what a Prober works with. Report is required.
type Config struct {
	// Report says that an endpoint of a Service fails its health check, or passes
	// it again, which each is until it was reported failing. It is called one call
	// at a time and must neither block nor call the Prober.
	Report func(service plan.Name, endpoint netip.AddrPort, failing bool)
	// PerSecond is how many probes may begin in a second; at least 1.
	PerSecond int

	Dial   func(ctx context.Context, network, address string) (net.Conn, error) // nil: a net.Dialer
	Spread func() float64                                                       // in [0,1); nil: random
	Log    *slog.Logger
	Stats  dataplane.Stats
	Notes  func([]plan.Note) // receives remarks on endpoints that flip; must not block
}

// Prober probes endpoints. Its methods are safe for concurrent use.
type Prober struct {
	cfg     Config // immutable after New
	limit   *rate.Limiter
	slots   chan struct{}
	wake    chan struct{}
	checker checker
	told    remarks

	mu       sync.Mutex // guards all below
	targets  map[key]*target
	due      queue // targets that no probe is under way for
	users    map[user]*target
	reported map[user]struct{} // as failing
	started  bool              // a whole plan was seen
	failing  int               // targets
	late     time.Duration     // of the last probe that began
}

// key is a place to probe and the way.
type key struct {
	at    netip.AddrPort
	check unique.Handle[plan.HealthCheck] // few differ; without the Port, which is in at
}

func keyOf(endpoint netip.AddrPort, check plan.HealthCheck) key {
	at := check.Target(endpoint)
	check.Port = 0
	return key{at, unique.Make(check)}
}

// user is an endpoint of a Service. A Service has one health check for all its
// ports, so that each is on behalf of one target.
type user struct {
	service  plan.Name
	endpoint netip.AddrPort
}

// use is a user with the number of its Service's ports that have the target.
type use struct {
	user
	ports int
}

// target is what is probed.
type target struct {
	key
	uses    []use // mostly one
	failing bool
	streak  uint8  // results in a row that contradict failing
	reason  string // of the last failure
	since   time.Time

	next  time.Time // of the next probe
	index int       // in the queue, -1: not there
	gone  bool
}

// New returns a Prober that does nothing before Run.
func New(cfg Config) *Prober {
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{}).DialContext
	}
	if cfg.Spread == nil {
		cfg.Spread = rand.Float64
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Stats == nil {
		cfg.Stats = noStats{}
	}
	if cfg.Notes == nil {
		cfg.Notes = func([]plan.Note) {}
	}
	return &Prober{
		cfg: cfg, limit: rate.NewLimiter(perSecond(cfg.PerSecond)), slots: make(chan struct{}, mostAtOnce),
		wake: make(chan struct{}, 1), checker: checker{cfg.Dial}, told: newRemarks(cfg),
		targets: map[key]*target{}, users: map[user]*target{}, reported: map[user]struct{}{},
	}
}

// perSecond lets a tenth of a second's probes begin at once.
func perSecond(n int) (rate.Limit, int) {
	n = max(n, 1)
	return rate.Limit(n), max(1, n/10)
}

// SetPerSecond replaces Config.PerSecond.
func (p *Prober) SetPerSecond(n int) {
	limit, burst := perSecond(n)
	p.limit.SetLimit(limit)
	p.limit.SetBurst(burst)
}

// Run probes until ctx ends.
func (p *Prober) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		t := p.await(ctx)
		if t == nil || p.limit.Wait(ctx) != nil {
			return nil
		}
		select {
		case p.slots <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		if !p.begin(t) {
			<-p.slots
			continue
		}
		wg.Go(func() {
			defer func() { <-p.slots }()
			start := time.Now()
			err := p.checker.check(ctx, t.key)
			if ctx.Err() == nil {
				p.result(t, start, time.Since(start), err)
			}
		})
	}
}

// await returns a target that is due, out of the queue; nil if ctx ended.
func (p *Prober) await(ctx context.Context) *target {
	for {
		p.mu.Lock()
		pause := time.Hour
		if len(p.due) > 0 {
			if pause = time.Until(p.due[0].next); pause <= 0 {
				t := heap.Pop(&p.due).(*target)
				p.mu.Unlock()
				return t
			}
		}
		p.mu.Unlock()
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-p.wake:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		timer.Stop()
	}
}

// begin reports whether t is still to be probed.
func (p *Prober) begin(t *target) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.gone {
		return false
	}
	p.late = time.Since(t.next)
	p.cfg.Stats.Set("svcproxy_health_check_late_seconds", p.late.Seconds())
	return true
}

// result takes up what came of a probe that began at start.
func (p *Prober) result(t *target, start time.Time, took time.Duration, err error) {
	method, word := t.check.Value().Method.String(), "pass"
	if err != nil {
		word = "fail"
	}
	p.cfg.Stats.Add("svcproxy_health_checks_total", 1, method, word)
	p.cfg.Stats.Observe("svcproxy_health_check_duration_seconds", took.Seconds(), method)
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.gone {
		return
	}
	t.next = start.Add(t.check.Value().Interval)
	heap.Push(&p.due, t)
	p.nudge()
	if !t.judge(err) {
		return
	}
	t.since = time.Now()
	p.flipped(t)
	for _, u := range t.uses {
		p.tell(u.user)
		p.told.flipped(u.user, t)
	}
}

// judge takes up a result and reports whether t flips.
func (t *target) judge(err error) bool {
	if err != nil {
		t.reason = err.Error()
	}
	if (err != nil) == t.failing {
		t.streak = 0
		return false
	}
	enough := t.check.Value().Fall
	if t.failing {
		enough = t.check.Value().Rise
	}
	if t.streak++; t.streak < enough {
		return false
	}
	t.failing, t.streak = !t.failing, 0
	return true
}

// flipped counts a target that flipped.
func (p *Prober) flipped(t *target) {
	to := "healthy"
	if t.failing {
		to = "failing"
		p.failing++
	} else {
		p.failing--
	}
	p.cfg.Stats.Add("svcproxy_health_check_flips_total", 1, to)
	p.gauge()
}

func (p *Prober) gauge() {
	p.cfg.Stats.Set("svcproxy_health_check_targets", float64(len(p.targets)))
	p.cfg.Stats.Set("svcproxy_health_check_failing_targets", float64(p.failing))
}

// tell reports how a user's target is, if that is news.
func (p *Prober) tell(u user) {
	t := p.users[u]
	failing := t != nil && t.failing
	if _, was := p.reported[u]; was == failing {
		return
	}
	if failing {
		p.reported[u] = struct{}{}
	} else {
		delete(p.reported, u)
	}
	p.cfg.Report(u.service, u.endpoint, failing)
}

func (p *Prober) nudge() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// queue orders targets by the time of their next probe, for container/heap.
type queue []*target

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].next.Before(q[j].next) }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

func (q *queue) Push(x any) {
	t := x.(*target)
	t.index = len(*q)
	*q = append(*q, t)
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	t := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	t.index = -1
	return t
}

type noStats struct{}

func (noStats) Add(string, float64, ...string)     {}
func (noStats) Set(string, float64, ...string)     {}
func (noStats) Observe(string, float64, ...string) {}
