package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
)

// compareEvery is after how many steps the state is compared: that costs most.
const compareEvery = 5

// walkPlans goes from plan to plan by small steps, with restarts, lost writes and
// others' interference, and compares with a fresh start now and then.
func walkPlans(t *testing.T, tables nft.Tables, seed uint64, steps int, lose func(yes bool), fresh func() nft.Tables) {
	rng := rand.New(rand.NewPCG(seed, 1))
	families := plan.Families[:]
	b := newBackend(testEnv(families...), tables)
	var last, applied *plan.Plan
	for step := range steps {
		last = plantest.RandomPlan(rng, last, families...)
		switch rng.IntN(11) {
		case 0: // a restart
			b, applied = newBackend(testEnv(families...), tables), nil
		case 1:
			b.Invalidate()
		case 2: // somebody empties what matters most
			table := b.families[rng.IntN(2)].table
			if table.Name != "" {
				meddle(t, tables, nft.Op{Kind: nft.FlushSet, Table: table, Name: setServices}, nft.Op{Kind: nft.FlushChain, Table: table, Name: chainServices})
				b.Invalidate()
			}
		case 3:
			if table := b.families[rng.IntN(2)].table; table.Name != "" {
				meddle(t, tables, nft.Op{Kind: nft.DeleteTable, Table: table})
				b.Invalidate()
			}
		case 4: // a write is lost, perhaps the second of several
			lose(true)
			_ = b.Apply(context.Background(), plantest.Difference(applied, last))
			lose(false)
		}
		if rng.IntN(4) == 0 { // somebody edits elements and rules, which is told exactly
			if f := b.families[rng.IntN(2)]; f.known {
				meddleExactly(t, rng, b, f)
			}
		}
		mustApply(t, b, plantest.Difference(applied, last))
		applied = last
		if step%compareEvery != 0 && step != steps-1 {
			continue
		}
		other := fresh()
		mustApply(t, newBackend(testEnv(families...), other), plan.Update{Plan: last})
		for _, f := range families {
			if have, want := state(t, tables, f), state(t, other, f); have != want {
				t.Fatalf("step %d, %s: %s", step, f, plantest.FirstDifference(have, want))
			}
		}
	}
}

// meddleExactly deletes, replaces and adds elements of large sets, and empties a
// chain, and tells of it as the kernel would.
func meddleExactly(t *testing.T, rng *rand.Rand, b *backend, f *family) {
	t.Helper()
	c, err := b.tables.Read(context.Background(), f.table)
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range slices.Sorted(maps.Keys(f.core)) {
		if !f.large(set) || rng.IntN(2) == 0 {
			continue
		}
		e := nft.Event{Table: f.table, What: set, Set: set}
		for i, el := range c.Elements[set] {
			if rng.IntN(4) > 0 {
				continue
			}
			gone := []nft.Element{{Key: el.Key}}
			meddle(t, b.tables, nft.Op{Kind: nft.DeleteElements, Table: f.table, Set: f.core[set], Elements: gone})
			e.Keys = append(e.Keys, el.Key)
			if other := c.Elements[set][(i+1)%len(c.Elements[set])]; rng.IntN(2) == 0 { // another's data
				other.Key = el.Key
				meddle(t, b.tables, nft.Op{Kind: nft.AddElements, Table: f.table, Set: f.core[set], Elements: []nft.Element{other}})
			}
		}
		if len(c.Elements[set]) > 0 { // one that nobody wants
			el := c.Elements[set][0]
			el.Key = el.Key[:len(el.Key)-1] + "\x77"
			if _, err := b.tables.Lookup(context.Background(), f.table, f.core[set], []nft.Tuple{el.Key}); err == nil {
				_ = b.tables.Commit(context.Background(), []nft.Op{{Kind: nft.AddElements, Table: f.table, Set: f.core[set], Elements: []nft.Element{el}}})
				e.Keys = append(e.Keys, el.Key)
			}
		}
		b.tell(e)
	}
	meddle(t, b.tables, nft.Op{Kind: nft.FlushChain, Table: f.table, Name: chainReject})
	b.tell(nft.Event{Table: f.table, What: "rules", Rules: true})
	b.Invalidate()
}

