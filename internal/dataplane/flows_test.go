package dataplane

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/conntrack"
)

// flow is a UDP flow from some client.
func flow(dst, from string) conntrack.Flow {
	client := netip.MustParseAddrPort("10.61.1.9:1000")
	return conntrack.Flow{Src: client, To: client, Dst: netip.MustParseAddrPort(dst), From: netip.MustParseAddrPort(from)}
}

// everyKind answers on an address of each kind.
func everyKind(endpoints ...byte) *plan.ServicePort {
	sp := service(udp("names"), 10, endpoints...)
	sp.Frontends = append(sp.Frontends,
		plan.Frontend{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("203.0.113.7"), Port: 53},
		plan.Frontend{Kind: plan.LoadBalancerIP, Addr: netip.MustParseAddr("203.0.113.40"), Port: 53},
		plan.Frontend{Kind: plan.NodePort, Port: 30514})
	return sp
}

var frontends = []string{"10.62.0.10:53", "203.0.113.7:53", "203.0.113.40:53", "192.0.2.11:30514"}

// foreign are flows that have nothing to do with the Service.
var foreign = []conntrack.Flow{
	flow("10.62.0.10:54", "10.61.2.1:5353"),    // another port of its address
	flow("10.62.0.11:53", "10.61.2.1:5353"),    // another Service
	flow("192.0.2.11:30515", "10.61.2.1:5353"), // another node port
	flow("192.0.2.12:30514", "10.61.2.1:5353"), // another node's
	flow("10.61.2.1:5353", "10.61.2.1:5353"),   // straight to the endpoint
	flow("198.51.100.7:53", "198.51.100.7:53"), // somewhere outside
}

func TestStaleFlows(t *testing.T) {
	const a, b, c = "10.61.2.1:5353", "10.61.2.2:5353", "10.61.2.3:5353"
	serving := everyKind(1, 2)
	draining := everyKind(2) // A takes no new flows and still serves
	draining.Serving = serving.Serving
	for name, tc := range map[string]struct {
		old, new *plan.ServicePort
		gone     []string // where the flows lead that go, on every frontend; "" for untranslated
		stay     []string
		idle     bool // the table is not even looked at
	}{
		"an endpoint goes":                   {old: everyKind(1, 2), new: everyKind(2), gone: []string{a}, stay: []string{b}},
		"the last endpoint goes (R-39)":      {old: everyKind(1), new: everyKind(), gone: []string{a, ""}},
		"an endpoint is replaced (R-40)":     {old: everyKind(1), new: everyKind(3), gone: []string{a}, stay: []string{c}},
		"the first endpoint appears (R-38)":  {old: everyKind(), new: everyKind(1), gone: []string{""}, stay: []string{a}},
		"the Service appears":                {new: everyKind(1), gone: []string{"", b}, stay: []string{a}},
		"the Service goes":                   {old: everyKind(1, 2), gone: []string{a, b, c}, stay: []string{""}},
		"an endpoint drains":                 {old: serving, new: draining, stay: []string{a, b}, idle: true},
		"an endpoint joins":                  {old: everyKind(1), new: everyKind(1, 2), stay: []string{a}, idle: true},
		"nothing that matters to UDP at all": {old: everyKind(1), new: func() *plan.ServicePort { sp := everyKind(1); sp.Affinity = time.Hour; return sp }(), stay: []string{a}, idle: true},
	} {
		t.Run(name, func(t *testing.T) {
			onBench(t, func(b *bench, _ *Config) {
				if tc.old != nil {
					b.world.set(tc.old)
				}
			}, func(b *bench) {
				b.pass(10 * time.Second)
				calls := b.flows.Calls()
				var want conntrack.Fake
				for _, dst := range frontends {
					for _, from := range tc.gone {
						if from == "" {
							from = dst
						}
						b.flows.Add(flow(dst, from))
					}
					for _, from := range tc.stay {
						if from == "" {
							from = dst
						}
						b.flows.Add(flow(dst, from))
						want.Add(flow(dst, from))
					}
				}
				b.flows.Add(foreign...)
				want.Add(foreign...)
				if tc.new == nil {
					b.world.remove(udp("names"))
				} else {
					b.world.set(tc.new)
				}
				b.pass(2 * time.Second)
				if b.flows.String() != want.String() {
					t.Errorf("left:\n%swant:\n%s", b.flows, &want)
				}
				if idle := b.flows.Calls() == calls; idle != tc.idle {
					t.Errorf("idle: %t, want %t", idle, tc.idle)
				}
				if have := b.rec.get("conntrack_reconciler_deleted_entries_total IPv4"); int(have) != len(tc.gone)*len(frontends) {
					t.Errorf("counted %v deletions", have)
				}
			})
		})
	}
}

