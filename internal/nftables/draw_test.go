package nftables

import (
	"context"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
)

// However many of the places are taken, all endpoints have the same share: exactly, or
// but for flows that are rarer than one in 2^32, which reach the first.
func TestDraws(t *testing.T) {
	const rare = 1.0 / (1 << 32)
	for n := 1; n <= slots.Most; n++ {
		places := slots.Places(n)
		if places < n || places >= 2*n && places > 4 {
			t.Fatalf("%d endpoints: drawn among %d", n, places)
		}
		below := slots.Draws(places)
		first, last, left := 0.0, 0.0, 1.0
		for _, m := range below {
			first += left / float64(m)
			if m >= n {
				last += left / float64(m)
			}
			left *= 1 - float64(min(m, n))/float64(m)
		}
		if left != 0 || math.Abs(last-1/float64(n)) > rare || math.Abs(first-1/float64(n)) > rare {
			t.Fatalf("%d endpoints: draws below %d give the first a share of %g, the last %g, nobody %g", n, below, first, last, left)
		}
	}
}

// A packet whose draws all fail reaches an endpoint all the same: the numbers of few
// places run out, the draws of many do.
func TestFailedDraws(t *testing.T) {
	for _, n := range []int{1, 3, 5, 65} {
		var pods []int
		for i := range n {
			pods = append(pods, i)
		}
		memory := &fake.Tables{}
		mustApply(t, newBackend(testEnv(plan.IPv4), memory), plan.Update{Plan: webPlan(0, pods...)})
		tables := walk.New(nft.IPv4, mustRead(t, memory, plan.IPv4))
		draws := 0
		f := tables.Send(walk.Packet{
			Proto: 6, Src: netip.MustParseAddr("198.51.100.7"), In: "eth0",
			Dst: netip.AddrPortFrom(plantest.NewWorld(plan.IPv4).At("service", 20), 80),
		}, func(n uint32) uint32 { draws++; return n - 1 })
		want := slots.Places(n) - n + 1
		if n == 65 {
			want = len(slots.Draws(slots.Places(n)))
		}
		if draws != want {
			t.Errorf("%d endpoints: %d draws, want %d", n, draws, want)
		}
		if f.Dst.Port() != 8080 {
			t.Errorf("%d endpoints: it is sent to %s", n, f.Dst)
		}
	}
}

// A packet that is between two rules of its chain when endpoints go, so many that their
// Service draws among fewer from then on, still reaches one that is left.
func TestRemovalOvertakesAPacket(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	p := webPlan(0, 1, 2, 3, 4, 5)
	mustApply(t, b, plan.Update{Plan: p})
	f := b.families[0]
	fr := f.settings.render(f.services[onlyID(p)]).fronts[0]
	for slot := 4; slot > 0; slot-- { // the chain is still that of before
		set, e := fr.slotElement(plan.Cluster, slot, p.Services[onlyID(p)].Pools[plan.Cluster][0].Addr)
		meddle(t, memory, nft.Op{Kind: nft.DeleteElements, Table: f.table, Set: f.core[set], Elements: []nft.Element{e}})
		tables := walk.New(nft.IPv4, mustRead(t, memory, plan.IPv4))
		for n := range uint32(8) {
			fate := tables.Send(walk.Packet{
				Proto: 6, Src: netip.MustParseAddr("198.51.100.7"), Dst: netip.AddrPortFrom(fr.Addr, fr.Port), In: "eth0",
			}, func(below uint32) uint32 { return min(n, below-1) })
			if fate.Dst.Port() != 8080 {
				t.Errorf("%d endpoints left, number %d: it is sent to %s", slot, n, fate.Dst)
			}
		}
	}
}

// An endpoint more or less leads no frontend to another chain while it is drawn among
// as many places.
func TestScalingWritesNoVerdict(t *testing.T) {
	for _, way := range [][]*plan.Plan{
		{webPlan(0, 1, 2), webPlan(0, 1, 2, 3), webPlan(0, 3), webPlan(0, 3, 4, 5, 6), webPlan(0, 5)},
		{webPlan(0, 1, 2, 3, 4, 5), webPlan(0, 1, 2, 3, 4, 5, 6), webPlan(0, 5, 2, 3, 4, 6, 7, 8, 9), webPlan(0, 5, 3, 6, 7, 9)},
	} {
		memory := &fake.Tables{}
		b := newBackend(testEnv(plan.IPv4), memory)
		mustApply(t, b, plan.Update{Plan: way[0]})
		memory.Refuse = func(ops []nft.Op) error {
			for i := range ops {
				if set := ops[i].Set; set == nil || set.Verdicts {
					t.Errorf("it does %s", &ops[i])
				}
			}
			return nil
		}
		for i := range way[1:] {
			mustApply(t, b, plantest.Difference(way[i], way[i+1]))
		}
	}
}

// Shares follow the weights: exactly, if their sum by the greatest common divisor is
// not above what a pool can have, else within the rounding.
func TestSharesByWeight(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 13))
	cases := [][]uint16{{1, 1}, {1, 2, 3}, {0, 5}, {100, 200, 300}, {256, 0, 1}, {65535, 65535, 1}, {65535, 1}, {7}, {50000, 30000, 20000, 10000}}
	for range 20 {
		weights := make([]uint16, 1+rng.IntN(40))
		for i := range weights {
			weights[i] = uint16(rng.IntN(100) * rng.IntN(10))
		}
		weights[0] = 10
		cases = append(cases, weights)
	}
	for _, weights := range cases {
		p := webPlan(0, 1)
		sp := *p.Services[onlyID(p)]
		sp.Pools[plan.Cluster] = nil
		sum := 0
		for i, w := range weights {
			sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: netip.AddrPortFrom(plantest.NewWorld(plan.IPv4).At("pod", i+1), 8080), OnNode: true, Weight: w})
			sum += int(w)
		}
		p.Services[sp.ID] = &sp
		memory := &fake.Tables{}
		b := newBackend(testEnv(plan.IPv4), memory)
		if err := b.Apply(context.Background(), plan.Update{Plan: p}); err != nil {
			t.Fatal(err)
		}
		tables := walk.New(nft.IPv4, mustRead(t, memory, plan.IPv4))
		pkt := plan.Packet{Proto: plan.TCP, Src: netip.MustParseAddr("198.51.100.7"), Dst: netip.AddrPortFrom(plantest.NewWorld(plan.IPv4).At("service", 20), 80), In: "eth0"}
		have := walked(t, tables, p, pkt)
		within := 1e-9
		if sum > slots.Most {
			within = float64(len(weights)+1) / slots.Most
		}
		for _, e := range sp.Pools[plan.Cluster] {
			want := float64(e.Weight) / float64(sum)
			if share := have.Shares[plantest.Arrival(e.Addr, true)]; math.Abs(share-want) > within || want == 0 && share != 0 {
				t.Errorf("weights %v: %s has share %g, want %g", weights, e.Addr, share, want)
			}
		}
	}
}
