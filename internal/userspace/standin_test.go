package userspace

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// While no process relays, packets meet what plan.Eval says all the same, endpoints
// and their sources included; what the loop wants then is not written; and the next
// process has the tables as a fresh start has them.
func TestTheKernelStandsIn(t *testing.T) {
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 9))
		r := newRig(t, nil)
		p := randomPlan(rng, nil)
		for range 12 {
			p = randomPlan(rng, p)
		}
		r.mustApply(t, plan.Update{Plan: p})
		before := map[plan.Family]string{}
		for _, f := range plan.Families {
			before[f] = state(t, r.tables, f)
		}
		r.standIn(context.Background())
		for _, f := range plan.Families {
			c, err := r.tables.Read(context.Background(), tableOf(f))
			if err != nil {
				t.Fatal(err)
			}
			tables := walk.New(familyOf(f), c)
			for _, pkt := range packets(f) {
				compareDirectly(t, p, tables, pkt)
			}
		}
		commits := r.tables.Commits()
		r.mustApply(t, plantest.Difference(p, randomPlan(rng, p)))
		if n := r.tables.Commits() - commits; n > 0 {
			t.Errorf("a process that ends has written %d times", n)
		}
		r = newRig(t, r)
		r.mustApply(t, plan.Update{Plan: p})
		for _, f := range plan.Families {
			if after := state(t, r.tables, f); after != before[f] {
				t.Errorf("%s: %s", f, plantest.FirstDifference(after, before[f]))
			}
		}
	}
}

func compareDirectly(t *testing.T, p *plan.Plan, tables *walk.Tables, pkt plan.Packet) {
	t.Helper()
	want := plan.Eval(p, pkt)
	wanted := want.Outcome
	if wanted == plan.Forwarded && want.Service.Protocol == plan.SCTP {
		wanted = plan.Refused
	}
	for choice := range uint32(directSlots) {
		outcome, have := send(tables, pkt, choice)
		fits := func(e plan.Share) bool { return e.Addr == have.Dst && e.SNAT == have.Masqueraded }
		if outcome != wanted || outcome == plan.Forwarded && !slices.ContainsFunc(want.Endpoints, fits) {
			t.Errorf("%+v: %s %s, masqueraded %t, want %s", pkt, outcome, have.Dst, have.Masqueraded, want)
		}
	}
}

// Every endpoint of a small pool gets flows, and only those that take some.
func TestChoose(t *testing.T) {
	var pool []plan.Endpoint
	for n := range 3 {
		pool = append(pool, plan.Endpoint{Addr: netip.AddrPortFrom(at(plan.IPv4, "pod", n+1), 80), Weight: uint16(n)})
	}
	got := choose(pool)
	for n, e := range pool {
		if slices.Contains(got[:], e.Addr) != (n > 0) {
			t.Errorf("endpoint %d with weight %d: chosen %v", n, e.Weight, got)
		}
	}
}

// UDP flows move; endpoints that want a PROXY header are not led to; what a
// client's address is annotated to be counts.
func TestStandInByPolicy(t *testing.T) {
	r := newRig(t, nil)
	p := webPlan(plan.UDP, 5)
	r.mustApply(t, plantest.Difference(nil, p))
	vip := netip.MustParseAddrPort("10.62.0.20:80")
	led := netip.AddrPortFrom(listeners.Class(0).Addr(listeners.DefaultBlocks().V4), portFor(webID(plan.UDP)))
	r.flows[[2]netip.AddrPort{vip, led}] = 1
	r.standIn(context.Background())
	wantFlows(t, r, nil)

	endpoint := netip.AddrPortFrom(at(plan.IPv4, "pod", 5), 8080)
	for name, c := range map[string]struct {
		policy      plan.Policy
		led         bool
		masqueraded bool // from a pod
	}{
		"none":   {plan.Policy{}, true, false},
		"hidden": {plan.Policy{ClientAddress: plan.ClientAddressHidden}, true, true},
		"proxy":  {plan.Policy{ProxyProtocol: 2}, false, false},
	} {
		r := newRig(t, nil)
		p := webPlan(plan.TCP, 5)
		sp := *p.Services[webID(plan.TCP)]
		sp.Policy = &c.policy
		p.Services[sp.ID] = &sp
		for _, f := range plan.Families {
			p.Node.Local[f] = plan.LocalTraffic{Kind: plan.LocalInterface, Name: "cni0"}
		}
		r.mustApply(t, plantest.Difference(nil, p))
		r.standIn(context.Background())
		contents, err := r.tables.Read(context.Background(), nft.Table{Family: nft.IPv4, Name: tableName})
		if err != nil {
			t.Fatal(err)
		}
		_, have := send(walk.New(nft.IPv4, contents), plan.Packet{Proto: plan.TCP, Src: at(plan.IPv4, "pod", 9), Dst: vip, In: "cni0"}, 0)
		if (have.Dst == endpoint) != c.led || have.Masqueraded != c.masqueraded {
			t.Errorf("%s: to %s, masqueraded %t", name, have.Dst, have.Masqueraded)
		}
	}
}

// A process that another mode has taken over from leads nothing to itself and keeps
// what its open connections need; it removes that at its end, unless a later process of
// this mode has begun.
func TestRetire(t *testing.T) {
	ctx := context.Background()
	for _, later := range []bool{false, true} {
		r := newRig(t, nil)
		p := webPlan(plan.TCP, 5)
		r.mustApply(t, plantest.Difference(nil, p))
		if err := r.retire(); err != nil {
			t.Fatal(err)
		}
		if found, err := inForce(ctx, r.tables); found || err != nil {
			t.Errorf("still in force: %t, %v", found, err)
		}
		if c, err := r.tables.Read(ctx, tableOf(plan.IPv4)); err != nil || c.Chains[chainMarkIn] == nil || c.Chains[chainUnmarkOut] == nil {
			t.Errorf("the marks of open connections are gone: %v", err)
		}
		r.mustApply(t, plantest.Difference(p, webPlan(plan.TCP, 6)))
		if found, _ := inForce(ctx, r.tables); found {
			t.Error("a retired process leads packets to itself")
		}
		if later {
			newRig(t, r).mustApply(t, plantest.Difference(nil, p))
		}
		r.clear(ctx)
		if left := state(t, r.tables, plan.IPv4) != ""; left != later {
			t.Errorf("with a later process %t: the table is there: %t", later, left)
		}
	}
}