func meddle(t *testing.T, tables nft.Tables, ops ...nft.Op) {
	t.Helper()
	if err := tables.Commit(context.Background(), ops); err != nil {
		t.Fatal(err)
	}
}

// Whatever way a plan is reached, the table is that of a fresh start.
func TestEndStateDoesNotDependOnThePath(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			memory := &fake.Tables{}
			rng := rand.New(rand.NewPCG(seed, 2))
			lose := func(yes bool) {
				memory.Refuse = nil
				if yes {
					left := rng.IntN(3)
					memory.Refuse = func([]nft.Op) error {
						if left--; left < 0 {
							return &nft.Error{Err: unix.ENOBUFS}
						}
						return nil
					}
				}
			}
			walkPlans(t, memory, seed, 150, lose, func() nft.Tables { return &fake.Tables{} })
		})
	}
}

// webPlan is a plan with one Service of three endpoints and affinity, if any.
func webPlan(affinity time.Duration, endpoints ...int) *plan.Plan {
	w := plantest.NewWorld(plan.IPv4)
	sp := &plan.ServicePort{
		ID:       plan.ID{Namespace: "default", Name: "web", Port: "http", Protocol: plan.TCP, Family: plan.IPv4},
		Affinity: affinity,
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: w.At("service", 20), Port: 80, Route: [3]plan.Route{{}, {SNAT: true}, {SNAT: true}}},
			{Kind: plan.NodePort, Port: 31080, Route: [3]plan.Route{{SNAT: true}, {SNAT: true}, {SNAT: true}}},
		},
	}
	for _, n := range endpoints {
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: netip.AddrPortFrom(w.At("pod", n), 8080), OnNode: true, Weight: 1})
	}
	if len(endpoints) == 0 {
		for i := range sp.Frontends {
			r := plan.Route{Verdict: plan.Reject}
			sp.Frontends[i].Route = [3]plan.Route{r, r, r}
		}
	}
	return &plan.Plan{Services: map[plan.ID]*plan.ServicePort{sp.ID: sp}, Node: &plan.Node{
		Name: "alder", Addrs: w.Node, NodePorts: map[plan.Family]plan.NodePorts{plan.IPv4: {Addrs: w.Node[:1]}},
		Local:        map[plan.Family]plan.LocalTraffic{plan.IPv4: {Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{w.Pods}}},
		ServiceCIDRs: []netip.Prefix{w.Services},
	}}
}

func TestRestartWritesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	p := plantest.RandomPlan(rng, nil, plan.Families[:]...)
	for range 40 {
		p = plantest.RandomPlan(rng, p, plan.Families[:]...)
	}
	memory := &fake.Tables{}
	mustApply(t, newBackend(testEnv(plan.Families[:]...), memory), plan.Update{Plan: p})
	before := memory.Commits()
	again := newBackend(testEnv(plan.Families[:]...), memory)
	mustApply(t, again, plan.Update{Plan: p, Partial: true})
	mustApply(t, again, plan.Update{Plan: p})
	mustApply(t, again, plan.Update{Plan: p})
	again.Invalidate()
	mustApply(t, again, plan.Update{Plan: p})
	if n := memory.Commits() - before; n != 0 {
		t.Errorf("a restart with the state intact writes %d times", n)
	}
}

// An endpoint that is replaced costs its own elements, whatever else is there.
func TestReplacedEndpointWritesItsElements(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	p := webPlan(0, 1, 2, 3)
	mustApply(t, b, plan.Update{Plan: p})
	var seen []nft.Op
	memory.Refuse = func(ops []nft.Op) error { seen = append(seen, ops...); return nil }
	q := webPlan(0, 1, 3, 4)
	mustApply(t, b, plantest.Difference(p, q))
	n := 0
	for _, o := range seen {
		if o.Kind != nft.AddElements && o.Kind != nft.DeleteElements {
			t.Errorf("it writes more than elements: %s", &o)
		}
		n += len(o.Elements)
	}
	// Two frontends' slots, the hairpin set, the endpoints' addresses; each out and in.
	if n != 2*4 {
		t.Errorf("it writes %d elements, want 8: %v", n, seen)
	}
}

