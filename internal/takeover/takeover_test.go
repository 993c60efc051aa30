package takeover

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// node is a node in memory: a loop that applies what is held, and a network in which
// a connection reaches a listener by its own address, or by a frontend of the plan if
// the mode works.
type node struct {
	t        *testing.T
	takeover *Takeover

	mu        sync.Mutex // guards all below
	works     bool       // the kernel does what the plan says
	plan      plan.Plan
	listeners map[string]*listener
	port      uint16
	did       []string // in order
	others    bool     // the other mode is in force
	rival     *Rival
	lines     []string // of Diff
}

func newNode(t *testing.T) *node {
	n := &node{t: t, works: true, others: true, listeners: map[string]*listener{}, port: 40000}
	n.plan = plan.Plan{Services: map[plan.ID]*plan.ServicePort{}, Node: &plan.Node{
		Name: "n", Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("192.0.2.1")},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")},
	}}
	n.takeover = New(Config{
		Mode: "new", Families: plan.Families[:], Loop: n, Planner: n, Differ: n, Stats: noStats{},
		Others: []Other{{
			Name:    "old",
			InForce: func(context.Context) (bool, error) { n.mu.Lock(); defer n.mu.Unlock(); return n.others, nil },
			Remove:  func(context.Context) error { n.note("remove old"); n.set(func() { n.others = false }); return nil },
		}},
		Leftovers: func(context.Context) error { n.note("remove leftovers"); return nil },
		Rival:     func(context.Context) *Rival { n.mu.Lock(); defer n.mu.Unlock(); return n.rival },
		Tell:      func(r plan.Reason, _ bool, _ string) { n.note("tell " + string(r)) },
		Log:       slog.New(slog.DiscardHandler),
		Listen:    n.listen, Dial: n.dial,
	})
	n.takeover.Follow(plan.Update{Plan: &n.plan})
	return n
}

// run runs the takeover until the test ends, in a bubble.
func (n *node) run() {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { n.takeover.Run(ctx) })
	n.t.Cleanup(func() { cancel(); wg.Wait() })
	n.takeover.Begin()
}

func (n *node) set(f func()) { n.mu.Lock(); defer n.mu.Unlock(); f() }

func (n *node) note(what string) { n.set(func() { n.did = append(n.did, what) }) }

func (n *node) Do(_ context.Context, f func()) error { f(); return nil }
func (n *node) Status() dataplane.Status             { return dataplane.Status{} }

func (n *node) Diff(context.Context, *plan.Plan) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lines, nil
}

func (n *node) Hold(id plan.ID, sp *plan.ServicePort) {
	n.note("hold")
	n.set(func() { n.plan.Services[id] = sp })
	n.takeover.Follow(plan.Update{Plan: &n.plan, Changed: []plan.Change{{ID: id, New: sp}}})
}

func (n *node) Release(id plan.ID) {
	n.note("release")
	var old *plan.ServicePort
	n.set(func() { old = n.plan.Services[id]; delete(n.plan.Services, id) })
	n.takeover.Follow(plan.Update{Plan: &n.plan, Changed: []plan.Change{{ID: id, Old: old}}})
}

func (n *node) listen(addr string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.port++
	l := &listener{node: n, addr: netip.AddrPortFrom(netip.MustParseAddrPort(addr).Addr(), n.port), conns: make(chan net.Conn), closed: make(chan struct{})}
	n.listeners[l.addr.String()] = l
	return l, nil
}

func (n *node) dial(ctx context.Context, addr string) (net.Conn, error) {
	n.mu.Lock()
	to := addr
	for _, sp := range n.plan.Services {
		if f := sp.Frontends[0]; n.works && netip.AddrPortFrom(f.Addr, f.Port).String() == addr {
			to = sp.Pools[plan.Cluster][0].Addr.String()
		}
	}
	l := n.listeners[to]
	n.mu.Unlock()
	if l == nil {
		return nil, errors.New("connection refused")
	}
	here, there := net.Pipe()
	select {
	case l.conns <- there:
		return here, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type listener struct {
	node   *node
	addr   netip.AddrPort
	conns  chan net.Conn
	closed chan struct{}
}

func (l *listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.addr) }

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, io.EOF
	}
}

func (l *listener) Close() error {
	l.node.set(func() { delete(l.node.listeners, l.addr.String()) })
	close(l.closed)
	return nil
}

type noStats struct{}

func (noStats) Add(string, float64, ...string)     {}
func (noStats) Set(string, float64, ...string)     {}
func (noStats) Observe(string, float64, ...string) {}

