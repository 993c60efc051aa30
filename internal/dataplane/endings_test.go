package dataplane

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/conntrack"
)

func (t *blockingTable) DeleteTCP(context.Context, []netip.AddrPort, func(to, from netip.AddrPort, answered bool) bool, func(netip.AddrPort) netip.AddrPort) (int, error) {
	return 0, nil
}

// web is a TCP Service port at 10.62.0.20:53 and node port 30514, with a timeout for
// vanished endpoints and a health check.
func web(timeout time.Duration, endpoints ...byte) *plan.ServicePort {
	sp := service(tcp("web"), 20, endpoints...)
	sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Port: 30514})
	sp.Policy = &plan.Policy{VanishedTimeout: timeout, Check: plan.HealthCheck{Method: plan.CheckTCP}}
	return sp
}

// tcpFlows are flows to web: for each endpoint and frontend one that was answered
// and one that was not, and some of others.
func tcpFlows() []conntrack.Flow {
	var out []conntrack.Flow
	for _, from := range []string{"10.61.2.1:5353", "10.61.2.2:5353"} {
		for _, to := range []string{"10.62.0.20:53", "192.0.2.11:30514", "10.62.0.21:53", from} {
			for _, answered := range []bool{true, false} {
				f := flow(to, from)
				f.TCP, f.Answered = true, answered
				out = append(out, f)
			}
		}
	}
	return append(out, flow("10.62.0.20:53", "10.61.2.1:5353")) // UDP
}

// left are the flows without those to web from endpoint 1: all, or the unanswered.
func left(unanswered bool) string {
	var out conntrack.Fake
	for _, f := range tcpFlows() {
		toWeb := f.Dst == netip.MustParseAddrPort("10.62.0.20:53") || f.Dst == netip.MustParseAddrPort("192.0.2.11:30514")
		if f.TCP && toWeb && f.From == netip.MustParseAddrPort("10.61.2.1:5353") && (!unanswered || !f.Answered) {
			continue
		}
		out.Add(f)
	}
	return out.String()
}

func TestVanished(t *testing.T) {
	all := func() string {
		var f conntrack.Fake
		f.Add(tcpFlows()...)
		return f.String()
	}()
	alone := func(sp *plan.ServicePort) *plan.ServicePort { sp.Policy.Check = plan.HealthCheck{}; return sp }
	limited := func(sp *plan.ServicePort) *plan.ServicePort {
		c, p := *sp, *sp.Policy
		p.DrainTimeout = 10 * time.Second
		c.Policy = &p
		return &c
	}
	draining := alone(web(10*time.Second, 2))
	draining.Draining = []netip.AddrPort{netip.MustParseAddrPort("10.61.2.1:5353")}
	unready := alone(web(10*time.Second, 2))
	unready.Serving = []netip.AddrPort{netip.MustParseAddrPort("10.61.2.1:5353"), netip.MustParseAddrPort("10.61.2.2:5353")}
	for name, c := range map[string]struct {
		steps []*plan.ServicePort // 3 s apart; nil removes the Service
		early string              // what is left 9 s after the second step
		late  string              // and 3 s later
	}{
		"vanishes":             {[]*plan.ServicePort{alone(web(10*time.Second, 2))}, all, left(false)},
		"vanishes with others": {[]*plan.ServicePort{alone(web(10*time.Second, 2)), alone(web(10*time.Second, 2, 3))}, all, left(false)},
		"comes back":           {[]*plan.ServicePort{alone(web(10*time.Second, 2)), alone(web(10*time.Second, 1, 2))}, all, all},
		"comes back unready":   {[]*plan.ServicePort{alone(web(10*time.Second, 2)), unready}, all, all},
		"is not ready":         {[]*plan.ServicePort{unready}, all, all},
		"terminates, then goes": {
			[]*plan.ServicePort{draining, alone(web(10*time.Second, 2))}, all, all,
		},
		"terminates for too long":   {[]*plan.ServicePort{limited(draining)}, all, left(false)},
		"terminates and goes":       {[]*plan.ServicePort{limited(draining), limited(alone(web(0, 2)))}, all, left(false)},
		"terminates and returns":    {[]*plan.ServicePort{limited(draining), limited(alone(web(0, 1, 2)))}, all, all},
		"vanishes, drain timeout":   {[]*plan.ServicePort{limited(alone(web(0, 2)))}, all, left(false)},
		"vanishes, the shorter":     {[]*plan.ServicePort{limited(alone(web(time.Hour, 2)))}, all, left(false)},
		"the Service asks no more":  {[]*plan.ServicePort{alone(web(10*time.Second, 2)), alone(web(0, 2))}, all, all},
		"the Service asks too late": {[]*plan.ServicePort{alone(web(0, 2)), alone(web(10*time.Second, 2))}, all, all},
		"the Service goes":          {[]*plan.ServicePort{alone(web(10*time.Second, 2)), nil}, all, all},
	} {
		t.Run(name, func(t *testing.T) {
			onBench(t, func(b *bench, _ *Config) { b.world.set(alone(web(10*time.Second, 1, 2))) }, func(b *bench) {
				b.pass(time.Minute)
				b.flows.Add(tcpFlows()...)
				for i, sp := range c.steps {
					if i > 0 {
						b.pass(3 * time.Second)
					}
					if sp == nil {
						b.world.remove(tcp("web"))
					} else {
						b.world.set(sp)
					}
				}
				b.pass(9*time.Second - 3*time.Second*time.Duration(len(c.steps)-1))
				if have := b.flows.String(); have != c.early {
					t.Errorf("after 9 s:\n%swant:\n%s", have, c.early)
				}
				b.pass(3 * time.Second)
				if have := b.flows.String(); have != c.late {
					t.Errorf("after 12 s:\n%swant:\n%s", have, c.late)
				}
				b.pass(time.Minute)
				if s := b.Status().Flows; s.Ending != 0 || (s.Ended > 0) != (c.late != all) {
					t.Errorf("status %+v", s)
				}
			})
		})
	}
}

