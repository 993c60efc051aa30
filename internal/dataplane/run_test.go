package dataplane

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

func TestFirstSyncWaitsForFacts(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) {
		b.world.missing = []string{"api Service", "api EndpointSlice"}
		b.world.set(service(tcp("web"), 20, 1), service(tcp("kubernetes"), 1, 9))
		b.world.first = []plan.ID{tcp("kubernetes")}
	}, func(b *bench) {
		b.pass(time.Minute)
		b.wantApplies(0)
		if have := b.Status().Waiting; !slices.Equal(have, []string{"api Service", "api EndpointSlice"}) {
			t.Errorf("waiting for %q", have)
		}
		if b.Synced() {
			t.Error("synced without facts")
		}
		b.world.edit(func() { b.world.missing = nil })
		synctest.Wait()
		c := b.wantApplies(2)
		if !c[0].partial || !slices.Equal(c[0].changed, []string{"kubernetes ->1"}) {
			t.Errorf("first: %+v", c[0])
		}
		if c[1].partial || !slices.Equal(c[1].changed, []string{"web ->1"}) {
			t.Errorf("second: %+v", c[1])
		}
		if s := b.Status(); !s.Synced || s.ServicePorts != 2 || s.Waiting != nil || !s.PendingSince.IsZero() {
			t.Errorf("status %+v", s)
		}
		if b.rec.ports != 1 {
			t.Errorf("health ports were handed over %d times", b.rec.ports)
		}
	})
}

// What serves in another mode is not cut short by a part of the plan.
func TestNothingPartialWhileAnotherModeIsInForce(t *testing.T) {
	onBench(t, func(b *bench, c *Config) {
		b.world.set(service(tcp("web"), 20, 1), service(tcp("kubernetes"), 1, 9))
		b.world.first = []plan.ID{tcp("kubernetes")}
		c.Whole = true
	}, func(b *bench) {
		synctest.Wait()
		if c := b.wantApplies(1); c[0].partial || len(c[0].changed) != 2 {
			t.Errorf("first: %+v", c[0])
		}
		if !b.Synced() {
			t.Error("not synced")
		}
	})
}

// lockedBuffer is a log that may be read while it is written.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Facts come one after the other at every start; only what does not come is worth a
// line in the log, and only one.
func TestWaitingIsLoggedOnceItLasts(t *testing.T) {
	var log lockedBuffer
	onBench(t, func(b *bench, c *Config) {
		b.world.missing = []string{"api Service", "api Node"}
		c.Log = slog.New(slog.NewTextHandler(&log, nil))
	}, func(b *bench) {
		b.world.edit(func() { b.world.missing = []string{"api Node"} })
		b.pass(time.Second)
		if log.String() != "" {
			t.Errorf("logged after a second:\n%s", &log)
		}
		b.pass(time.Minute)
		if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), `missing="api Node"`) {
			t.Errorf("after a minute %d lines:\n%s", n, &log)
		}
	})
}

// Readiness that comes with time alone is noticed too.
func TestFactsGetReadyWithoutAChange(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.world.missing = []string{"pod CIDRs"} }, func(b *bench) {
		b.world.mu.Lock()
		b.world.missing = nil
		b.world.mu.Unlock()
		b.pass(2 * time.Second)
		if !b.Synced() {
			t.Error("not synced")
		}
	})
}

// What is added waits for the minimum interval, counted from the end of an Apply,
// and comes as one.
func TestMinInterval(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.kernel.takes = 300 * time.Millisecond }, func(b *bench) {
		b.pass(10 * time.Second)
		n := len(b.kernel.calls())
		b.world.set(service(tcp("a"), 20, 1))
		b.pass(50 * time.Millisecond) // at once: the last Apply is long ago, and it runs now
		b.world.set(service(tcp("b"), 21, 1))
		b.pass(50 * time.Millisecond)
		b.world.set(service(tcp("c"), 22, 1))
		b.pass(10 * time.Second)
		c := b.wantApplies(n + 2)[n:]
		if !slices.Equal(c[1].changed, []string{"b ->1", "c ->1"}) {
			t.Errorf("second Apply: %q", c[1].changed)
		}
		if gap := c[1].start.Sub(c[0].end); gap != time.Second {
			t.Errorf("%s between the Applies", gap)
		}
	})
}

