package ipvs

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/ipvs/remark"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipset"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// compareEvery is after how many steps the state is compared: that costs most.
const compareEvery = 5

// Whatever way a plan is reached, with restarts, failing calls and others' changes on
// it, the kernel is as after a fresh start.
func TestEndStateDoesNotDependOnThePath(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 2))
			families := plan.Families[:]
			r := newRig()
			b := r.backend(Options{}, families...)
			var last, applied *plan.Plan
			for step := range 80 {
				last = plantest.RandomPlan(rng, last, families...)
				switch rng.IntN(8) {
				case 0: // a restart
					b, applied = r.backend(Options{}, families...), nil
				case 1:
					b.Invalidate()
				case 2, 3:
					r.meddle(t, rng, b)
					b.Invalidate()
				case 4:
					r.fail(rng)
					_ = b.Apply(context.Background(), plantest.Difference(applied, last))
					r.heal()
				}
				mustApply(t, b, plantest.Difference(applied, last))
				applied = last
				if step%compareEvery != 0 {
					continue
				}
				r.settle(t, b, last)
				fresh := newRig()
				mustApply(t, fresh.backend(Options{}, families...), plan.Update{Plan: last})
				if have, want := r.state(t), fresh.state(t); have != want {
					t.Fatalf("step %d: %s", step, plantest.FirstDifference(have, want))
				}
			}
		})
	}
}

// meddle changes the kernel as another program would.
func (r *rig) meddle(t *testing.T, rng *rand.Rand, b *backend) {
	t.Helper()
	f := b.families[rng.IntN(len(b.families))]
	held := table.Of(f.fam)
	switch exists, _ := r.tables.Exists(context.Background(), held); rng.IntN(6) {
	case 0:
		if exists {
			_ = r.tables.Commit(context.Background(), []nft.Op{{Kind: nft.DeleteTable, Table: held}})
		}
	case 1:
		if exists {
			_ = r.tables.Commit(context.Background(), []nft.Op{
				{Kind: nft.FlushSet, Table: held, Name: table.Services.Name()}, {Kind: nft.FlushChain, Table: held, Name: table.ChainServices}})
		}
	case 2:
		_ = r.device.Delete()
	case 3:
		for _, e := range f.routes() {
			_ = r.routing.Delete(context.Background(), e)
		}
	case 4:
		all, _ := r.servers.Dump(context.Background())
		for _, e := range all {
			if rng.IntN(3) == 0 {
				_ = r.servers.DeleteServer(e.Key)
			}
		}
	case 5:
		all, _ := r.servers.Dump(context.Background())
		for _, e := range all {
			for _, s := range e.Real {
				s.Weight = uint32(rng.IntN(3))
				_ = r.servers.UpdateReal(e.Key, s.RealServer)
			}
			e.Scheduler = "lc"
			_ = r.servers.UpdateServer(e.VirtualServer)
		}
	}
}

// fail makes some of the next calls fail; heal none.
func (r *rig) fail(rng *rand.Rand) {
	left := rng.IntN(12)
	lost := func() error {
		if left--; left < 0 {
			return unix.ENOBUFS
		}
		return nil
	}
	r.servers.Fail = func(int, ipvs.Op) error { return lost() }
	r.tables.Refuse = func([]nft.Op) error {
		if err := lost(); err != nil {
			return &nft.Error{Err: err}
		}
		return nil
	}
	r.device.Fail = func(int, string) error { return lost() }
}

func (r *rig) heal() { r.servers.Fail, r.tables.Refuse, r.device.Fail = nil, nil, nil }

// webPlan is a plan with one Service of some endpoints.
func webPlan(edit func(*plan.ServicePort), endpoints ...int) *plan.Plan {
	w := plantest.NewWorld(plan.IPv4)
	sp := &plan.ServicePort{
		ID: plan.ID{Namespace: "default", Name: "web", Port: "http", Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: w.At("service", 20), Port: 80, Route: [3]plan.Route{{}, {SNAT: true}, {SNAT: true}}},
		},
	}
	for _, n := range endpoints {
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: netip.AddrPortFrom(w.At("pod", n), 8080), OnNode: true, Weight: 1})
	}
	if edit != nil {
		edit(sp)
	}
	return &plan.Plan{Services: map[plan.ID]*plan.ServicePort{sp.ID: sp}, Node: &plan.Node{
		Name: "alder", Addrs: w.Node, NodePorts: map[plan.Family]plan.NodePorts{plan.IPv4: {Addrs: w.Node[:1]}},
		Local:        map[plan.Family]plan.LocalTraffic{plan.IPv4: {Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{w.Pods}}},
		ServiceCIDRs: []netip.Prefix{w.Services},
	}}
}

func emptyPlan(p *plan.Plan) *plan.Plan { return &plan.Plan{Node: p.Node} }

var (
	webKey = ipvs.ByAddr(ipvs.TCP, netip.MustParseAddrPort("10.62.0.20:80"))
	podA   = netip.MustParseAddrPort("10.61.1.1:8080")
	podB   = netip.MustParseAddrPort("10.61.1.2:8080")
)

