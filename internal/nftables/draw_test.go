package nftables

import (
	"context"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
)

// More than half of the places are taken, and a draw fails for good less than once in
// 2^32.
func TestPlaces(t *testing.T) {
	const rare = 1.0 / (1 << 32)
	for n := 1; n <= slots.Most; n++ {
		places := slots.Places(n)
		if n == 1 {
			if places != 1 {
				t.Fatalf("one endpoint: drawn among %d", places)
			}
			continue
		}
		if places < n || places >= 2*n {
			t.Fatalf("%d endpoints: drawn among %d", n, places)
		}
		if miss := math.Pow(1-float64(n)/float64(places), float64(slots.Draws(places))); miss > rare {
			t.Fatalf("%d endpoints: %d draws among %d fail with probability %g", n, slots.Draws(places), places, miss)
		}
	}
}

// A packet whose draws all fail reaches an endpoint all the same.
func TestFailedDraws(t *testing.T) {
	memory := &fake.Tables{}
	mustApply(t, newBackend(testEnv(plan.IPv4), memory), plan.Update{Plan: webPlan(0, 1, 2, 3, 4)})
	tables := walk.New(nft.IPv4, mustRead(t, memory, plan.IPv4))
	draws := 0
	f := tables.Send(walk.Packet{
		Proto: 6, Src: netip.MustParseAddr("198.51.100.7"), In: "eth0",
		Dst: netip.AddrPortFrom(testWorld(plan.IPv4).at("service", 20), 80),
	}, func(n uint32) uint32 { draws++; return n - 1 })
	if want := slots.Draws(6) + 1; draws != want {
		t.Errorf("%d draws, want %d", draws, want)
	}
	if f.Dst.Port() != 8080 {
		t.Errorf("it is sent to %s", f.Dst)
	}
}

// An endpoint more or less leads no frontend to another chain while it is drawn among
// as many places.
func TestScalingWritesNoVerdict(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	from := webPlan(0, 1, 2, 3, 4)
	mustApply(t, b, plan.Update{Plan: from})
	memory.Refuse = func(ops []nft.Op) error {
		for i := range ops {
			if set := ops[i].Set; set == nil || set.Verdicts {
				t.Errorf("it does %s", &ops[i])
			}
		}
		return nil
	}
	for _, to := range []*plan.Plan{webPlan(0, 1, 2, 3, 4, 5), webPlan(0, 5, 2, 3, 4, 6, 7), webPlan(0, 5, 3, 6, 7)} {
		mustApply(t, b, difference(from, to))
		from = to
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
			sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: netip.AddrPortFrom(testWorld(plan.IPv4).at("pod", i+1), 8080), OnNode: true, Weight: w})
			sum += int(w)
		}
		p.Services[sp.ID] = &sp
		memory := &fake.Tables{}
		b := newBackend(testEnv(plan.IPv4), memory)
		if err := b.Apply(context.Background(), plan.Update{Plan: p}); err != nil {
			t.Fatal(err)
		}
		tables := walk.New(nft.IPv4, mustRead(t, memory, plan.IPv4))
		pkt := plan.Packet{Proto: plan.TCP, Src: netip.MustParseAddr("198.51.100.7"), Dst: netip.AddrPortFrom(testWorld(plan.IPv4).at("service", 20), 80), In: "eth0"}
		have := walked(t, tables, p, pkt)
		within := 1e-9
		if sum > slots.Most {
			within = float64(len(weights)+1) / slots.Most
		}
		for _, e := range sp.Pools[plan.Cluster] {
			want := float64(e.Weight) / float64(sum)
			if share := have.shares[arrival(e.Addr, true)]; math.Abs(share-want) > within || want == 0 && share != 0 {
				t.Errorf("weights %v: %s has share %g, want %g", weights, e.Addr, share, want)
			}
		}
	}
}