func TestRemovalIsNotDelayed(t *testing.T) {
	web := service(tcp("web"), 20, 1, 2)
	local := service(tcp("web"), 20, 1, 2)
	local.Pools[plan.Local] = local.Pools[plan.Cluster][:1]
	weightless := service(tcp("web"), 20, 1, 2)
	weightless.Pools[plan.Cluster][1].Weight = 0
	closed := service(tcp("web"), 20, 1, 2)
	closed.Frontends[0].Route[plan.FromOutside].Verdict = plan.Drop
	twoFrontends := service(tcp("web"), 20, 1, 2)
	twoFrontends.Frontends = append(twoFrontends.Frontends, plan.Frontend{Kind: plan.NodePort, Port: 30000})
	for name, c := range map[string]struct {
		old, new *plan.ServicePort
		waits    bool
	}{
		"an endpoint goes":          {old: web, new: service(tcp("web"), 20, 1)},
		"an endpoint is replaced":   {old: web, new: service(tcp("web"), 20, 1, 3)},
		"a local endpoint goes":     {old: local, new: web},
		"an endpoint is drained":    {old: web, new: weightless},
		"a Service goes":            {old: web},
		"a frontend goes":           {old: twoFrontends, new: web},
		"a frontend moves":          {old: web, new: service(tcp("web"), 21, 1, 2)},
		"a route closes":            {old: web, new: closed},
		"an endpoint comes":         {old: web, new: service(tcp("web"), 20, 1, 2, 3), waits: true},
		"a frontend comes":          {old: web, new: twoFrontends, waits: true},
		"a route opens":             {old: closed, new: web, waits: true},
		"an endpoint gets a weight": {old: weightless, new: web, waits: true},
	} {
		t.Run(name, func(t *testing.T) {
			onBench(t, func(b *bench, _ *Config) { b.world.set(c.old) }, func(b *bench) {
				b.pass(10 * time.Second)
				b.world.set(service(tcp("other"), 99, 1)) // starts the interval
				b.pass(100 * time.Millisecond)
				n := len(b.kernel.calls())
				if c.new == nil {
					b.world.remove(tcp("web"))
				} else {
					b.world.set(c.new)
				}
				b.pass(100 * time.Millisecond)
				if have := len(b.kernel.calls()) == n; have != c.waits {
					t.Errorf("waits: %t, want %t", have, c.waits)
				}
				b.pass(time.Second)
				b.wantApplies(n + 1)
			})
		})
	}
}