// changes are the operations since the last call that change virtual servers.
func (r *rig) changes() []string {
	var out []string
	for _, op := range r.servers.Ops() {
		if strings.HasPrefix(op.Name, "create") || strings.HasPrefix(op.Name, "update") || strings.HasPrefix(op.Name, "delete") {
			out = append(out, op.String())
		}
	}
	return out
}

func wantChanges(t *testing.T, r *rig, want ...string) {
	t.Helper()
	if have := r.changes(); !slices.Equal(have, want) {
		t.Errorf("operations:\nhave %s\nwant %s", strings.Join(have, "\n     "), strings.Join(want, "\n     "))
	}
}

func TestRestartWritesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	p := plantest.RandomPlan(rng, nil, plan.Families[:]...)
	for range 40 {
		p = plantest.RandomPlan(rng, p, plan.Families[:]...)
	}
	r := newRig()
	mustApply(t, r.backend(Options{}, plan.Families[:]...), plan.Update{Plan: p})
	commits := r.tables.Commits()
	r.changes()
	r.device.Ops()
	again := r.backend(Options{}, plan.Families[:]...)
	mustApply(t, again, plan.Update{Plan: p, Partial: true})
	mustApply(t, again, plan.Update{Plan: p})
	mustApply(t, again, plan.Update{Plan: p})
	again.Invalidate()
	mustApply(t, again, plan.Update{Plan: p})
	if n := r.tables.Commits() - commits; n != 0 {
		t.Errorf("a restart with the state intact commits %d times", n)
	}
	wantChanges(t, r)
	for _, op := range r.device.Ops() {
		if strings.HasPrefix(op, "add") || strings.HasPrefix(op, "remove") {
			t.Errorf("a restart with the state intact does: %s", op)
		}
	}
}

// The virtual servers are listed at the start, after interference and after an error,
// once for both families, and for no change in between.
func TestListings(t *testing.T) {
	r := newRig()
	b := r.backend(Options{}, plan.Families[:]...)
	mustList := func(when string, want int) {
		t.Helper()
		have := 0
		for _, op := range r.servers.Ops() {
			if op.Name == "dump" || op.Name == "list" {
				have++
			}
		}
		if have != want {
			t.Errorf("%s: listed %d times, want %d", when, have, want)
		}
	}
	rng := rand.New(rand.NewPCG(8, 8))
	p := plantest.RandomPlan(rng, nil, plan.Families[:]...)
	mustApply(t, b, plan.Update{Plan: p})
	mustList("at the start", 1)
	for range 10 {
		next := plantest.RandomPlan(rng, p, plan.Families[:]...)
		mustApply(t, b, plantest.Difference(p, next))
		p = next
	}
	mustList("for changes", 0)
	b.Invalidate()
	mustApply(t, b, plan.Update{Plan: p})
	mustList("after interference", 1)
	r.tables.Refuse = func([]nft.Op) error { return &nft.Error{Err: errors.New("refused")} }
	next := plantest.RandomPlan(rng, p, plan.Families[:]...)
	if err := b.Apply(t.Context(), plantest.Difference(p, next)); err == nil {
		t.Fatal("Apply succeeds")
	}
	r.tables.Refuse = nil
	r.servers.Ops()
	mustApply(t, b, plan.Update{Plan: next})
	mustList("after an error", 1)
}

// what a real server should be is reconciled, not only that it is there.
func TestWeightIsRaisedAfterRestart(t *testing.T) {
	r := newRig()
	p := webPlan(nil, 1)
	b := r.backend(Options{}, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: p})
	r.servers.SetLive(webKey, podA, 1, 0, 0)
	none := webPlan(nil)
	mustApply(t, b, plantest.Difference(p, none))
	wantWeight(t, r, podA, 0)
	again := r.backend(Options{}, plan.IPv4)
	mustApply(t, again, plan.Update{Plan: p})
	wantWeight(t, r, podA, 1)
	if at := again.Due(); !at.IsZero() {
		t.Errorf("it drains until %s still", at)
	}
}

func wantWeight(t *testing.T, r *rig, addr netip.AddrPort, want int) {
	t.Helper()
	list, err := r.servers.RealServers(webKey)
	if err != nil && !errors.Is(err, ipvs.ErrNoServer) {
		t.Fatal(err)
	}
	have := -1
	for _, l := range list {
		if l.Addr == addr {
			have = int(l.Weight)
		}
	}
	if have != want {
		t.Errorf("weight of %s: have %d, want %d (-1: it is not there)\n%s", addr, have, want, r.servers)
	}
}

