package balance

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// clock is a time that tests move.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

func endpoint(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 8080)
}

func client(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 40000)
}

// servicePort has an endpoint, 1 and up, for each weight.
func servicePort(p plan.Protocol, policy plan.Policy, weights ...uint16) *plan.ServicePort {
	sp := &plan.ServicePort{ID: plan.ID{Name: "x", Protocol: p}, Policy: &policy}
	for i, w := range weights {
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: endpoint(i + 1), Weight: w})
	}
	return sp
}

func newBalancer(c *clock, sp *plan.ServicePort) *Balancer {
	b := New(Options{Now: c.Now, MaxAffinity: 100, Ejection: Ejection{Failures: 2, For: time.Minute}})
	b.Update(sp)
	return b
}

// share returns how many of n new flows go to each endpoint; flows that are open stay.
func share(b *Balancer, n int, keep bool) map[netip.AddrPort]int {
	got := map[netip.AddrPort]int{}
	for i := range n {
		e := b.Pick(client(i), plan.Cluster, nil)
		if e == nil {
			continue
		}
		got[e.Addr]++
		if !keep {
			b.Release(e)
		}
	}
	return got
}

func TestShares(t *testing.T) {
	for _, c := range []struct {
		scheduler string
		weights   []uint16
		keep      bool
		n         int
		want      []int
		off       int // allowed difference
	}{
		{"", []uint16{1, 1, 1}, false, 300, []int{100, 100, 100}, 0},
		{"", []uint16{1, 2, 3}, false, 600, []int{100, 200, 300}, 0},
		{"wrr", []uint16{5, 0, 1}, false, 600, []int{500, 0, 100}, 0},
		{"rr", []uint16{5, 0, 1}, false, 600, []int{300, 0, 300}, 0},
		{"random", []uint16{1, 2, 0}, false, 3000, []int{1000, 2000, 0}, 200},
		{"lc", []uint16{1, 9, 0}, true, 600, []int{300, 300, 0}, 1},
		{"wlc", []uint16{1, 3, 0}, true, 400, []int{100, 300, 0}, 1},
		{"sed", []uint16{1, 3, 0}, true, 400, []int{100, 300, 0}, 1},
		{"nq", []uint16{1, 3, 0}, true, 400, []int{100, 300, 0}, 1},
		{"fo", []uint16{1, 3, 2}, false, 10, []int{0, 10, 0}, 0},
		{"sh", []uint16{1, 2, 1}, false, 4000, []int{1000, 2000, 1000}, 200},
		{"unknown", []uint16{1, 2, 1}, false, 400, []int{100, 200, 100}, 0},
		{"", nil, false, 10, nil, 0},
		{"lc", []uint16{0, 0}, false, 10, []int{0, 0}, 0},
	} {
		t.Run(fmt.Sprint(c.scheduler, c.weights), func(t *testing.T) {
			b := newBalancer(&clock{}, servicePort(plan.TCP, plan.Policy{Scheduler: c.scheduler}, c.weights...))
			got := share(b, c.n, c.keep)
			for i, want := range c.want {
				if have := got[endpoint(i+1)]; math.Abs(float64(have-want)) > float64(c.off) {
					t.Errorf("endpoint %d has %d of %d, want %d", i+1, have, c.n, want)
				}
			}
		})
	}
}

func TestSourceHashKeepsClients(t *testing.T) {
	policy := plan.Policy{Scheduler: "sh", Fallback: true}
	b := newBalancer(&clock{}, servicePort(plan.TCP, policy, 1, 1, 1, 1))
	first := map[int]netip.AddrPort{}
	for i := range 400 {
		first[i] = b.Pick(client(i), plan.Cluster, nil).Addr
	}
	b.Update(servicePort(plan.TCP, policy, 1, 1, 1, 0))
	for i := range 400 {
		now := b.Pick(client(i), plan.Cluster, nil).Addr
		if first[i] != endpoint(4) && now != first[i] || now == endpoint(4) {
			t.Errorf("client %d moved from %s to %s when endpoint 4 stopped", i, first[i], now)
		}
	}
	policy.Fallback = false
	b.Update(servicePort(plan.TCP, policy, 1, 1, 1, 0))
	for i := range 400 {
		if e := b.Pick(client(i), plan.Cluster, nil); (e == nil) != (first[i] == endpoint(4)) {
			t.Errorf("client %d of %s gets %v without fallback", i, first[i], e)
		}
	}
	one, other := client(1), netip.AddrPortFrom(client(1).Addr(), 40001)
	policy.SourcePort = true
	b.Update(servicePort(plan.TCP, policy, make([]uint16, 200)...))
	if hashClient(one, true) == hashClient(other, true) || hashClient(one, false) != hashClient(other, false) {
		t.Error("the source port counts if and only if asked for")
	}
}