// Only the flows of the frontend that went are forgotten, and only translated ones:
// the port may belong to a process of the node now.
func TestVanishedFrontend(t *testing.T) {
	moved := everyKind(1)
	moved.Frontends[3].Port = 30600
	onBench(t, func(b *bench, _ *Config) { b.world.set(everyKind(1)) }, func(b *bench) {
		b.pass(10 * time.Second)
		stay := []conntrack.Flow{flow("10.62.0.10:53", "10.61.2.1:5353"), flow("192.0.2.11:30514", "192.0.2.11:30514")}
		b.flows.Add(stay...)
		b.flows.Add(flow("192.0.2.11:30514", "10.61.2.1:5353"))
		b.world.set(moved)
		b.pass(2 * time.Second)
		if have := b.flows.Flows(); !slices.Equal(have, stay) {
			t.Errorf("left %v, want %v", have, stay)
		}
	})
}

// A frontend that moves from one Service to another in one update belongs to the
// new one.
func TestFrontendMovesToAnotherService(t *testing.T) {
	first, second := service(udp("a"), 10, 1), service(udp("b"), 10, 2)
	onBench(t, func(b *bench, _ *Config) { b.world.set(first) }, func(b *bench) {
		b.pass(10 * time.Second)
		stay := []conntrack.Flow{flow("10.62.0.10:53", "10.61.2.2:5353")}
		b.flows.Add(stay...)
		b.flows.Add(flow("10.62.0.10:53", "10.61.2.1:5353"))
		b.world.edit(func() {
			delete(b.world.want, first.ID)
			b.world.want[second.ID] = second
		})
		b.pass(2 * time.Second)
		if have := b.flows.Flows(); !slices.Equal(have, stay) {
			t.Errorf("left %v, want %v", have, stay)
		}
	})
}

// A restart deletes nothing if nothing changed, and what changed while no
// proxy ran is found.
func TestRestart(t *testing.T) {
	stay := append([]conntrack.Flow{flow("10.62.0.10:53", "10.61.2.1:5353"), flow("192.0.2.11:30514", "10.61.2.2:5353")}, foreign...)
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(everyKind(1, 2))
		b.world.first = []plan.ID{udp("names")}
		b.flows.Add(stay...)
		b.flows.Add(flow("203.0.113.40:53", "10.61.2.3:5353"))
	}, func(b *bench) {
		b.pass(time.Second)
		if have := b.flows.Flows(); !slices.Equal(have, stay) {
			t.Errorf("left %v, want %v", have, stay)
		}
		if have := b.flows.Calls(); have != 1 {
			t.Errorf("the table was walked %d times", have)
		}
	})
}

// Flows are looked at after the rules are in place, also if those took a while
// and what failed is not forgotten.
func TestFlowsComeAfterTheRules(t *testing.T) {
	var broken, tableBroken atomic.Bool
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(everyKind(1, 2))
		b.kernel.fail = func(int, plan.Update) error {
			if broken.Load() {
				return errors.New("no memory")
			}
			return nil
		}
		b.flows.Fail = func(int) error {
			if tableBroken.Load() {
				return errors.New("no buffer space")
			}
			return nil
		}
	}, func(b *bench) {
		b.pass(10 * time.Second)
		b.flows.Add(flow("10.62.0.10:53", "10.61.2.1:5353"))
		broken.Store(true)
		tableBroken.Store(true)
		calls := b.flows.Calls()
		b.world.set(everyKind(2))
		b.pass(20 * time.Second)
		if b.flows.Calls() != calls {
			t.Error("the table was looked at before the rules were in place")
		}
		broken.Store(false)
		b.pass(30 * time.Second)
		if s := b.Status().Flows; !s.Pending || s.LastError != "no buffer space" {
			t.Errorf("status %+v", s)
		}
		b.world.set(service(udp("other"), 30, 1)) // meanwhile others change
		b.pass(2 * time.Second)
		if len(b.flows.Flows()) != 1 {
			t.Fatal("the flow is gone although the table is broken")
		}
		tableBroken.Store(false)
		b.pass(2 * time.Minute)
		if have := b.flows.Flows(); len(have) != 0 {
			t.Errorf("left %v", have)
		}
		if s := b.Status().Flows; s.Pending || s.LastError != "" || s.Deleted != 1 {
			t.Errorf("status %+v", s)
		}
	})
}

// A version that served while the table could not be cleaned is not forgotten.
func TestIntermediateFrontendIsCleaned(t *testing.T) {
	var tableBroken atomic.Bool
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(udp("names"), 10, 1))
		b.flows.Fail = func(int) error {
			if tableBroken.Load() {
				return errors.New("no buffer space")
			}
			return nil
		}
	}, func(b *bench) {
		b.pass(10 * time.Second)
		tableBroken.Store(true)
		b.world.set(service(udp("names"), 11, 2))
		b.pass(2 * time.Second)
		b.flows.Add(flow("10.62.0.11:53", "10.61.2.2:5353"), flow("10.62.0.10:53", "10.61.2.1:5353"))
		b.world.remove(udp("names"))
		b.pass(2 * time.Second)
		tableBroken.Store(false)
		b.pass(2 * time.Minute)
		if have := b.flows.Flows(); len(have) != 0 {
			t.Errorf("left %v", have)
		}
	})
}