// A failed change is tried again with growing pauses, the whole difference with
// it, after a read-back each time.
func TestFailureIsRetried(t *testing.T) {
	var broken atomic.Bool
	onBench(t, func(b *bench, c *Config) {
		c.Settings.SyncPeriod = 5 * time.Second
		b.world.set(service(tcp("a"), 20, 1), service(tcp("b"), 21, 1))
		b.kernel.fail = func(int, plan.Update) error {
			if broken.Load() {
				return errors.New("no memory")
			}
			return nil
		}
	}, func(b *bench) {
		b.pass(10 * time.Second)
		n, updates, since := len(b.kernel.calls()), len(b.rec.updated), time.Now()
		broken.Store(true)
		b.world.set(service(tcp("a"), 20, 1, 2))
		b.pass(12 * time.Second)
		b.world.remove(tcp("b"))
		b.world.set(service(tcp("a"), 20, 1, 2, 3))
		b.pass(time.Second)
		if len(b.rec.updated) != updates || !b.rec.queued.Equal(since) {
			t.Errorf("health: %d updates more, queued %s", len(b.rec.updated)-updates, b.rec.queued.Sub(since))
		}
		s := b.Status()
		if s.LastError != "no memory" || s.Failures == 0 || !s.PendingSince.Equal(since) {
			t.Errorf("status %+v", s)
		}
		broken.Store(false)
		b.pass(10 * time.Second)
		c := b.kernel.calls()[n:]
		for i, want := range []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second} {
			if pause := c[i+1].start.Sub(c[i].end); pause != want {
				t.Errorf("pause %d is %s, want %s", i, pause, want)
			}
		}
		last := c[len(c)-1]
		if !slices.Equal(last.changed, []string{"a 1>3", "b 1>-"}) || last.err != nil {
			t.Errorf("last Apply: %+v", last)
		}
		b.wantLines("a 3")
		if b.kernel.rereads != len(c)-1 {
			t.Errorf("%d read-backs for %d failures", b.kernel.rereads, len(c)-1)
		}
		if s := b.Status(); s.LastError != "" || s.Failures != 0 || !s.PendingSince.IsZero() {
			t.Errorf("status %+v", s)
		}
		if !b.rec.queued.IsZero() {
			t.Error("health still waits")
		}
		if have := b.rec.get("svcproxy_sync_failures_total"); int(have) != len(c)-1 {
			t.Errorf("counted %v failures", have)
		}
	})
}

// A removal that comes while retries are far apart does not wait for the next,
// and does not become a storm either.
func TestRemovalPullsARetryForward(t *testing.T) {
	onBench(t, func(b *bench, c *Config) {
		c.Settings.SyncPeriod = time.Minute
		b.world.set(service(tcp("a"), 20, 1, 2))
		b.kernel.fail = func(int, plan.Update) error { return errors.New("no memory") }
	}, func(b *bench) {
		b.pass(70 * time.Second)
		n := len(b.kernel.calls())
		b.world.set(service(tcp("a"), 20, 1))
		b.pass(time.Second)
		b.wantApplies(n + 1)
		b.pass(10 * time.Second)
		b.wantApplies(n + 1)
	})
}

func TestPanicIsAFailure(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(tcp("a"), 20, 1))
		b.kernel.fail = func(n int, _ plan.Update) error {
			if n == 2 || n == 3 {
				panic("index out of range")
			}
			return nil
		}
	}, func(b *bench) {
		b.pass(10 * time.Second)
		b.wantApplies(4)
		b.wantLines("a 1")
	})
}

func TestFullReconcileEveryHour(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.world.set(service(tcp("a"), 20, 1)) }, func(b *bench) {
		n := len(b.kernel.calls())
		b.pass(3*time.Hour + time.Minute)
		if b.kernel.rereads != 3 {
			t.Errorf("%d read-backs in three hours", b.kernel.rereads)
		}
		b.wantApplies(n + 3)
	})
}

// A failure that stays is one line now and then, and its end is another.
func TestFailuresThatStayAreLoggedSparingly(t *testing.T) {
	var log lockedBuffer
	lines := func(part string) int { return strings.Count(log.String(), part) }
	onBench(t, func(b *bench, c *Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) }, func(b *bench) {
		var why atomic.Pointer[error]
		fail := func(text string) { err := errors.New(text); why.Store(&err) }
		fail("no memory")
		b.kernel.fail = func(int, plan.Update) error {
			if err := why.Load(); err != nil {
				return *err
			}
			return nil
		}
		b.world.set(service(tcp("web"), 20, 1))
		b.pass(9 * time.Minute)
		if n := lines("sync failed"); n != 1 {
			t.Errorf("%d lines about one failure:\n%s", n, &log)
		}
		b.pass(3 * time.Minute)
		if n := lines("no memory"); n != 2 {
			t.Errorf("after 12 minutes %d lines:\n%s", n, &log)
		}
		fail("no permission")
		b.pass(time.Minute)
		if n := lines("no permission"); n != 1 {
			t.Errorf("%d lines about another failure:\n%s", n, &log)
		}
		why.Store(nil)
		b.pass(time.Minute)
		if n := lines("sync succeeds again"); n != 1 {
			t.Errorf("%d lines about the end:\n%s", n, &log)
		}
	})
}

