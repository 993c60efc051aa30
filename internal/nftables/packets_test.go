package nftables

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
)

// fate is what happens to a packet: an outcome, and shares by "endpoint+snat".
type fate struct {
	outcome plan.Outcome
	shares  map[string]float64
}

func (f fate) equal(o fate) bool {
	if f.outcome != o.outcome || len(f.shares) != len(o.shares) {
		return false
	}
	for k, v := range f.shares {
		if math.Abs(v-o.shares[k]) > 1e-6 {
			return false
		}
	}
	return true
}

// planned is what the plan says.
func planned(p *plan.Plan, pkt plan.Packet) fate {
	r := plan.Eval(p, pkt)
	out := fate{outcome: r.Outcome, shares: map[string]float64{}}
	for _, e := range r.Endpoints {
		out.shares[arrival(e.Addr, e.SNAT)] += e.Share
	}
	return out
}

func arrival(to netip.AddrPort, masqueraded bool) string {
	if masqueraded {
		return to.String() + "+snat"
	}
	return to.String()
}

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
func walked(t testing.TB, tables *walk.Tables, p *plan.Plan, pkt plan.Packet) fate {
	t.Helper()
	out := fate{shares: map[string]float64{}}
	for misses, mass := []uint32(nil), 1.0; ; {
		l := walkLevel(t, tables, p, pkt, misses)
		if len(misses) > 0 && l.outcome != out.outcome {
			t.Errorf("%+v: mixed outcomes %s and %s", pkt, out.outcome, l.outcome)
		}
		out.outcome = l.outcome
		hit := mass / float64(l.choices)
		again := l.next == l.choices // the rest is shared out in the same way
		if again {
			hit = mass / float64(l.choices-l.missed)
		}
		for to, n := range l.hits {
			out.shares[to] += hit * float64(n)
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
				l.hits[arrival(f.Dst, f.Masqueraded)]++
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

// packetsFor lists packets that may tell something about a plan.
func packetsFor(rng *rand.Rand, p *plan.Plan, w world) []plan.Packet {
	type target struct {
		proto plan.Protocol
		to    netip.AddrPort
	}
	var targets []target
	add := func(pr plan.Protocol, a netip.Addr, port uint16) {
		targets = append(targets, target{pr, netip.AddrPortFrom(a, port)})
	}
	sources := map[netip.Addr]string{
		w.at("pod", 250): "cni0", w.at("client", 7): "eth0", w.at("client", 200): "eth0", w.at("client", 101): "eth0", w.node[0]: "",
	}
	for _, sp := range p.Services {
		if sp.ID.Family != w.family {
			continue
		}
		for _, f := range sp.Frontends {
			if f.Kind == plan.NodePort {
				for _, a := range w.node {
					add(sp.ID.Protocol, a, f.Port)
				}
				continue
			}
			add(sp.ID.Protocol, f.Addr, f.Port)
			add(sp.ID.Protocol, f.Addr, f.Port+1000)
		}
		for _, e := range sp.Pools[plan.Cluster] {
			if rng.IntN(6) == 0 { // an endpoint as the client, perhaps its own
				sources[e.Addr.Addr()] = map[bool]string{true: "cni0", false: "eth0"}[e.OnNode]
			}
		}
	}
	add(plan.TCP, w.at("service", 250), 80)
	add(plan.TCP, w.node[0], 22)
	add(plan.TCP, w.at("client", 9), 80)
	from := slices.SortedFunc(maps.Keys(sources), netip.Addr.Compare)
	var out []plan.Packet
	for _, d := range targets {
		rng.Shuffle(len(from), func(i, j int) { from[i], from[j] = from[j], from[i] })
		for _, src := range from[:4] {
			out = append(out, plan.Packet{Proto: d.proto, Src: src, Dst: d.to, In: sources[src]})
		}
	}
	return out
}

// Packets meet in the table what the plan says about them.
func TestPacketsAsPlanned(t *testing.T) {
	for _, f := range plan.Families {
		for seed := range uint64(2 * localWays) {
			t.Run(fmt.Sprintf("%s/%d", f, seed), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, uint64(f)))
				memory := &fake.Tables{}
				b := newBackend(testEnv(f), memory)
				var p, last *plan.Plan
				for range 12 {
					p = randomPlan(rng, p, f)
					p.Node = randomNode(rng, int(seed)%localWays, f)
					mustApply(t, b, difference(last, p))
					last = p
				}
				c := mustRead(t, memory, f)
				tables := walk.New(owned.Family(f), c)
				for _, pkt := range packetsFor(rng, p, testWorld(f)) {
					if have, want := walked(t, tables, p, pkt), planned(p, pkt); !have.equal(want) {
						t.Fatalf("packet %+v:\nhave %v\nwant %v (%+v)\n%s", pkt, have, want, plan.Eval(p, pkt).Frontend, c)
					}
				}
			})
		}
	}
}
