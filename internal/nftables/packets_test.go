package nftables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
)

// mustRead returns the table.
func mustRead(t testing.TB, tables nft.Tables, f plan.Family) *nft.Contents {
	t.Helper()
	c, err := tables.Read(context.Background(), owned.Tables(f)[0])
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// walked is what the table does, over all random choices. A number that nobody has
// changes nothing, whichever it is, so one stands for all when the next is drawn.
func walked(t testing.TB, tables *walk.Tables, p *plan.Plan, pkt plan.Packet) plantest.Fate {
	t.Helper()
	out := plantest.Fate{Shares: map[string]float64{}}
	for misses, mass := []uint32(nil), 1.0; ; {
		l := walkLevel(t, tables, p, pkt, misses)
		if len(misses) > 0 && l.outcome != out.Outcome {
			t.Errorf("%+v: mixed outcomes %s and %s", pkt, out.Outcome, l.outcome)
		}
		out.Outcome = l.outcome
		hit := mass / float64(l.choices)
		again := l.next == l.choices // the rest is shared out in the same way
		if again {
			hit = mass / float64(l.choices-l.missed)
		}
		for to, n := range l.hits {
			out.Shares[to] += hit * float64(n)
		}
		if l.missed == 0 || again {
			return out
		}
		mass *= float64(l.missed) / float64(l.choices)
		misses = append(misses, l.miss)
	}
}

// level is what happens for all numbers of one draw.
type level struct {
	outcome plan.Outcome
	choices uint32            // among how many is drawn; 1 if nothing is
	hits    map[string]uint32 // for how many of them an endpoint is reached
	missed  uint32            // for how many of them is drawn again
	miss    uint32            // one of these
	next    uint32            // and then among how many
}

// walkLevel tries all numbers of the draw that comes after those that miss.
func walkLevel(t testing.TB, tables *walk.Tables, p *plan.Plan, pkt plan.Packet, misses []uint32) level {
	t.Helper()
	in := walk.Packet{Proto: uint8(pkt.Proto), Src: pkt.Src, Dst: pkt.Dst, In: pkt.In, SrcLocal: slices.Contains(p.Node.Addrs, pkt.Src)}
	l := level{choices: 1, hits: map[string]uint32{}}
	for i := uint32(0); i < l.choices; i++ {
		tables.Forget()
		draws, next := 0, uint32(0)
		f := tables.Send(in, func(n uint32) uint32 {
			draws++
			switch at := draws - 1 - len(misses); {
			case at < 0:
				return misses[draws-1]
			case at == 0:
				l.choices = n
				return i
			case at == 1:
				next = n
			}
			return 0
		})
		o := plan.Pass
		switch {
		case f.Rejected:
			o = plan.Refused
		case f.Dropped:
			o = plan.Dropped
		case f.Dst != pkt.Dst:
			o = plan.Forwarded
			if next > 0 {
				l.missed, l.miss, l.next = l.missed+1, i, next
			} else {
				l.hits[plantest.Arrival(f.Dst, f.Masqueraded)]++
			}
		}
		if i > 0 && o != l.outcome {
			t.Errorf("%+v: mixed outcomes %s and %s", pkt, l.outcome, o)
		}
		if l.outcome = o; f.Mark != 0 {
			t.Errorf("%+v: leaves with mark %#x", pkt, f.Mark)
		}
	}
	return l
}

// Packets meet in the table what the plan says about them.
func TestPacketsAsPlanned(t *testing.T) {
	for _, f := range plan.Families {
		for seed := range uint64(2 * plantest.LocalWays) {
			t.Run(fmt.Sprintf("%s/%d", f, seed), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, uint64(f)))
				memory := &fake.Tables{}
				b := newBackend(testEnv(f), memory)
				var p, last *plan.Plan
				for range 12 {
					p = plantest.RandomPlan(rng, p, f)
					p.Node = plantest.RandomNode(rng, int(seed)%plantest.LocalWays, f)
					mustApply(t, b, plantest.Difference(last, p))
					last = p
				}
				c := mustRead(t, memory, f)
				tables := walk.New(owned.Family(f), c)
				for _, pkt := range plantest.PacketsFor(rng, p, plantest.NewWorld(f)) {
					if have, want := walked(t, tables, p, pkt), plantest.Planned(p, pkt); !have.Equal(want) {
						t.Fatalf("packet %+v:\nhave %v\nwant %v (%+v)\n%s", pkt, have, want, plan.Eval(p, pkt).Frontend, c)
					}
				}
			})
		}
	}
}