// A read-back without a reason that fails is repeated as any other failure is.
func TestFullReconcileFails(t *testing.T) {
	var broken atomic.Bool
	onBench(t, func(b *bench, _ *Config) {
		b.kernel.fail = func(int, plan.Update) error {
			if broken.Load() {
				return errors.New("no memory")
			}
			return nil
		}
	}, func(b *bench) {
		n := len(b.kernel.calls())
		broken.Store(true)
		b.pass(time.Hour + 10*time.Second)
		if c := len(b.kernel.calls()) - n; c < 3 || c > 6 {
			t.Errorf("%d attempts in ten seconds", c)
		}
	})
}

// Outside interference is repaired at once, at first.
func TestDisturbed(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.world.set(service(tcp("a"), 20, 1)) }, func(b *bench) {
		b.pass(10 * time.Second)
		n := len(b.kernel.calls())
		for i := range 3 {
			clear(b.kernel.state)
			b.Disturbed(fmt.Sprintf("chain %d is gone", i))
			synctest.Wait()
			b.wantApplies(n + i + 1)
			b.wantLines("a 1")
		}
		if s := b.Status(); s.Interference != 3 || s.LastInterference != "chain 2 is gone" {
			t.Errorf("status %+v", s)
		}
		if have := b.rec.get("svcproxy_interference_total"); have != 3 {
			t.Errorf("counted %v", have)
		}
	})
}

// A fight is not fought at any price, is named once, and ends.
func TestFight(t *testing.T) {
	onBench(t, nil, func(b *bench) {
		b.pass(10 * time.Second)
		n := len(b.kernel.calls())
		for range 120 { // twice a second, for a minute
			b.Disturbed("table nat was flushed")
			b.pass(500 * time.Millisecond)
		}
		if c := len(b.kernel.calls()) - n; c < 12 || c > 18 {
			t.Errorf("%d repairs in a minute", c)
		}
		if have := b.rec.reasons(); !slices.Equal(have, []string{"StateFight alder"}) {
			t.Errorf("notes %q", have)
		}
		b.pass(time.Minute)
		n = len(b.kernel.calls())
		b.pass(5 * time.Minute)
		b.wantApplies(n)
	})
}

// A change that takes itself back before it was tried leaves nothing to do, and
// nothing that health waits for.
func TestChangeTakenBack(t *testing.T) {
	one, two := service(tcp("a"), 20, 1), service(tcp("a"), 20, 1, 2)
	onBench(t, func(b *bench, _ *Config) { b.world.set(one) }, func(b *bench) {
		b.pass(10 * time.Second)
		b.world.set(service(tcp("b"), 21, 1))
		b.pass(100 * time.Millisecond)
		n := len(b.kernel.calls())
		b.world.set(two)
		b.pass(100 * time.Millisecond)
		if b.rec.queued.IsZero() {
			t.Error("the change was not queued")
		}
		b.world.set(one)
		b.pass(time.Minute)
		b.wantApplies(n)
		if !b.rec.queued.IsZero() || !b.Status().PendingSince.IsZero() {
			t.Error("something still waits")
		}
	})
}

func TestSettingsChangeLive(t *testing.T) {
	onBench(t, func(_ *bench, c *Config) { c.Settings.MinInterval = time.Hour }, func(b *bench) {
		b.pass(time.Second)
		n := len(b.kernel.calls())
		b.world.set(service(tcp("a"), 20, 1))
		b.pass(time.Minute)
		b.wantApplies(n)
		b.SetSettings(Settings{MinInterval: time.Second, FullInterval: 10 * time.Minute})
		synctest.Wait()
		b.wantApplies(n + 1)
		b.pass(11 * time.Minute)
		b.wantApplies(n + 2)
	})
}