// mustDo waits until everything is idle for a time and compares what happened.
func (n *node) mustDo(after time.Duration, want ...string) {
	n.t.Helper()
	time.Sleep(after) // of the bubble's clock
	synctest.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Equal(n.did, want) {
		n.t.Errorf("want %q, have %q", want, n.did)
	}
	n.did = nil
}

func TestOldModeGoesAfterTheProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.run()
		n.mustDo(time.Hour, "hold", "release", "remove old", "remove leftovers", "tell ModeVerified")
		if s := n.takeover.Status(); s.Verified.IsZero() || len(s.InForce) > 0 || n.takeover.Problem() != "" {
			t.Errorf("the status is %+v, the problem %q", s, n.takeover.Problem())
		}
	})
}

// A process in the old mode that has not ended yet repairs what was removed.
func TestOldModeComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.run()
		n.mustDo(time.Minute, "hold", "release", "remove old", "remove leftovers", "tell ModeVerified")
		for range 2 {
			n.set(func() { n.others = true })
			n.mustDo(time.Minute, "hold", "release", "remove old", "remove leftovers")
		}
		if s := n.takeover.Status(); len(s.InForce) > 0 || n.takeover.Problem() != "" {
			t.Errorf("the status is %+v, the problem %q", s, n.takeover.Problem())
		}
		n.mustDo(time.Hour)
	})
}

// What open connections need of the old mode goes when they have ended; until then the
// new one is alone nevertheless.
func TestOldModeDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		open := 2
		remove := n.takeover.cfg.Others[0].Remove
		n.takeover.cfg.Others[0].Remove = func(ctx context.Context) error {
			err := remove(ctx)
			n.mu.Lock()
			defer n.mu.Unlock()
			if open > 0 {
				err = errors.Join(&dataplane.Draining{Mode: "old", Connections: open})
			}
			return err
		}
		n.run()
		n.mustDo(time.Second/2, "hold", "release", "remove old", "remove leftovers", "tell ModeVerified")
		s := n.takeover.Status()
		if len(s.InForce) > 0 || n.takeover.Problem() != "" || !strings.Contains(s.Draining, "2 open connections of mode old") {
			t.Errorf("the status is %+v, the problem %q", s, n.takeover.Problem())
		}
		n.mustDo(time.Second, "remove old")
		// One that is back needs them itself.
		n.set(func() { n.rival = &Rival{Mode: "old"} })
		n.mustDo(time.Hour, "tell KubeProxyRunning")
		n.set(func() { n.rival = nil })
		n.mustDo(5*time.Second, "tell KubeProxyEnded", "remove old", "remove leftovers")
		n.set(func() { open = 0 })
		n.mustDo(time.Hour, "remove old")
		if s := n.takeover.Status(); s.Draining != "" {
			t.Errorf("the status is %+v", s)
		}
	})
}

func TestNothingIsProbedWhereNoOtherModeIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.others = false
		n.run()
		n.mustDo(time.Hour, "remove old")
	})
}

func TestOldModeStaysWhileTheProbeFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.works = false
		n.run()
		n.mustDo(patience/2, "hold")
		n.mustDo(patience, "release", "tell SelfProbeFailed", "hold")
		if p := n.takeover.Problem(); !strings.Contains(p, "old stay in force") || !strings.Contains(p, "refused") {
			t.Errorf("the problem is %q", p)
		}
		n.set(func() { n.works = true })
		n.mustDo(time.Hour, "release", "remove old", "remove leftovers", "tell ModeVerified")
	})
}

func TestOldModeStaysWhileTheKernelDiffers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.lines = []string{"+ something"}
		n.run()
		n.mustDo(time.Second/2, "hold", "release", "tell SelfProbeFailed")
		n.set(func() { n.lines, n.did = nil, nil })
		n.mustDo(time.Hour, "hold", "release", "remove old", "remove leftovers", "tell ModeVerified")
	})
}

func TestObjectsOfARunningKubeProxyStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rival = &Rival{PID: 7, Mode: "old"}
		n.run()
		n.mustDo(time.Second, "tell KubeProxyRunning", "hold", "release")
		if p := n.takeover.Problem(); !strings.Contains(p, "process 7") {
			t.Errorf("the problem is %q", p)
		}
		n.set(func() { n.rival, n.did = nil, nil })
		n.mustDo(time.Hour, "tell KubeProxyEnded", "hold", "release", "remove old", "remove leftovers", "tell ModeVerified")
	})
}

func TestLeftoversOfAKubeProxyInTheSameMode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.others = false
		n.rival = &Rival{Mode: "new"}
		n.run()
		n.mustDo(time.Hour, "tell KubeProxyRunning", "remove old")
		n.set(func() { n.rival = nil })
		n.mustDo(time.Hour, "tell KubeProxyEnded", "remove old", "remove leftovers")
	})
}