// an endpoint that goes takes no new flows from the same Apply on, and its real
// server goes when it is idle or at the deadline.
func TestEndpointDrains(t *testing.T) {
	for _, idle := range []bool{true, false} {
		r := newRig()
		b := r.backend(Options{DrainTimeout: time.Minute}, plan.IPv4)
		two, one := webPlan(nil, 1, 2), webPlan(nil, 2)
		mustApply(t, b, plan.Update{Plan: two})
		r.servers.SetLive(webKey, podA, 3, 0, 0)
		r.changes()
		mustApply(t, b, plantest.Difference(two, one))
		wantChanges(t, r, "update real server TCP 10.62.0.20:80 > 10.61.1.1:8080")
		wantWeight(t, r, podA, 0)
		start := r.clock
		for at := b.Due(); at.Before(start.Add(time.Minute)); at = b.Due() {
			r.clock = at
			mustApply(t, b, plan.Update{Plan: one})
		}
		wantWeight(t, r, podA, 0)
		wantChanges(t, r)
		if idle {
			r.servers.SetLive(webKey, podA, 0, 0, 7)
		} else {
			r.clock = start.Add(time.Minute)
		}
		for range 2 {
			if at := b.Due(); at.After(r.clock) {
				r.clock = at
			}
			mustApply(t, b, plan.Update{Plan: one})
		}
		wantWeight(t, r, podA, -1)
		if at := b.Due(); !at.IsZero() {
			t.Errorf("idle %t: something is due at %s", idle, at)
		}
	}
}

// What was gone already when the process started drains for as long as its Service
// says.
func TestDrainAfterRestart(t *testing.T) {
	r := newRig()
	policy := func(sp *plan.ServicePort) { sp.Policy = &plan.Policy{DrainTimeout: 7 * time.Second} }
	two, one := webPlan(policy, 1, 2), webPlan(policy, 2)
	mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: two})
	r.servers.SetLive(webKey, podA, 1, 0, 0)
	b := r.backend(Options{}, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: one})
	wantWeight(t, r, podA, 0)
	r.clock = r.clock.Add(7 * time.Second)
	mustApply(t, b, plan.Update{Plan: one})
	wantWeight(t, r, podA, -1)
}

// Reading the kernel back gives nobody more time.
func TestDeadlinesOutliveInvalidate(t *testing.T) {
	r := newRig()
	b := r.backend(Options{DrainTimeout: time.Minute}, plan.IPv4)
	two, one := webPlan(nil, 1, 2), webPlan(nil, 2)
	mustApply(t, b, plan.Update{Plan: two})
	r.servers.SetLive(webKey, podA, 1, 0, 0)
	mustApply(t, b, plantest.Difference(two, one))
	for range 6 {
		wantWeight(t, r, podA, 0)
		r.clock = r.clock.Add(10 * time.Second)
		b.Invalidate()
		mustApply(t, b, plan.Update{Plan: one})
	}
	r.clock = r.clock.Add(time.Second)
	mustApply(t, b, plan.Update{Plan: one})
	wantWeight(t, r, podA, -1)

	// One that came back and goes again has all of it.
	mustApply(t, b, plantest.Difference(one, two))
	r.servers.SetLive(webKey, podA, 1, 0, 0)
	mustApply(t, b, plantest.Difference(two, one))
	b.Invalidate()
	mustApply(t, b, plantest.Difference(one, two))
	r.clock = r.clock.Add(time.Hour)
	mustApply(t, b, plantest.Difference(two, one))
	r.clock = r.clock.Add(30 * time.Second)
	mustApply(t, b, plan.Update{Plan: one})
	wantWeight(t, r, podA, 0)
}

// A Service whose affinity is shorter than the kernel can keep it is told so, once.
func TestShortAffinity(t *testing.T) {
	r := newRig()
	b := r.backend(Options{}, plan.IPv4)
	short := webPlan(func(sp *plan.ServicePort) { sp.Affinity = 10 * time.Second }, 1)
	mustApply(t, b, plan.Update{Plan: short})
	b.Invalidate()
	mustApply(t, b, plan.Update{Plan: short})
	notes := b.Remarks()
	if len(notes) != 1 || !notes[0].Warning || notes[0].Reason != remark.Affinity || !strings.Contains(notes[0].Message, "120 s") {
		t.Errorf("notes: %+v", notes)
	}
	if have := r.servers.String(); !strings.HasPrefix(have, "TCP 10.62.0.20:80 rr persistent 10\n") {
		t.Errorf("have\n%s", have)
	}
}

func TestEndpointThatReturnsIsRaised(t *testing.T) {
	r := newRig()
	b := r.backend(Options{}, plan.IPv4)
	two, one := webPlan(nil, 1, 2), webPlan(nil, 2)
	mustApply(t, b, plan.Update{Plan: two})
	r.servers.SetLive(webKey, podA, 3, 0, 0)
	mustApply(t, b, plantest.Difference(two, one))
	r.changes()
	mustApply(t, b, plantest.Difference(one, two))
	wantChanges(t, r, "update real server TCP 10.62.0.20:80 > 10.61.1.1:8080")
	wantWeight(t, r, podA, 1)
	if at := b.Due(); !at.IsZero() {
		t.Errorf("it drains until %s still", at)
	}
}