// The endpoint that takes over a removed one's slot is always reachable, and no slot
// is empty: checked between all commits, each of which is one element here.
func TestRemovalLeavesNoHole(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	p := webPlan(0, 1, 2, 3, 4)
	mustApply(t, b, plan.Update{Plan: p})
	vip := netip.AddrPortFrom(plantest.NewWorld(plan.IPv4).At("service", 20), 80)
	reached := func() map[string]bool {
		tables := walk.New(nft.IPv4, mustRead(t, memory, plan.IPv4))
		out := map[string]bool{}
		for i, n := uint32(0), uint32(1); i < n; i++ {
			f := tables.Send(walk.Packet{Proto: 6, Src: netip.MustParseAddr("198.51.100.7"), Dst: vip, In: "eth0"}, func(mod uint32) uint32 {
				n = max(n, mod)
				return i % mod // a number that nobody has is drawn every time
			})
			out[f.Dst.String()] = true
		}
		return out
	}
	q := webPlan(0, 1, 3, 4)
	p0 := pending{id: onlyID(q), sp: q.Services[onlyID(q)]}
	f := b.families[0]
	f.round++
	f.prepare(&p0, f.settings, false)
	for _, o := range p0.new.objects {
		f.retain(o)
	}
	e := f.diff(p0.id, p0.old, p0.new)
	f.emit(e)
	ops := f.batch
	for i := 0; i < len(ops); {
		n := i + 1
		for n < len(ops) && (ops[n-1].Kind == nft.DeleteElements && ops[n].Kind == nft.AddElements || ops[n].Kind == nft.AddRule) {
			n++ // what replaces belongs together
		}
		if err := memory.Commit(context.Background(), ops[i:n]); err != nil {
			t.Fatal(err)
		}
		i = n
		for _, want := range []string{"10.61.1.1:8080", "10.61.1.3:8080", "10.61.1.4:8080"} {
			if have := reached(); !have[want] || have[vip.String()] {
				t.Errorf("after %s: reached are %v, want %s among them and no untranslated packet", &ops[n-1], have, want)
			}
		}
	}
	if have := reached(); have["10.61.1.2:8080"] {
		t.Errorf("the removed endpoint still answers: %v", have)
	}
}

func onlyID(p *plan.Plan) plan.ID {
	for id := range p.Services {
		return id
	}
	return plan.ID{}
}

// A client keeps its endpoint; when that goes it moves at once, and sticks again.
func TestClientsOfRemovedEndpointsMove(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	p := webPlan(time.Hour, 1, 2, 3)
	mustApply(t, b, plan.Update{Plan: p})
	table := b.families[0].table
	set := &nft.Set{Name: affinityName(onlyID(p), plan.Cluster)}
	client := func(n, endpoint int) nft.Element {
		w := plantest.NewWorld(plan.IPv4)
		return nft.Element{Key: nft.AddrTuple(w.At("client", n)), Data: endpointTuple(netip.AddrPortFrom(w.At("pod", endpoint), 8080))}
	}
	meddle(t, memory, nft.Op{Kind: nft.AddElements, Table: table, Set: set, Elements: []nft.Element{client(1, 1), client(2, 2), client(3, 3), client(4, 2)}})
	q := webPlan(time.Hour, 1, 3, 4)
	together := false
	memory.Refuse = func(ops []nft.Op) error {
		slots := slices.ContainsFunc(ops, func(o nft.Op) bool { return o.Kind == nft.AddElements && o.Set.Name == setEndpoints })
		forget := slices.ContainsFunc(ops, func(o nft.Op) bool { return o.Kind == nft.DeleteElements && o.Set.Name == set.Name })
		together = together || slots && forget
		return nil
	}
	mustApply(t, b, plantest.Difference(p, q))
	var left []string
	err := memory.Elements(context.Background(), table, set, func(e nft.Element) {
		a, _ := e.Key.Addr(nft.IPv4)
		left = append(left, a.String())
	})
	slices.Sort(left)
	if err != nil || !slices.Equal(left, []string{"198.51.100.1", "198.51.100.3"}) {
		t.Errorf("remembered are %v, %v; want the clients of endpoints that stay", left, err)
	}
	if !together {
		t.Error("the clients are forgotten in another transaction than that which takes the endpoint away")
	}
}