func TestRetriesGoToOthers(t *testing.T) {
	for _, scheduler := range []string{"", "rr", "random", "lc", "wlc", "sed", "nq", "sh", "fo"} {
		b := newBalancer(&clock{}, servicePort(plan.TCP, plan.Policy{Scheduler: scheduler, Fallback: true}, 1, 2, 3))
		var tried []*Endpoint
		seen := map[*Endpoint]bool{}
		for range 3 {
			e := b.Pick(client(1), plan.Cluster, tried)
			seen[e] = true
			tried = append(tried, e)
		}
		if len(seen) != 3 {
			t.Errorf("%q: 3 tries went to %d endpoints", scheduler, len(seen))
		}
		if again := b.Pick(client(1), plan.Cluster, tried); again == nil || again == tried[2] {
			t.Errorf("%q: after all of them, the last again", scheduler)
		}
	}
	b := newBalancer(&clock{}, servicePort(plan.TCP, plan.Policy{}, 1))
	only := b.Pick(client(1), plan.Cluster, nil)
	if b.Pick(client(1), plan.Cluster, []*Endpoint{only}) != only {
		t.Error("the only endpoint is not tried again")
	}
}

func TestAffinity(t *testing.T) {
	c := &clock{now: time.Unix(1000, 0)}
	sp := servicePort(plan.TCP, plan.Policy{}, 1, 1, 1)
	sp.Affinity = time.Minute
	b := newBalancer(c, sp)
	first := b.Pick(client(1), plan.Cluster, nil)
	for range 10 { // a new flow every 50 s renews the time
		c.now = c.now.Add(50 * time.Second)
		e := b.Pick(client(1), plan.Cluster, nil)
		if e != first {
			t.Fatal("the client moved within its time")
		}
		b.Connected(client(1).Addr(), e)
	}
	b.Connected(client(2).Addr(), first)
	c.now = c.now.Add(59 * time.Second)
	if e := b.Pick(client(2), plan.Cluster, nil); e != first {
		t.Error("a client moved although it was connected within its time")
	}
	// Another one answers: the client sticks to that.
	second := b.Pick(client(1), plan.Cluster, []*Endpoint{first})
	b.Failed(first)
	b.Connected(client(1).Addr(), second)
	if e := b.Pick(client(1), plan.Cluster, nil); e != second {
		t.Error("the client does not stick to the one that answered")
	}
	// It is kept over updates, as long as the endpoint takes new flows.
	b.Update(sp)
	if e := b.Pick(client(1), plan.Cluster, nil); e != second {
		t.Error("an update moved the client")
	}
	weights := []uint16{1, 1, 1}
	weights[second.Addr.Addr().As4()[3]-1] = 0
	none := servicePort(plan.TCP, plan.Policy{}, weights...)
	none.Affinity = time.Minute
	b.Update(none)
	if e := b.Pick(client(1), plan.Cluster, nil); e == second {
		t.Error("the client sticks to an endpoint of weight 0")
	}
	// The table is bounded.
	for i := range 1000 {
		b.Pick(client(i), plan.Cluster, nil)
	}
	if n := len(b.affinity.clients); n != 100 || b.affinity.order.Len() != n {
		t.Errorf("%d clients are remembered, want 100", n)
	}
	c.now = c.now.Add(time.Hour)
	b.Update(none)
	if n := len(b.affinity.clients); n != 0 {
		t.Errorf("%d clients are remembered an hour later", n)
	}
}