// flows of a Service that is gone go on, and its address stays for them.
func TestServiceDrains(t *testing.T) {
	r := newRig()
	b := r.backend(Options{DrainTimeout: time.Minute}, plan.IPv4)
	p := webPlan(nil, 1, 2)
	mustApply(t, b, plan.Update{Plan: p})
	r.servers.SetLive(webKey, podA, 1, 0, 0)
	r.servers.SetLive(webKey, podB, 1, 0, 0)
	mustApply(t, b, plantest.Difference(p, emptyPlan(p)))
	wantWeight(t, r, podA, 0)
	wantWeight(t, r, podB, 0)
	for _, restart := range []bool{false, true} {
		if restart {
			b = r.backend(Options{DrainTimeout: time.Minute}, plan.IPv4)
			mustApply(t, b, plan.Update{Plan: emptyPlan(p)})
		}
		if addrs, _ := r.device.Addrs(); len(addrs) != 1 {
			t.Errorf("restart %t: addresses %v, want the Service's", restart, addrs)
		}
		if !strings.Contains(r.tables.String(), "10.62.0.20 . tcp . 80") {
			t.Errorf("restart %t: the virtual server is not recorded any more\n%s", restart, r.tables)
		}
	}
	r.settle(t, b, emptyPlan(p))
	if have := r.servers.String(); have != "" {
		t.Errorf("left:\n%s", have)
	}
	if addrs, _ := r.device.Addrs(); len(addrs) != 0 {
		t.Errorf("left: %v", addrs)
	}
}

// without connections there is nothing to wait for.
func TestUDPGoesAtOnce(t *testing.T) {
	r := newRig()
	b := r.backend(Options{}, plan.IPv4)
	udp := func(sp *plan.ServicePort) { sp.ID.Protocol = plan.UDP }
	two, one := webPlan(udp, 1, 2), webPlan(udp, 2)
	mustApply(t, b, plan.Update{Plan: two})
	r.changes()
	mustApply(t, b, plantest.Difference(two, one))
	wantChanges(t, r, "delete real server UDP 10.62.0.20:80 > 10.61.1.1:8080")
	mustApply(t, b, plantest.Difference(one, emptyPlan(one)))
	wantChanges(t, r, "delete server UDP 10.62.0.20:80")
}

// flows to an endpoint that vanished are ended after a time of their own.
func TestVanishedEndpoint(t *testing.T) {
	for _, terminating := range []bool{true, false} {
		r := newRig()
		b := r.backend(Options{DrainTimeout: time.Hour}, plan.IPv4)
		policy := func(sp *plan.ServicePort) { sp.Policy = &plan.Policy{VanishedTimeout: 10 * time.Second} }
		two := webPlan(policy, 1, 2)
		one := webPlan(func(sp *plan.ServicePort) {
			policy(sp)
			if terminating {
				sp.Draining = []netip.AddrPort{podA}
			}
		}, 2)
		mustApply(t, b, plan.Update{Plan: two})
		r.servers.SetLive(webKey, podA, 1, 0, 0)
		mustApply(t, b, plantest.Difference(two, one))
		r.clock = r.clock.Add(11 * time.Second)
		mustApply(t, b, plan.Update{Plan: one})
		want := -1
		if terminating {
			want = 0
		}
		wantWeight(t, r, podA, want)
	}
}

// what others made stays, with or without a list of ranges.
func TestForeignVirtualServers(t *testing.T) {
	admin := ipvs.VirtualServer{Key: ipvs.ByAddr(ipvs.TCP, netip.MustParseAddrPort("192.0.2.100:6443")), Scheduler: "wrr", ClientBits: 32}
	byMark := ipvs.VirtualServer{Key: ipvs.ByMark(ipvs.IPv4, 7), Scheduler: "sh", ClientBits: 32}
	for _, o := range []Options{{}, {Exclude: []netip.Prefix{netip.MustParsePrefix("192.0.2.100/32")}}} {
		r := newRig()
		for _, v := range []ipvs.VirtualServer{admin, byMark} {
			if err := errors.Join(r.servers.CreateServer(v), r.servers.CreateReal(v.Key, ipvs.RealServer{Addr: podB, Weight: 3})); err != nil {
				t.Fatal(err)
			}
		}
		before := r.servers.String()
		rng := rand.New(rand.NewPCG(1, 1))
		var p *plan.Plan
		for range 3 {
			b := r.backend(o, plan.IPv4)
			var last *plan.Plan
			for range 20 {
				p = plantest.RandomPlan(rng, p, plan.IPv4)
				mustApply(t, b, plantest.Difference(last, p))
				last = p
			}
		}
		b := r.backend(o, plan.IPv4)
		mustApply(t, b, plan.Update{Plan: emptyPlan(p)})
		r.settle(t, b, emptyPlan(p))
		if have := r.servers.String(); have != before {
			t.Errorf("exclude %v: have\n%s\nwant\n%s", o.Exclude, have, before)
		}
		if err := cleanup(context.Background(), testEnv(plan.IPv4), o, r.kernel()); err != nil {
			t.Fatal(err)
		}
		if have := r.servers.String(); have != before {
			t.Errorf("exclude %v, cleaned up: have\n%s\nwant\n%s", o.Exclude, have, before)
		}
	}
}