// A client whose time ran out between the listing and the commit does not spoil it.
func TestClientThatLeavesMeanwhile(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	p := webPlan(time.Hour, 1, 2)
	mustApply(t, b, plan.Update{Plan: p})
	set := &nft.Set{Name: affinityName(onlyID(p), plan.Cluster)}
	table := b.families[0].table
	w := plantest.NewWorld(plan.IPv4)
	gone := nft.Element{Key: nft.AddrTuple(w.At("client", 1)), Data: endpointTuple(netip.AddrPortFrom(w.At("pod", 2), 8080))}
	stays := gone
	stays.Key = nft.AddrTuple(w.At("client", 2))
	meddle(t, memory, nft.Op{Kind: nft.AddElements, Table: table, Set: set, Elements: []nft.Element{gone, stays}})
	first := true
	memory.Refuse = func([]nft.Op) error {
		if !first {
			return nil
		}
		first = false
		return memory.Commit(context.Background(), []nft.Op{{Kind: nft.DeleteElements, Table: table, Set: set, Elements: []nft.Element{gone}}})
	}
	mustApply(t, b, plantest.Difference(p, webPlan(time.Hour, 1)))
	n := 0
	if err := memory.Elements(context.Background(), table, set, func(nft.Element) { n++ }); err != nil || n != 0 {
		t.Errorf("%d clients of the removed endpoint are left, %v", n, err)
	}
}

// One Service port that the kernel refuses is named.
func TestRefusedServicePortIsNamed(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	p := webPlan(0, 1)
	id := onlyID(p)
	memory.Refuse = func(ops []nft.Op) error {
		for i := range ops {
			if ops[i].Owner == id {
				return &nft.Error{Op: &ops[i], Err: unix.EINVAL}
			}
		}
		return nil
	}
	err := b.Apply(context.Background(), plan.Update{Plan: p})
	var oe *dataplane.ObjectError
	if !errors.As(err, &oe) || oe.ID != id {
		t.Fatalf("Apply returns %v, want an ObjectError of %s", err, id)
	}
	memory.Refuse = nil
	mustApply(t, b, plan.Update{Plan: p})
}

func TestBadServicePortLeavesTheRest(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	p := webPlan(0, 1)
	odd := *p.Services[onlyID(p)]
	odd.ID.Name = "odd"
	odd.Frontends = []plan.Frontend{{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("2001:db8::1"), Port: 80}}
	p.Services[odd.ID] = &odd
	err := b.Apply(context.Background(), plan.Update{Plan: p})
	var oe *dataplane.ObjectError
	if !errors.As(err, &oe) || oe.ID != odd.ID || !strings.Contains(err.Error(), "2001:db8::1") {
		t.Errorf("Apply returns %v, want an ObjectError that names the address", err)
	}
	if s := memory.String(); !strings.Contains(s, `10.62.0.20 . tcp . 80 comment "default/web:http"`) {
		t.Errorf("the other Service is not there:\n%s", s)
	}
}

