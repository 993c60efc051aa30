package probe

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// lab is a Prober with endpoints that are up or down, in a bubble with a clock of
// its own.
type lab struct {
	*Prober
	mu       sync.Mutex // guards all below
	down     map[string]error
	dials    map[string][]time.Duration // since the start, by address
	atOnce   int
	mostBusy int
	reports  []string
	notes    []plan.Note

	services map[plan.ID]*plan.ServicePort
}

// start returns a lab that runs for a while and had nothing to do, in a bubble.
func start(t *testing.T, perSecond int) *lab {
	t.Helper()
	l := startNow(t, perSecond)
	l.Follow(plan.Update{})
	return l
}

// startNow returns a lab that has just been started.
func startNow(t *testing.T, perSecond int) *lab {
	t.Helper()
	l := &lab{down: map[string]error{}, dials: map[string][]time.Duration{}, services: map[plan.ID]*plan.ServicePort{}}
	begun := time.Now()
	next := 0.0
	l.Prober = New(Config{
		PerSecond: perSecond,
		Report: func(n plan.Name, e netip.AddrPort, failing bool) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.reports = append(l.reports, fmt.Sprintf("%s %s %v", n, e, failing))
		},
		Notes: func(n []plan.Note) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.notes = append(l.notes, n...)
		},
		Spread: func() float64 { next += 0.37; next -= float64(int(next)); return next },
		Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
			l.mu.Lock()
			l.dials[address] = append(l.dials[address], time.Since(begun))
			err := l.down[address]
			l.atOnce++
			l.mostBusy = max(l.mostBusy, l.atOnce)
			l.mu.Unlock()
			defer func() { l.mu.Lock(); l.atOnce--; l.mu.Unlock() }()
			if errors.Is(err, errSilent) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			if err != nil {
				return nil, err
			}
			c, other := net.Pipe()
			other.Close()
			return c, nil
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return l
}

var errSilent = errors.New("no answer")

// set makes addr fail with err, or pass.
func (l *lab) set(addr string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down[addr] = err
}

// reported returns what was reported since the last call.
func (l *lab) reported() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := strings.Join(l.reports, "; ")
	l.reports = nil
	return s
}

// put plans a port of default/NAME with endpoints 10.61.1.x:8080; check "" removes it.
func (l *lab) put(t *testing.T, name, port, check string, endpoints ...int) {
	t.Helper()
	id := plan.ID{Namespace: "default", Name: name, Port: port, Protocol: plan.TCP, Family: plan.IPv4}
	var next *plan.ServicePort
	if check != "" {
		h, err := plan.ParseHealthCheck(check)
		if err != nil {
			t.Fatal(err)
		}
		next = &plan.ServicePort{ID: id, Policy: &plan.Policy{Check: h}}
		for _, e := range endpoints {
			a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 61, byte(e >> 8), byte(e)}), 8080)
			next.Pools[plan.Cluster] = append(next.Pools[plan.Cluster], plan.Endpoint{Addr: a, Weight: 1})
		}
		next.Pools[plan.Local] = next.Pools[plan.Cluster][:len(endpoints)/2]
	}
	l.Follow(plan.Update{Changed: []plan.Change{{ID: id, Old: l.services[id], New: next}}})
	l.services[id] = next
	if next == nil {
		delete(l.services, id)
	}
}

func pass(d time.Duration) {
	time.Sleep(d) // the bubble's clock
	synctest.Wait()
}

func want(t *testing.T, what, have, want string) {
	t.Helper()
	if have != want {
		t.Errorf("%s: %q, want %q", what, have, want)
	}
}

func TestHysteresis(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, 100)
		l.put(t, "web", "http", "tcp,interval=1s,timeout=500ms,rise=2,fall=3", 5, 6)
		pass(10 * time.Second)
		want(t, "all pass", l.reported(), "")

		refused := errors.New("connection refused")
		l.set("10.61.0.5:8080", refused)
		pass(2100 * time.Millisecond)
		want(t, "two failures", l.reported(), "")
		l.set("10.61.0.5:8080", nil)
		pass(time.Second)
		l.set("10.61.0.5:8080", refused)
		pass(2 * time.Second)
		want(t, "two, a success, two", l.reported(), "")
		pass(time.Second)
		want(t, "three", l.reported(), "default/web 10.61.0.5:8080 true")
		if s := l.Status(); len(s.Failing) != 1 || s.Failing[0].Reason != "connection refused" || s.Targets != 2 {
			t.Errorf("status %+v", s)
		}

		l.set("10.61.0.5:8080", nil)
		pass(time.Second)
		l.set("10.61.0.5:8080", errSilent)
		pass(time.Second)
		l.set("10.61.0.5:8080", nil)
		pass(time.Second)
		want(t, "success, failure, success", l.reported(), "")
		pass(time.Second)
		want(t, "two successes", l.reported(), "default/web 10.61.0.5:8080 false")
		if s := l.Status(); len(s.Failing) != 0 {
			t.Errorf("status %+v", s)
		}
		var reasons []plan.Reason
		for _, n := range l.notes {
			reasons = append(reasons, n.Reason)
		}
		if !slices.Equal(reasons, []plan.Reason{ReasonFailing, ReasonPassing}) || !strings.Contains(l.notes[0].Message, "10.61.0.5:8080") {
			t.Errorf("notes %+v", l.notes)
		}
	})
}

func TestSilenceFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, 100)
		l.set("10.61.0.5:8080", errSilent)
		l.put(t, "web", "http", "tcp,interval=1s,timeout=300ms,fall=1", 5)
		pass(1400 * time.Millisecond)
		want(t, "reported", l.reported(), "default/web 10.61.0.5:8080 true")
		if s := l.Status(); len(s.Failing) != 1 || s.Failing[0].Reason != "no answer within 300ms" {
			t.Errorf("status %+v", s)
		}
	})
}

// What fails at the start, and perhaps failed before, is found out at once.
func TestFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := startNow(t, 100)
		const check = "tcp,interval=10s,fall=3,rise=2"
		l.set("10.61.0.5:8080", errors.New("refused"))
		l.set("10.61.0.7:8080", errors.New("refused"))
		l.put(t, "web", "http", check, 5, 6)
		pass(firstRound)
		want(t, "in the first round", l.reported(), "default/web 10.61.0.5:8080 true")
		l.set("10.61.0.6:8080", errors.New("refused"))
		l.put(t, "late", "http", check, 7)
		pass(20 * time.Second)
		want(t, "the others after two failures", l.reported(), "")
		pass(20 * time.Second)
		have := strings.Split(l.reported(), "; ")
		slices.Sort(have)
		want(t, "and after three", strings.Join(have, "; "), "default/late 10.61.0.7:8080 true; default/web 10.61.0.6:8080 true")
	})
}

// One place is probed once, however many ports and Services have it, and all hear
// of it; whoever joins later hears of it at once.
func TestShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, 100)
		const check = "tcp,interval=1s,fall=1,rise=1"
		l.set("10.61.0.5:8080", errors.New("refused"))
		l.put(t, "web", "http", check, 5)
		l.put(t, "web", "https", check, 5)
		l.put(t, "shop", "http", check+",port=8080", 5)
		pass(5 * time.Second)
		have := strings.Split(l.reported(), "; ")
		slices.Sort(have)
		want(t, "reported", strings.Join(have, "; "), "default/shop 10.61.0.5:8080 true; default/web 10.61.0.5:8080 true")
		if n := len(l.dials["10.61.0.5:8080"]); n != 5 {
			t.Errorf("%d probes in 5 s, want 5", n)
		}
		l.put(t, "late", "http", check, 5, 6)
		want(t, "a late one", l.reported(), "default/late 10.61.0.5:8080 true")
		l.put(t, "web", "http", "")
		want(t, "one port gone", l.reported(), "")
		l.put(t, "web", "https", "")
		want(t, "the Service gone", l.reported(), "default/web 10.61.0.5:8080 false")
		l.put(t, "shop", "http", check, 5)
		l.put(t, "shop", "http", check, 7)
		want(t, "the endpoint gone", l.reported(), "default/shop 10.61.0.5:8080 false")
	})
}

// Where there is nothing to probe any more, nothing is remembered.
func TestForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, 1000)
		for i := range 30 {
			l.set(fmt.Sprintf("10.61.0.%d:8080", i), errors.New("refused"))
		}
		for round := range 40 {
			for i := range 5 {
				check := []string{"tcp,interval=200ms,fall=1", "tcp,interval=1s,fall=1", "", "off", "tcp,interval=200ms,fall=1,port=80"}[(round+i)%5]
				l.put(t, fmt.Sprint("s", i), "p", check, round%7+i, round%7+i+1, round%7+i+9)
			}
			pass(150 * time.Millisecond)
		}
		for i := range 5 {
			l.put(t, fmt.Sprint("s", i), "p", "")
		}
		pass(2 * time.Second)
		if len(l.targets)+len(l.users)+len(l.Prober.reported)+len(l.due)+l.failing != 0 {
			t.Errorf("left: %d targets, %d users, %d reported, %d due, %d failing", len(l.targets), len(l.users), len(l.Prober.reported), len(l.due), l.failing)
		}
		state := map[string]bool{}
		for _, r := range l.reports {
			f := strings.Fields(r)
			state[f[0]+f[1]] = f[2] == "true"
		}
		if len(state) == 0 {
			t.Error("nothing was ever reported")
		}
		for who, failing := range state {
			if failing {
				t.Errorf("%s was never taken back", who)
			}
		}
		before := len(slices.Concat(slices.Collect(maps.Values(l.dials))...))
		pass(time.Minute)
		if after := len(slices.Concat(slices.Collect(maps.Values(l.dials))...)); after != before {
			t.Errorf("%d probes of nothing", after-before)
		}
	})
}