func TestDo(t *testing.T) {
	onBench(t, nil, func(b *bench) {
		err := b.Do(b.t.Context(), func() { b.world.want[tcp("a")] = service(tcp("a"), 20, 1) })
		if err != nil {
			t.Fatal(err)
		}
		b.pass(2 * time.Second)
		b.wantLines("a 1")
		b.stop()
		if err := b.Do(b.t.Context(), func() { t.Error("ran after the end") }); err == nil {
			t.Error("no error after the end")
		}
	})
}

func TestDoBeforeTheFirstPlan(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.world.missing = []string{"everything"} }, func(b *bench) {
		ran := false
		if err := b.Do(b.t.Context(), func() { ran = true }); err != nil || !ran {
			t.Errorf("ran %t, error %v", ran, err)
		}
	})
}

// Notes reach their reader at once and once, whatever becomes of the plan.
func TestNotesDoNotWaitForTheKernel(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) {
		b.kernel.fail = func(int, plan.Update) error { return errors.New("no memory") }
		b.world.notes = []plan.Note{{Kind: "Service", Name: "web", Reason: "PortConflict"}}
	}, func(b *bench) {
		b.pass(time.Minute)
		if have := b.rec.reasons(); !slices.Equal(have, []string{"PortConflict web"}) {
			t.Errorf("notes %q", have)
		}
	})
}

func TestIncompleteConfig(t *testing.T) {
	if err := New(Config{}).Run(t.Context()); err == nil {
		t.Error("no error")
	}
}

func TestStatusIsJSON(t *testing.T) {
	onBench(t, func(b *bench, c *Config) {
		b.world.set(service(tcp("a"), 20, 1))
		c.Age = func() time.Duration { return 3 * time.Second }
	}, func(b *bench) {
		raw, err := json.Marshal(b.Status())
		if err != nil {
			t.Fatal(err)
		}
		var have map[string]any
		if err := json.Unmarshal(raw, &have); err != nil {
			t.Fatal(err)
		}
		if have["mode"] != "test" || have["synced"] != true || have["factsAge"] != 3e9 || have["lastError"] != nil {
			t.Errorf("have %s", raw)
		}
	})
}

// watched is a kernel that can be watched.
type watched struct{ *kernel }

func (w watched) Watch(ctx context.Context, disturbed func(string)) error {
	return w.watch(ctx, disturbed)
}

func TestWatchIsKeptUp(t *testing.T) {
	calls := 0
	onBench(t, func(b *bench, c *Config) {
		b.kernel.watch = func(ctx context.Context, disturbed func(string)) error {
			calls++
			if calls == 1 {
				return errors.New("no buffer space")
			}
			disturbed("chain KUBE-SERVICES is gone")
			<-ctx.Done()
			return nil
		}
		c.Backend = watched{b.kernel}
	}, func(b *bench) {
		b.pass(10 * time.Second)
		if calls != 2 || b.Status().Interference != 1 {
			t.Errorf("%d watches, %d interferences", calls, b.Status().Interference)
		}
		if b.kernel.rereads != 2 { // for what the gap may have hidden, and for what was seen
			t.Errorf("%d read-backs", b.kernel.rereads)
		}
	})
}