// What changes during a clean-up that fails does not replace what it left undone.
func TestChangeDuringAFailedCleanUp(t *testing.T) {
	var fail chan struct{}
	onBench(t, func(b *bench, _ *Config) {
		fail = make(chan struct{})
		b.world.set(service(udp("names"), 10, 1))
		b.flows.Fail = func(n int) error {
			if n == 2 {
				<-fail
				return errors.New("no buffer space")
			}
			return nil
		}
	}, func(b *bench) {
		b.pass(10 * time.Second)
		b.flows.Add(flow("10.62.0.10:53", "10.61.2.1:5353"), flow("10.62.0.11:53", "10.61.2.1:5353"))
		b.world.set(service(udp("names"), 11, 1))
		b.pass(2 * time.Second)
		b.world.set(service(udp("names"), 12, 1))
		b.pass(2 * time.Second)
		close(fail)
		b.pass(10 * time.Second)
		if have := b.flows.Flows(); len(have) != 0 {
			t.Errorf("left %v", have)
		}
	})
}

// New addresses of the node accept node ports, so flows to them are looked at.
func TestNodeAddressAppears(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.world.set(everyKind(1)) }, func(b *bench) {
		b.pass(10 * time.Second)
		b.flows.Add(flow("192.0.2.99:30514", "192.0.2.99:30514"))
		b.world.edit(func() {
			b.world.node = &plan.Node{Name: "alder", NodePorts: map[plan.Family]plan.NodePorts{
				plan.IPv4: {All: true, Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("192.0.2.99")}},
			}}
		})
		b.pass(2 * time.Second)
		if have := b.flows.Flows(); len(have) != 0 {
			t.Errorf("left %v", have)
		}
	})
}

// blockingTable takes its time.
type blockingTable struct {
	free chan struct{}
	done int
}

func (t *blockingTable) DeleteUDP(ctx context.Context, _ []netip.AddrPort, _ func(to, from netip.AddrPort) bool) (int, error) {
	select {
	case <-t.free:
		t.done++
		return 0, nil
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// The next sync does not wait for the clean-up.
func TestCleanUpIsOffThePath(t *testing.T) {
	table := &blockingTable{}
	onBench(t, func(b *bench, c *Config) {
		table.free = make(chan struct{})
		c.Flows = table
		b.world.set(service(udp("names"), 10, 1, 2))
	}, func(b *bench) {
		b.world.set(service(udp("names"), 10, 2))
		b.world.set(service(tcp("web"), 20, 1))
		b.pass(2 * time.Second)
		b.wantLines("names 1", "web 1")
		if table.done != 0 {
			t.Error("the clean-up did not block")
		}
		close(table.free)
		b.pass(time.Second)
		if table.done == 0 {
			t.Error("no clean-up")
		}
	})
}

// Flows that began while rules were missing lead nowhere for as long as their clients go
// on. Once the rules are back they are forgotten, so that the next packet is translated;
// what was translated or answered stays, and what is nobody's Service.
func TestFlowsOfAGap(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) { b.world.set(everyKind(1, 2), service(tcp("web"), 30, 1)) }, func(b *bench) {
		b.pass(10 * time.Second)
		at := netip.MustParseAddrPort
		vip, endpoint := at("10.62.0.30:53"), at("10.61.2.1:5353")
		stay := []conntrack.Flow{
			flow("10.62.0.10:53", "10.61.2.1:5353"),
			{TCP: true, Src: at("10.61.1.9:40001"), Dst: vip, From: endpoint, To: at("10.61.1.9:40001")},
			{TCP: true, Src: at("10.61.1.9:40002"), Dst: vip, From: vip, To: at("10.61.1.9:40002"), Answered: true},
			{TCP: true, Src: at("10.61.1.9:40003"), Dst: at("192.0.2.80:80"), From: at("192.0.2.80:80"), To: at("10.61.1.9:40003")},
		}
		b.flows.Add(stay...)
		b.flows.Add(flow("10.62.0.10:53", "10.62.0.10:53"),
			conntrack.Flow{TCP: true, Src: at("10.61.1.9:40004"), Dst: vip, From: vip, To: at("10.61.1.9:40004")})
		b.Disturbed("the table is gone")
		b.pass(2 * time.Second)
		if have := b.flows.Flows(); !slices.Equal(have, stay) {
			t.Errorf("left %v, want %v", have, stay)
		}
	})
}