// Another layout's table stays in force until ours is complete; so does kube-proxy's.
func TestOldTableStaysInForce(t *testing.T) {
	for name, old := range map[string]nft.Table{"layout": {Family: nft.IPv4, Name: owned.Name}, "kube-proxy": {Family: nft.IPv4, Name: owned.KubeProxyName}} {
		t.Run(name, func(t *testing.T) {
			memory := &fake.Tables{}
			meddle(t, memory,
				nft.Op{Kind: nft.AddTable, Table: old, Comment: "svcproxy, layout 0"},
				nft.Op{Kind: nft.AddChain, Table: old, Chain: &nft.Chain{Name: "prerouting", Hook: &nft.Hook{Type: "nat", Num: nft.Prerouting, Priority: -100}}})
			b := newBackend(testEnv(plan.IPv4), memory)
			p := webPlan(0)
			for id, sp := range p.Services {
				for n := range 3000 {
					more := *sp
					more.ID.Name = fmt.Sprintf("web-%d", n)
					more.Frontends = []plan.Frontend{sp.Frontends[0]}
					more.Frontends[0].Addr = netip.AddrFrom4([4]byte{10, 62, byte(10 + n/200), byte(n % 200)})
					p.Services[more.ID] = &more
				}
				delete(p.Services, id)
			}
			mustApply(t, b, plan.Update{Plan: p, Partial: true})
			if memory.Commits() != 1 {
				t.Error("the part of the plan for the node's start is written beside a table in force")
			}
			commits := 0
			memory.Refuse = func(ops []nft.Op) error {
				commits++
				last := ops[len(ops)-1].Kind == nft.DeleteTable
				hooks := slices.ContainsFunc(ops, func(o nft.Op) bool { return o.Kind == nft.AddChain && o.Chain.Hook != nil })
				if hooks != last {
					t.Errorf("commit %d: base chains come %v, the old table goes %v; want both at once", commits, hooks, last)
				}
				return nil
			}
			mustApply(t, b, plan.Update{Plan: p})
			if commits < 3 {
				t.Errorf("%d commits, want bounded ones", commits)
			}
			if ok, _ := memory.Exists(context.Background(), old); ok && old.Name != b.families[0].table.Name {
				t.Error("the old table is still there")
			}
		})
	}
}

func TestWhatIsMissingIsNamed(t *testing.T) {
	for want, err := range map[string]error{"CONFIG_NFT_MASQ, Linux 3.18": unix.ENOENT, "CAP_NET_ADMIN": unix.EPERM} {
		n := 0
		memory := &fake.Tables{Refuse: func([]nft.Op) error {
			if n++; n == 6 { // masquerading is the sixth need
				return &nft.Error{Err: err}
			}
			return nil
		}}
		if have := supports(context.Background(), plan.IPv4, memory); have == nil || !strings.Contains(have.Error(), want) {
			t.Errorf("supports returns %v, want %q in it", have, want)
		}
	}
	if err := supports(context.Background(), plan.IPv6, &fake.Tables{}); err != nil {
		t.Error(err)
	}
}

func TestCleanup(t *testing.T) {
	memory := &fake.Tables{}
	env := testEnv(plan.Families[:]...)
	mustApply(t, newBackend(env, memory), plan.Update{Plan: webPlan(time.Hour, 1)})
	foreign := nft.Table{Family: nft.IPv4, Name: "filter"}
	meddle(t, memory, nft.Op{Kind: nft.AddTable, Table: foreign}, nft.Op{Kind: nft.AddTable, Table: owned.KubeProxy(plan.IPv6)})
	for range 2 {
		if err := owned.Remove(context.Background(), env.Log, memory, owned.All); err != nil {
			t.Fatal(err)
		}
		if have, want := memory.String(), "table ip filter {\n}\n"; have != want {
			t.Errorf("left is\n%swant\n%s", have, want)
		}
	}
}