// When a kube-proxy in this mode is back, the virtual servers and the device are its own;
// what it has not goes.
func TestCleanupOwnLeavesWhatKubeProxyHas(t *testing.T) {
	r := newRig()
	mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: webPlan(nil, 1, 2)})
	servers, device := r.servers.String(), r.device.String()
	own := Mode(Options{}).CleanupOwn
	if own == nil {
		t.Fatal("the mode has no objects of svcproxy alone")
	}
	err := cleanupOwn(t.Context(), testEnv(plan.IPv4), Options{}, r.kernel(), func(k ipvs.Key) bool { return k.Mark == 0 })
	if err != nil {
		t.Fatal(err)
	}
	if have := r.servers.String(); have != servers || !strings.Contains(have, "10.62.0.20:80") {
		t.Errorf("virtual servers: have\n%s\nwant\n%s", have, servers)
	}
	if have := r.device.String(); have != device {
		t.Errorf("the device: have %s, want %s", have, device)
	}
	if exists, err := r.tables.Exists(t.Context(), table.Of(plan.IPv4)); exists || err != nil {
		t.Errorf("the table is there: %v, %v", exists, err)
	}
	if entries, err := r.routing.List(t.Context()); len(entries) > 0 || err != nil {
		t.Errorf("routes are left: %v, %v", entries, err)
	}
}

// A virtual server of somebody else's is where a Service needs one.
func TestContestedVirtualServer(t *testing.T) {
	r := newRig()
	b := r.backend(Options{}, plan.IPv4)
	p := webPlan(nil, 1)
	mustApply(t, b, plan.Update{Plan: emptyPlan(p)})
	if err := r.servers.CreateServer(ipvs.VirtualServer{Key: webKey, Scheduler: "rr", ClientBits: 32}); err != nil {
		t.Fatal(err)
	}
	b.Invalidate()
	err := b.Apply(context.Background(), plan.Update{Plan: p})
	var bad *dataplane.ObjectError
	if !errors.As(err, &bad) || bad.ID.Name != "web" || !strings.Contains(err.Error(), "not made by svcproxy") {
		t.Fatalf("have %v, want an error that names the Service", err)
	}
	if have, want := r.servers.String(), "TCP 10.62.0.20:80 rr\n"; have != want {
		t.Errorf("have\n%s\nwant\n%s", have, want)
	}
}

// What kube-proxy left is taken over: virtual servers of the plan without a gap, those
// on the device that nobody wants go.
func TestTakeOverFromKubeProxy(t *testing.T) {
	r := newRig()
	w := plantest.NewWorld(plan.IPv4)
	ctx := context.Background()
	if err := r.device.Create(ctx); err != nil {
		t.Fatal(err)
	}
	nodePort := ipvs.ByAddr(ipvs.TCP, netip.AddrPortFrom(w.Node[0], 31080))
	old := ipvs.ByAddr(ipvs.UDP, netip.AddrPortFrom(w.At("service", 99), 53))
	for _, k := range []ipvs.Key{webKey, nodePort, old} {
		if err := r.servers.CreateServer(ipvs.VirtualServer{Key: k, Scheduler: "rr", ClientBits: 32}); err != nil {
			t.Fatal(err)
		}
		if err := r.servers.CreateReal(k, ipvs.RealServer{Addr: podA, Weight: 1}); err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range []netip.Addr{webKey.Addr.Addr(), old.Addr.Addr()} {
		if err := r.device.Add(a); err != nil {
			t.Fatal(err)
		}
	}
	p := webPlan(func(sp *plan.ServicePort) {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Port: 31080, Route: [3]plan.Route{{SNAT: true}, {SNAT: true}, {SNAT: true}}})
	}, 1)
	r.changes()
	b := r.backend(Options{}, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: emptyPlan(p), Partial: true})
	wantChanges(t, r)
	mustApply(t, b, plan.Update{Plan: p})
	wantChanges(t, r, "delete server UDP 10.62.0.99:53")
	fresh := newRig()
	mustApply(t, fresh.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
	if have, want := r.state(t), fresh.state(t); have != want {
		t.Error(plantest.FirstDifference(have, want))
	}
}

func TestMissingScheduler(t *testing.T) {
	r := newRig()
	r.servers.NoScheduler = []string{"mh"}
	b := r.backend(Options{}, plan.IPv4)
	p := webPlan(func(sp *plan.ServicePort) { sp.Policy = &plan.Policy{Scheduler: "mh", Fallback: true} }, 1)
	mustApply(t, b, plan.Update{Plan: p})
	if have := r.servers.String(); !strings.HasPrefix(have, "TCP 10.62.0.20:80 rr\n") {
		t.Errorf("have\n%s", have)
	}
	notes := b.Remarks()
	if len(notes) != 1 || notes[0].Name != "web" || notes[0].Reason != remark.NoScheduler || !strings.Contains(notes[0].Message, "ip_vs_mh") {
		t.Errorf("notes: %+v", notes)
	}
	r.changes()
	mustApply(t, b, plan.Update{Plan: p})
	wantChanges(t, r)
	if notes := b.Remarks(); len(notes) != 0 {
		t.Errorf("said again: %+v", notes)
	}
	b.Invalidate()
	mustApply(t, b, plan.Update{Plan: p})
	if notes := b.Remarks(); len(notes) != 0 {
		t.Errorf("said again after it was tried again: %+v", notes)
	}
	r.servers.NoScheduler = nil // the module was loaded
	b.Invalidate()
	mustApply(t, b, plan.Update{Plan: p})
	if have := r.servers.String(); !strings.HasPrefix(have, "TCP 10.62.0.20:80 mh") {
		t.Errorf("the module is there, but have\n%s", have)
	}
}