// Another check leaves an endpoint as it is until it has results of its own.
func TestCheckChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, 100)
		l.set("10.61.0.5:8080", errors.New("refused"))
		l.put(t, "web", "http", "tcp,interval=1s,fall=1", 5)
		pass(2 * time.Second)
		want(t, "first", l.reported(), "default/web 10.61.0.5:8080 true")
		l.put(t, "web", "http", "tcp,interval=2s,rise=3", 5)
		want(t, "changed", l.reported(), "")
		l.set("10.61.0.5:8080", nil)
		pass(10 * time.Second)
		want(t, "recovered", l.reported(), "default/web 10.61.0.5:8080 false")
		l.set("10.61.0.5:8080", errors.New("refused"))
		pass(10 * time.Second)
		want(t, "again", l.reported(), "default/web 10.61.0.5:8080 true")
		l.put(t, "web", "http", "off", 5)
		want(t, "off", l.reported(), "default/web 10.61.0.5:8080 false")
	})
}

// Probes are spread over the interval, never more than allowed, and if that is not
// enough for all, all are late alike.
func TestPace(t *testing.T) {
	for _, c := range []struct {
		endpoints, perSecond int
		interval             time.Duration
		perEndpoint          int // in 20 s, one more or less
	}{
		{100, 1000, time.Second, 20},
		{100, 50, time.Second, 10},
		{400, 20, 2 * time.Second, 1},
	} {
		t.Run(fmt.Sprintf("%d at %d", c.endpoints, c.perSecond), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, c.perSecond)
				all := make([]int, c.endpoints)
				for i := range all {
					all[i] = i
				}
				l.put(t, "web", "http", "tcp,interval="+c.interval.String(), all...)
				if n := runtime.NumGoroutine(); n > 50 {
					t.Errorf("%d goroutines at rest", n)
				}
				pass(20 * time.Second)
				if len(l.dials) != c.endpoints {
					t.Errorf("%d endpoints were probed", len(l.dials))
				}
				perSecond := map[time.Duration]int{}
				for addr, at := range l.dials {
					if len(at) < c.perEndpoint-1 || len(at) > c.perEndpoint+1 {
						t.Errorf("%s was probed %d times, want about %d", addr, len(at), c.perEndpoint)
					}
					for i, d := range at {
						perSecond[d.Truncate(time.Second)]++
						if i > 0 && d-at[i-1] < c.interval {
							t.Errorf("%s was probed after %s", addr, d-at[i-1])
						}
					}
				}
				for s, n := range perSecond {
					if limit := c.perSecond + max(1, c.perSecond/10); n > limit {
						t.Errorf("%d probes in the second from %s, want at most %d", n, s, limit)
					}
					if even := int(float64(c.endpoints) / c.interval.Seconds()); n > 2*even {
						t.Errorf("%d probes in the second from %s, spread evenly these are %d", n, s, even)
					}
				}
			})
		})
	}
}

// However many hang, only so many are under way.
func TestAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, 10_000)
		all := make([]int, 1000)
		for i := range all {
			all[i] = i
			l.set(fmt.Sprintf("10.61.%d.%d:8080", i>>8, i&255), errSilent)
		}
		l.put(t, "web", "http", "tcp,interval=10s,timeout=10s,fall=1", all...)
		pass(time.Minute)
		if l.mostBusy != mostAtOnce {
			t.Errorf("%d probes at once, want %d", l.mostBusy, mostAtOnce)
		}
		if s := l.Status(); len(s.Failing) != mostListed || s.Untold != 1000-mostListed || s.Late <= 0 {
			t.Errorf("status: %d failing and %d more, late %s", len(s.Failing), s.Untold, s.Late)
		}
		// 20 at once, and one every 6 s.
		if n := len(l.notes); n < 20 || n > 20+10 {
			t.Errorf("%d remarks on 1000 endpoints", n)
		}
	})
}

// TestMemory bounds what an endpoint costs at rest.
func TestMemory(t *testing.T) {
	const n = 20_000
	h, err := plan.ParseHealthCheck("http,path=/healthz")
	if err != nil {
		t.Fatal(err)
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var changes []plan.Change
	for i := range n / 10 {
		id := plan.ID{Namespace: "default", Name: fmt.Sprintf("some-application-%05d", i), Port: "http", Protocol: plan.TCP, Family: plan.IPv4}
		sp := &plan.ServicePort{ID: id, Policy: &plan.Policy{Check: h}}
		for j := range 10 {
			a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j)}), 8080)
			sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: a, Weight: 1})
		}
		changes = append(changes, plan.Change{ID: id, New: sp})
	}
	before := heap()
	p := New(Config{PerSecond: 100, Report: func(plan.Name, netip.AddrPort, bool) {}})
	p.Follow(plan.Update{Changed: changes})
	each := (heap() - before) / n
	if len(p.targets) != n {
		t.Fatalf("%d targets", len(p.targets))
	}
	t.Logf("%d bytes for each endpoint", each)
	if each > 600 {
		t.Errorf("%d bytes for each endpoint, want at most 600", each)
	}
	runtime.KeepAlive(changes)
}