// Segments outside of any connection are dropped if an endpoint sends them, one that
// takes no new flows included; nothing else is.
func TestInvalidSegments(t *testing.T) {
	w := plantest.NewWorld(plan.IPv4)
	for _, liberal := range []bool{false, true} {
		memory := &fake.Tables{}
		env := testEnv(plan.IPv4)
		env.BeLiberal = liberal
		p := webPlan(0, 1)
		p.Services[onlyID(p)].Draining = []netip.AddrPort{netip.AddrPortFrom(w.At("pod", 9), 8080)}
		mustApply(t, newBackend(env, memory), plan.Update{Plan: p})
		tables := walk.New(nft.IPv4, mustRead(t, memory, plan.IPv4))
		for n, endpoint := range map[int]bool{1: true, 9: true, 2: false} {
			f := tables.Send(walk.Packet{Proto: 6, Src: w.At("pod", n), Dst: netip.AddrPortFrom(w.At("client", 7), 4000), In: "cni0", Invalid: true}, nil)
			if want := endpoint && !liberal; f.Dropped != want {
				t.Errorf("liberal %v: a segment of pod %d is dropped %v, want %v", liberal, n, f.Dropped, want)
			}
		}
	}
}

func TestDiff(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	p := webPlan(time.Hour, 1, 2)
	mustApply(t, b, plan.Update{Plan: p})
	before := memory.String()
	for _, c := range []struct {
		plan *plan.Plan
		want []string
	}{
		{p, nil},
		{webPlan(time.Hour, 1, 3), []string{
			"+ ip endpoint-addresses: 10.61.1.3",
			"+ ip endpoints: 10.62.0.20 . tcp . 80 . 0x00000001 : 10.61.1.3 . 8080",
			"+ ip hairpin: 10.61.1.3 . 10.61.1.3 . tcp . 8080",
			"+ ip node-port-endpoints: tcp . 31080 . 0x00000001 : 10.61.1.3 . 8080",
			"- ip endpoint-addresses: 10.61.1.2",
			"- ip endpoints: 10.62.0.20 . tcp . 80 . 0x00000001 : 10.61.1.2 . 8080",
			"- ip hairpin: 10.61.1.2 . 10.61.1.2 . tcp . 8080",
			"- ip node-port-endpoints: tcp . 31080 . 0x00000001 : 10.61.1.2 . 8080",
		}},
	} {
		lines, err := newBackend(testEnv(plan.IPv4), memory).Diff(context.Background(), c.plan)
		slices.Sort(lines)
		if err != nil || !slices.Equal(lines, c.want) {
			t.Errorf("Diff finds %v\n%s\nwant\n%s", err, strings.Join(lines, "\n"), strings.Join(c.want, "\n"))
		}
	}
	if memory.String() != before {
		t.Error("Diff writes")
	}
}

func TestWatchTells(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	mustApply(t, b, plan.Update{Plan: webPlan(0, 1)})
	ctx, cancel := context.WithCancel(context.Background())
	told := make(chan string, 1)
	ended := make(chan error, 1)
	ready := make(chan struct{})
	go func() { ended <- b.watch(ctx, ready, func(what string) { told <- what }) }()
	<-ready
	mustApply(t, b, plan.Update{Plan: webPlan(0, 1, 2)}) // our own writes are nobody's interference
	if err := memory.Disturb(nft.Op{Kind: nft.DeleteTable, Table: b.families[0].table}); err != nil {
		t.Fatal(err)
	}
	if what := <-told; what != "table ip svcproxy: delete table" {
		t.Errorf("told is %q", what)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Watch ends with %v", err)
	}
}

// Nobody listens while everything is written for the first time. What others did then is
// noticed all the same, and what was only our own writes is not.
func TestWatchTellsWhatWasMissed(t *testing.T) {
	for _, disturb := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			memory := &fake.Tables{}
			b := newBackend(testEnv(plan.IPv4), memory)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			var told []string
			ended := make(chan error, 1)
			go func() { ended <- b.Watch(ctx, func(what string) { told = append(told, what) }) }()
			synctest.Wait()
			if memory.Watched() {
				t.Error("the kernel is watched before there is anything to watch")
			}
			mustApply(t, b, plan.Update{Plan: webPlan(0), Partial: true})
			if disturb {
				if err := memory.Disturb(nft.Op{Kind: nft.DeleteTable, Table: b.families[0].table}); err != nil {
					t.Fatal(err)
				}
				b.Invalidate()
			}
			mustApply(t, b, plan.Update{Plan: webPlan(0, 1)})
			synctest.Wait()
			if !memory.Watched() {
				t.Error("the kernel is not watched")
			}
			if got := len(told) > 0; got != disturb {
				t.Errorf("with a change by others %t, told is %q", disturb, told)
			}
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("Watch ends with %v", err)
			}
		})
	}
}