// Schedulers that are missing are named with their modules before anybody asks for one.
func TestMissingSchedulersAreListed(t *testing.T) {
	r := newRig()
	if have := limits(t.Context(), r.kernel()); len(have) > 0 {
		t.Errorf("nothing is missing, but %q", have)
	}
	r.servers.NoScheduler = []string{"mh", "twos"}
	want := []string{
		"no scheduler mh, for which rr is used: install or load the kernel module ip_vs_mh",
		"no scheduler twos, for which rr is used: install or load the kernel module ip_vs_twos",
	}
	if have := limits(t.Context(), r.kernel()); !slices.Equal(have, want) {
		t.Errorf("have %q", have)
	}
}

// One that is missing for all is told once, of the Node.
func TestMissingDefaultScheduler(t *testing.T) {
	r := newRig()
	r.servers.NoScheduler = []string{"wlc"}
	b := r.backend(Options{Scheduler: "wlc"}, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: manyServices(20)})
	notes := b.Remarks()
	if len(notes) != 1 || notes[0].Kind != "Node" || notes[0].Name != "alder" || !strings.Contains(notes[0].Message, "ipvs.scheduler") {
		t.Errorf("notes: %+v", notes)
	}
	if have := r.servers.String(); strings.Count(have, " rr\n") != 20 {
		t.Errorf("have\n%s", have)
	}
}

// One change costs one operation for each object that it changes, however many
// Services there are.
func TestOperationsPerChange(t *testing.T) {
	const services = 20_000
	p := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{}, Node: webPlan(nil).Node}
	for i := range services {
		sp := *webPlan(nil, 1, 2).Services[plan.ID{Namespace: "default", Name: "web", Port: "http", Protocol: plan.TCP, Family: plan.IPv4}]
		sp.ID.Name = fmt.Sprintf("svc-%d", i)
		sp.Frontends = slices.Clone(sp.Frontends)
		sp.Frontends[0].Addr = netip.AddrFrom4([4]byte{10, 62, byte(i >> 8), byte(i)})
		p.Services[sp.ID] = &sp
	}
	r := newRig()
	b := r.backend(Options{}, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: p})
	r.changes()
	commits := r.tables.Commits()
	id := plan.ID{Namespace: "default", Name: "svc-4660", Port: "http", Protocol: plan.TCP, Family: plan.IPv4}
	old := p.Services[id]
	changed := *old
	changed.Pools[plan.Cluster] = append(slices.Clone(old.Pools[plan.Cluster][1:]), plan.Endpoint{Addr: netip.MustParseAddrPort("10.61.1.9:8080"), OnNode: true, Weight: 1})
	p.Services[id] = &changed
	mustApply(t, b, plan.Update{Plan: p, Changed: []plan.Change{{ID: id, Old: old, New: &changed}}})
	wantChanges(t, r,
		"create real server TCP 10.62.18.52:80 > 10.61.1.9:8080",
		"update real server TCP 10.62.18.52:80 > 10.61.1.1:8080")
	if n := r.tables.Commits() - commits; n > 1 {
		t.Errorf("%d commits for an endpoint that comes", n)
	}
	for _, op := range r.device.Ops()[services+2:] {
		t.Errorf("operation %s", op)
	}
}

func TestSysctls(t *testing.T) {
	for _, c := range []struct {
		release string
		strict  bool
		want    string
	}{
		{"6.1.0-44-amd64", false, "net.ipv4.ip_forward=1 net.ipv4.vs.conntrack=1 net.ipv4.vs.expire_nodest_conn=1 net.ipv4.vs.expire_quiescent_template=1"},
		{"5.4.0", true, "net.ipv4.ip_forward=1 net.ipv4.vs.conntrack=1 net.ipv4.vs.expire_nodest_conn=1 net.ipv4.vs.expire_quiescent_template=1 " +
			"net.ipv4.vs.conn_reuse_mode=0 net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2"},
	} {
		r := newRig()
		r.sysctls.Values["kernel.osrelease"] = c.release
		b := r.backend(Options{StrictARP: c.strict, TCPTimeout: time.Hour}, plan.IPv4)
		mustApply(t, b, plan.Update{Plan: webPlan(nil, 1)})
		if have := strings.Join(r.sysctls.Writes(), " "); have != c.want {
			t.Errorf("%s: have %s\nwant %s", c.release, have, c.want)
		}
		report := strings.Join(b.Report(), "\n")
		for _, s := range []string{"conn_reuse_mode", "tcp 1h0m0s"} {
			if !strings.Contains(report, s) {
				t.Errorf("%s: the report lacks %s:\n%s", c.release, s, report)
			}
		}
	}
}