func TestAffinityEndsWithItsTime(t *testing.T) {
	c := &clock{now: time.Unix(1000, 0)}
	sp := servicePort(plan.TCP, plan.Policy{Scheduler: "rr"}, 1, 1)
	sp.Affinity = time.Minute
	b := newBalancer(c, sp)
	first := b.Pick(client(1), plan.Cluster, nil)
	c.now = c.now.Add(time.Minute)
	if b.Pick(client(1), plan.Cluster, nil) == first {
		t.Error("round robin came back to the same: the client stuck after its time")
	}
}

func TestEjection(t *testing.T) {
	c := &clock{now: time.Unix(1000, 0)}
	b := newBalancer(c, servicePort(plan.TCP, plan.Policy{Scheduler: "rr"}, 1, 1, 1))
	fail := func(i, times int) {
		t.Helper()
		for n := 0; n < times; {
			e := b.Pick(client(1), plan.Cluster, nil)
			if e.Addr == endpoint(i) {
				b.Failed(e)
				n++
			} else {
				b.Connected(client(1).Addr(), e)
				b.Release(e)
			}
		}
	}
	fail(1, 2)
	if got := share(b, 100, false); got[endpoint(1)] != 0 {
		t.Errorf("an endpoint that keeps failing gets %d of 100", got[endpoint(1)])
	}
	fail(2, 5)
	if got := share(b, 100, false); got[endpoint(2)] == 0 {
		t.Error("more than half of the endpoints are ejected")
	}
	c.now = c.now.Add(time.Minute)
	if got := share(b, 90, false); got[endpoint(1)] == 0 {
		t.Error("the endpoint is passed over after its time")
	}
	e := b.endpoints[endpoint(3)]
	tried := []*Endpoint{b.endpoints[endpoint(1)], b.endpoints[endpoint(2)]}
	e.passOver = c.now.Add(time.Hour)
	if b.Pick(client(1), plan.Cluster, tried) != e {
		t.Error("an ejected endpoint is not tried although none else is left")
	}
}

func TestRemovals(t *testing.T) {
	c := &clock{now: time.Unix(1000, 0)}
	b := newBalancer(c, servicePort(plan.UDP, plan.Policy{}, 1))
	e := b.Pick(client(1), plan.Cluster, nil)
	serving := servicePort(plan.UDP, plan.Policy{})
	serving.Serving = []netip.AddrPort{e.Addr}
	b.Update(serving)
	if e.Gone() {
		t.Error("the flow to an endpoint that serves is ended")
	}
	b.Update(servicePort(plan.UDP, plan.Policy{}))
	if !e.Gone() {
		t.Error("the flow to an endpoint that is gone goes on")
	}
	b.Update(servicePort(plan.UDP, plan.Policy{}, 1))
	if e.Gone() || b.Pick(client(1), plan.Cluster, nil) != e {
		t.Error("the endpoint is back, its count is not")
	}

	b = newBalancer(c, servicePort(plan.TCP, plan.Policy{}, 1))
	e = b.Pick(client(1), plan.Cluster, nil)
	limited := servicePort(plan.TCP, plan.Policy{VanishedTimeout: time.Minute})
	if d := b.Update(limited); d != time.Minute || e.Ends(c.now) {
		t.Errorf("connections end after %v, now: %t", d, e.Ends(c.now))
	}
	c.now = c.now.Add(30 * time.Second)
	if d := b.Update(limited); d != 0 {
		t.Errorf("the time began again: %v", d)
	}
	c.now = c.now.Add(30 * time.Second)
	if !e.Ends(c.now) {
		t.Error("connections go on after their time")
	}
	b.Release(e)
	b.Update(limited)
	if len(b.endpoints) != 0 {
		t.Errorf("%d endpoints are kept without a flow", len(b.endpoints))
	}
}

func TestParseScheduler(t *testing.T) {
	for _, name := range []string{"", "rr", "wrr", "lc", "wlc", "sh", "mh", "sed", "nq", "fo", "random"} {
		if _, ok := ParseScheduler(name); !ok {
			t.Errorf("%q is not known", name)
		}
	}
	for _, name := range []string{"RR", "lblc", "dh", "x"} {
		if s, ok := ParseScheduler(name); ok || s != WeightedRoundRobin {
			t.Errorf("%q: %v, %t", name, s, ok)
		}
	}
}