// An endpoint that fails its health check loses the flows that it has not answered,
// at once, and keeps the others.
func TestUnanswered(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.world.set(web(0, 1, 2)) }, func(b *bench) {
		b.pass(time.Minute)
		b.flows.Add(tcpFlows()...)
		failing := web(0, 1, 2)
		failing.Pools[plan.Cluster][0].Weight = 0
		b.world.set(failing)
		b.pass(time.Second)
		if have := b.flows.String(); have != left(true) {
			t.Errorf("left:\n%swant:\n%s", have, left(true))
		}
		calls := b.flows.Calls()
		b.world.set(web(0, 1, 2))
		b.pass(time.Minute)
		if have := b.flows.Calls(); have != calls {
			t.Errorf("an endpoint that is back costs %d looks at the flows", have-calls)
		}
	})
}

// Without annotations TCP flows are not even looked at.
func TestPlainTCPIsLeftAlone(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.world.set(service(tcp("web"), 20, 1, 2)) }, func(b *bench) {
		b.pass(time.Minute)
		calls := b.flows.Calls()
		b.world.set(service(tcp("web"), 20, 2))
		b.pass(time.Minute)
		b.world.remove(tcp("web"))
		b.pass(time.Minute)
		if have := b.flows.Calls(); have != calls {
			t.Errorf("%d looks at the flows", have-calls)
		}
	})
}

// What could not be ended is tried again, not at once.
func TestEndingFails(t *testing.T) {
	var mended atomic.Bool
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(web(10*time.Second, 1, 2))
		b.flows.Fail = func(int) error {
			if !mended.Load() {
				return errors.New("no buffer space")
			}
			return nil
		}
	}, func(b *bench) {
		b.pass(time.Minute)
		b.flows.Add(tcpFlows()...)
		b.world.set(web(10*time.Second, 2))
		b.pass(20 * time.Second)
		if s := b.Status().Flows; s.Ending != 2 || s.LastError == "" || s.Ended != 0 {
			t.Errorf("status %+v", s)
		}
		if n := b.flows.Calls(); n > 30 {
			t.Errorf("%d attempts in 20 s", n)
		}
		mended.Store(true)
		b.pass(2 * time.Minute)
		if have := b.flows.String(); have != left(false) {
			t.Errorf("left:\n%swant:\n%s", have, left(false))
		}
		if s := b.Status().Flows; s.Ending != 0 || s.LastError != "" {
			t.Errorf("status %+v", s)
		}
	})
}