func TestCleanup(t *testing.T) {
	r := newRig()
	sets := &ipset.Fake{Set: map[string]bool{"KUBE-CLUSTER-IP": false, "KUBE-6-LOAD-BALANCER-SOURCE-CID": false, "KUBE-LOOP-BACK": true, "mine": false}}
	rng := rand.New(rand.NewPCG(5, 5))
	p := plantest.RandomPlan(rng, nil, plan.Families[:]...)
	for range 20 {
		p = plantest.RandomPlan(rng, p, plan.Families[:]...)
	}
	mustApply(t, r.backend(Options{}, plan.Families[:]...), plan.Update{Plan: p})
	if yes, err := inForce(context.Background(), r.kernel()); err != nil || !yes {
		t.Errorf("in force: %t, %v", yes, err)
	}
	for range 2 {
		k := r.kernel()
		k.sets = sets
		if err := cleanup(context.Background(), testEnv(plan.Families[:]...), Options{}, k); err != nil {
			t.Fatal(err)
		}
		if len(sets.Set) != 2 {
			t.Errorf("IP sets: %v, want that in use and the admin's", sets.Set)
		}
		if have, want := r.state(t), newRig().state(t); have != want {
			t.Errorf("left: %s", plantest.FirstDifference(have, want))
		}
	}
	if yes, err := inForce(context.Background(), r.kernel()); err != nil || yes {
		t.Errorf("in force after clean-up: %t, %v", yes, err)
	}
	if _, err := r.device.Addrs(); !errors.Is(err, host.ErrNoDevice) {
		t.Errorf("the device is there: %v", err)
	}
}

// a table of ours in another form is replaced in one transaction, in which all
// frontends are there again.
func TestTableOfAnotherLayout(t *testing.T) {
	p := webPlan(nil, 1, 2)
	for name, ops := range map[string][]nft.Op{
		"another comment": {{Kind: nft.AddTable, Comment: "svcproxy-ipvs, layout 0"}},
		"a set of another type": {
			{Kind: nft.AddTable, Comment: table.Layout},
			{Kind: nft.AddSet, Set: &nft.Set{Name: table.Hairpin.Name(), Key: []nft.Type{nft.TypePort}}},
			{Kind: nft.AddChain, Chain: &nft.Chain{Name: "old"}},
			{Kind: nft.AddRule, Name: "old", Rule: nft.NewRule(nft.IPv4, nft.In{Fields: []nft.Field{nft.DstPort}, Set: table.Hairpin.Name()}, nft.Do{Code: nft.Drop})},
		},
		"a chain in another hook": {
			{Kind: nft.AddTable, Comment: table.Layout},
			{Kind: nft.AddChain, Chain: &nft.Chain{Name: "mark-input", Hook: &nft.Hook{Type: "filter", Num: nft.Output, Priority: 3}}},
		},
	} {
		r := newRig()
		for i := range ops {
			ops[i].Table = table.Of(plan.IPv4)
		}
		if err := r.tables.Commit(context.Background(), ops); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var replacing []nft.Op
		r.tables.Refuse = func(ops []nft.Op) error {
			if ops[0].Kind == nft.DeleteTable {
				replacing = slices.Clone(ops)
			}
			return nil
		}
		mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
		if !slices.ContainsFunc(replacing, func(o nft.Op) bool {
			return o.Kind == nft.AddElements && o.Set.Name == table.Services.Name() && len(o.Elements) == 1
		}) {
			t.Errorf("%s: the frontends are not in the transaction that replaces the table", name)
		}
		fresh := newRig()
		mustApply(t, fresh.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
		if have, want := r.state(t), fresh.state(t); have != want {
			t.Errorf("%s: %s", name, plantest.FirstDifference(have, want))
		}
	}
}

// Others' changes are reported, each kind by who notices it.
func TestInterferenceIsNoticed(t *testing.T) {
	r := newRig()
	b := r.backend(Options{}, plan.IPv4)
	p := webPlan(func(sp *plan.ServicePort) {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("203.0.113.5"), Port: 80})
	}, 1)
	mustApply(t, b, plan.Update{Plan: p})
	ctx, cancel := context.WithCancel(context.Background())
	heard := make(chan string, 16)
	ready := make([]chan struct{}, 4)
	for i := range ready {
		ready[i] = make(chan struct{})
	}
	ended := make(chan error, 1)
	go func() { ended <- b.watch(ctx, ready, func(what string) { heard <- what }) }()
	for i := range 3 {
		<-ready[i]
	}
	for what, disturb := range map[string]func() error{
		"services": func() error {
			return r.tables.Disturb(nft.Op{Kind: nft.FlushSet, Table: table.Of(plan.IPv4), Name: table.Services.Name()})
		},
		"route": func() error { return r.routing.Delete(ctx, b.families[0].routes()[0]) },
	} {
		if err := disturb(); err != nil {
			t.Fatal(err)
		}
		if have := <-heard; have == "" {
			t.Errorf("%s: nothing is said", what)
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the watch ends with %v", err)
	}
	for _, c := range []struct {
		want    string
		disturb func() error
	}{
		{"", func() error { return nil }},
		{"real server 10.61.1.1:8080 of virtual server TCP 10.62.0.20:80 was changed", func() error {
			return r.servers.UpdateReal(webKey, ipvs.RealServer{Addr: podA, Weight: 7})
		}},
		{"real server 10.61.1.2:8080 of virtual server TCP 10.62.0.20:80 was changed", func() error {
			return errors.Join(r.servers.UpdateReal(webKey, ipvs.RealServer{Addr: podA, Weight: 1}), r.servers.CreateReal(webKey, ipvs.RealServer{Addr: podB, Weight: 1}))
		}},
		{"real servers of IPv4 virtual servers were deleted", func() error {
			return errors.Join(r.servers.DeleteReal(webKey, podA), r.servers.DeleteReal(webKey, podB))
		}},
		{"virtual server TCP 10.62.0.20:80 was deleted", func() error { return r.servers.DeleteServer(webKey) }},
	} {
		if err := c.disturb(); err != nil {
			t.Fatal(err)
		}
		if have, _, err := b.findChange(context.Background()); err != nil || have != c.want {
			t.Errorf("have %q, %v, want %q", have, err, c.want)
		}
	}
}