// readCounter counts the elements that are listed.
type readCounter struct {
	nft.Tables
	listed int
}

func (r *readCounter) ReadSome(ctx context.Context, t nft.Table, want func(*nft.Set) bool) (*nft.Contents, error) {
	c, err := r.Tables.ReadSome(ctx, t, want)
	if err == nil {
		for _, list := range c.Elements {
			r.listed += len(list)
		}
	}
	return c, err
}

func (r *readCounter) Read(ctx context.Context, t nft.Table) (*nft.Contents, error) {
	return r.ReadSome(ctx, t, func(*nft.Set) bool { return true })
}

// What others did to single elements is repaired without a listing of all, and what
// the plan changed meanwhile is done too.
func TestExactRepair(t *testing.T) {
	memory := &fake.Tables{}
	k := &readCounter{Tables: memory}
	b := newBackend(testEnv(plan.IPv4), k)
	p := bigPlan(500, 3)
	mustApply(t, b, plan.Update{Plan: p})
	want := memory.String()
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- b.watch(ctx, ready, func(string) {}) }()
	<-ready
	table := b.families[0].table
	services, endpoints := b.families[0].core[setServices], b.families[0].core[setEndpoints]
	c := mustRead(t, memory, plan.IPv4)
	for _, o := range []nft.Op{
		{Kind: nft.DeleteElements, Set: services, Elements: c.Elements[setServices][:3]},
		{Kind: nft.DeleteElements, Set: endpoints, Elements: c.Elements[setEndpoints][7:8]},
		{Kind: nft.FlushChain, Name: chainServices},
	} {
		o.Table = table
		if err := memory.Disturb(o); err != nil {
			t.Fatal(err)
		}
	}
	b.Invalidate()
	k.listed = 0
	mustApply(t, b, plan.Update{Plan: p})
	if have := memory.String(); have != want {
		t.Errorf("after the repair: %s", plantest.FirstDifference(have, want))
	}
	if k.listed > 10 {
		t.Errorf("%d elements were listed", k.listed)
	}
	k.listed = 0
	b.Invalidate() // for no reason that is known
	mustApply(t, b, plan.Update{Plan: p})
	if k.listed < 2000 {
		t.Errorf("a read-back lists %d elements only", k.listed)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the watch ends with %v", err)
	}
}

// A chain that the kernel holds on to is deleted later, without a change.
func TestBusyChainsAreTriedAgain(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	now := time.Unix(1000, 0)
	b.families[0].now = func() time.Time { return now }
	from, to := webPlan(0, 1, 2, 3, 4, 5), webPlan(0, 1)
	mustApply(t, b, plan.Update{Plan: from})
	if due := b.Due(); !due.IsZero() {
		t.Errorf("after the start an Apply is due at %s", due)
	}
	memory.Refuse = func(ops []nft.Op) error {
		if ops[0].Kind == nft.DeleteChain {
			return &nft.Error{Op: &ops[0], Err: nft.ErrBusy}
		}
		return nil
	}
	mustApply(t, b, plantest.Difference(from, to))
	for _, pause := range []time.Duration{time.Second, 2 * time.Second} {
		if due := b.Due(); !due.Equal(now.Add(pause)) {
			t.Errorf("an Apply is due at %s, want in %s", due, pause)
		}
		now = now.Add(pause)
		mustApply(t, b, plan.Update{Plan: to})
	}
	memory.Refuse = nil
	now = now.Add(time.Minute)
	mustApply(t, b, plan.Update{Plan: to})
	if due := b.Due(); !due.IsZero() || strings.Contains(memory.String(), prefixDraw+"8") {
		t.Errorf("an Apply is due at %s; left is\n%s", due, memory)
	}
}