func TestMetricsOfASync(t *testing.T) {
	dropping := service(tcp("local"), 21, 1)
	dropping.Frontends[0].Route[plan.FromOutside].Verdict = plan.Drop
	onBench(t, func(b *bench, c *Config) {
		c.Families = plan.Families[:]
		b.world.set(service(tcp("a"), 20, 1), dropping)
		b.world.first = []plan.ID{dropping.ID}
		b.world.trigger = []time.Time{time.Now().Add(-time.Hour)} // from before the start
	}, func(b *bench) {
		b.pass(10 * time.Second)
		b.world.edit(func() { b.world.trigger = []time.Time{time.Now()} }) // of what is no Service's endpoint
		b.pass(10 * time.Second)
		b.world.edit(func() { b.world.trigger = []time.Time{time.Now()} })
		b.world.set(service(tcp("a"), 20, 1, 2))
		b.pass(10 * time.Second)
		for key, want := range map[string]float64{
			"sync_full_proxy_rules_duration_seconds samples IPv4":     1,
			"sync_full_proxy_rules_duration_seconds samples IPv6":     1,
			"sync_partial_proxy_rules_duration_seconds samples IPv4":  1,
			"sync_partial_proxy_rules_duration_seconds samples IPv6":  0,
			"sync_proxy_rules_duration_seconds samples IPv4":          2,
			"network_programming_duration_seconds samples IPv4":       1,
			"sync_proxy_rules_no_local_endpoints_total internal IPv4": 1,
			"sync_proxy_rules_no_local_endpoints_total external IPv4": 0,
			"sync_proxy_rules_endpoint_changes_pending":               0,
			"sync_proxy_rules_service_changes_total":                  2,
			"sync_proxy_rules_endpoint_changes_total":                 3,
			"svcproxy_quarantined_service_ports":                      0,
		} {
			if have := b.rec.get(key); have != want {
				t.Errorf("%s is %v, want %v", key, have, want)
			}
		}
	})
}

// Whatever changes and fails, in the end the kernel has the newest plan.
func TestRandomWalk(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r, faults := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2))
			onBench(t, func(b *bench, c *Config) {
				c.Settings.MinInterval = time.Duration(r.IntN(3)) * time.Second
				b.kernel.fail = func(_ int, u plan.Update) error {
					switch {
					case faults.IntN(4) == 0:
						return errors.New("no memory")
					case faults.IntN(10) == 0 && len(u.Changed) > 0:
						return &ObjectError{ID: u.Changed[0].ID, Err: errors.New("bad mask")}
					}
					return nil
				}
			}, func(b *bench) {
				for range 200 {
					id := tcp(fmt.Sprint("s", r.IntN(6)))
					if r.IntN(3) == 0 {
						b.world.remove(id)
					} else {
						b.world.set(service(id, 20, []byte{1, 2, 3, 4}[:r.IntN(4)]...))
					}
					if r.IntN(8) == 0 {
						b.Disturbed("something")
					}
					b.pass(time.Duration(r.IntN(1500)) * time.Millisecond)
				}
				b.kernel.mu.Lock()
				b.kernel.fail = nil
				b.kernel.mu.Unlock()
				b.pass(2 * lastRelease) // quarantines end
				b.wantLines(lines(b.world.want)...)
				if s := b.Status(); len(s.Quarantined) > 0 || s.LastError != "" || !s.PendingSince.IsZero() {
					t.Errorf("status %+v", s)
				}
			})
		})
	}
}

// The last success is never older than the last request once all is quiet: neither
// for a family that a change did not concern, nor after a change that was undone.
func TestLastSuccessFollowsTheLastRequest(t *testing.T) {
	onBench(t, func(b *bench, c *Config) {
		c.Families = plan.Families[:]
		c.Settings.MinInterval = 10 * time.Second
		b.world.set(service(tcp("web"), 20, 1))
	}, func(b *bench) {
		check := func(when string) {
			b.pass(time.Minute)
			for _, f := range plan.Families {
				queued := b.rec.get("sync_proxy_rules_last_queued_timestamp_seconds " + f.String())
				if last := b.rec.get("sync_proxy_rules_last_timestamp_seconds " + f.String()); last < queued {
					t.Errorf("%s: %s was asked for at %f and succeeded last at %f", when, f, queued, last)
				}
			}
		}
		check("after the start")
		b.world.set(service(tcp("web"), 20, 1, 2))
		check("after an IPv4 change")
		b.world.set(service(tcp("web"), 20, 1, 2, 3)) // goes in at once
		b.pass(time.Second)
		n := len(b.kernel.calls())
		b.world.set(service(tcp("late"), 21, 4)) // waits for the interval
		b.pass(time.Second)
		b.world.remove(tcp("late"))
		check("after a change that was undone")
		b.wantApplies(n)
	})
}