// a Service that the kernel refuses is named; the others are written.
func TestOneRefusedServiceAmongFifty(t *testing.T) {
	p := manyServices(51)
	odd := plan.ID{Namespace: "default", Name: "svc-7", Port: "http", Protocol: plan.TCP, Family: plan.IPv4}
	oddKey := ipvs.ByAddr(ipvs.TCP, netip.AddrPortFrom(p.Services[odd].Frontends[0].Addr, 80))
	for _, what := range []string{"create server", "create real server"} {
		r := newRig()
		b := r.backend(Options{}, plan.IPv4)
		r.servers.Fail = func(_ int, op ipvs.Op) error {
			if op.Name == what && op.Key == oddKey {
				return unix.EINVAL
			}
			return nil
		}
		err := b.Apply(context.Background(), plan.Update{Plan: p})
		var bad *dataplane.ObjectError
		if !errors.As(err, &bad) || bad.ID != odd {
			t.Fatalf("%s: have %v, want an error of %s", what, err, odd)
		}
		all, err := r.servers.Dump(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		whole := 0
		for _, e := range all {
			if len(e.Real) == 5 {
				whole++
			}
		}
		if whole != 50 {
			t.Errorf("%s: %d Services are whole, want 50", what, whole)
		}
		// The loop takes the Service out of the plan then.
		without := &plan.Plan{Node: p.Node, Services: map[plan.ID]*plan.ServicePort{}}
		for id, sp := range p.Services {
			if id != odd {
				without.Services[id] = sp
			}
		}
		mustApply(t, b, plan.Update{Plan: without})
		r.heal()
		mustApply(t, b, plan.Update{Plan: p, Changed: []plan.Change{{ID: odd, New: p.Services[odd]}}})
		fresh := newRig()
		mustApply(t, fresh.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
		if have, want := r.state(t), fresh.state(t); have != want {
			t.Errorf("%s: %s", what, plantest.FirstDifference(have, want))
		}
	}
}

// While another mode is in force packets are taken from it only when everything is
// there, addresses included; on a node without any, addresses come last.
func TestWhenPacketsAreTaken(t *testing.T) {
	for _, others := range []bool{false, true} {
		r := newRig()
		var order []string
		say := func(what string) {
			if len(order) == 0 || order[len(order)-1] != what {
				order = append(order, what)
			}
		}
		r.tables.Refuse = func(ops []nft.Op) error {
			for _, o := range ops {
				switch {
				case o.Kind == nft.AddChain && o.Chain.Hook != nil:
					say("hooks")
				case o.Kind == nft.AddElements && o.Set.Name == table.Services.Name():
					say("frontends")
				}
			}
			return nil
		}
		r.servers.Fail = func(_ int, op ipvs.Op) error {
			if op.Name == "create real server" {
				say("endpoints")
			}
			return nil
		}
		r.device.Fail = func(_ int, op string) error {
			if strings.HasPrefix(op, "add") {
				say("addresses")
			}
			return nil
		}
		r.routing.Refuse = func(route.Entry) error { say("routes"); return nil }
		mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: webPlan(nil, 1, 2), Partial: !others})
		want := "endpoints routes frontends hooks addresses"
		if others {
			want = "endpoints routes addresses frontends hooks"
		}
		if have := strings.Join(order, " "); have != want {
			t.Errorf("others in force: %t: have %s, want %s", others, have, want)
		}
	}
}

// Clean-up gives packets up before it takes away what carries them.
func TestCleanupOrder(t *testing.T) {
	r := newRig()
	mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: webPlan(nil, 1)})
	var order []string
	r.tables.Refuse = func(ops []nft.Op) error { order = append(order, fmt.Sprint(ops[0].Kind)); return nil }
	r.servers.Fail = func(_ int, op ipvs.Op) error {
		if op.Name == "delete server" {
			order = append(order, "server")
		}
		return nil
	}
	r.device.Fail = func(_ int, op string) error {
		if op == "delete" {
			order = append(order, "device")
		}
		return nil
	}
	if err := cleanup(context.Background(), testEnv(plan.IPv4), Options{}, r.kernel()); err != nil {
		t.Fatal(err)
	}
	if have := strings.Join(order, " "); have != "delete chain delete table server device" {
		t.Errorf("have %s", have)
	}
}
