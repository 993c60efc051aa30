package plantest

import (
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Fate is what happens to a packet: an outcome, and shares by "endpoint+snat".
type Fate struct {
	Outcome plan.Outcome
	Shares  map[string]float64
}

// Equal reports whether both are the same, but for rounding.
func (f Fate) Equal(o Fate) bool {
	if f.Outcome != o.Outcome || len(f.Shares) != len(o.Shares) {
		return false
	}
	for k, v := range f.Shares {
		if math.Abs(v-o.Shares[k]) > 1e-6 {
			return false
		}
	}
	return true
}

// Planned is what the plan says.
func Planned(p *plan.Plan, pkt plan.Packet) Fate {
	r := plan.Eval(p, pkt)
	out := Fate{Outcome: r.Outcome, Shares: map[string]float64{}}
	for _, e := range r.Endpoints {
		out.Shares[Arrival(e.Addr, e.SNAT)] += e.Share
	}
	return out
}

// Arrival names how a packet reaches an endpoint.
func Arrival(to netip.AddrPort, masqueraded bool) string {
	if masqueraded {
		return to.String() + "+snat"
	}
	return to.String()
}

// PacketsFor lists packets that may tell something about a plan.
func PacketsFor(rng *rand.Rand, p *plan.Plan, w World) []plan.Packet {
	type target struct {
		proto plan.Protocol
		to    netip.AddrPort
	}
	var targets []target
	add := func(pr plan.Protocol, a netip.Addr, port uint16) {
		targets = append(targets, target{pr, netip.AddrPortFrom(a, port)})
	}
	sources := map[netip.Addr]string{
		w.At("pod", 250): "cni0", w.At("client", 7): "eth0", w.At("client", 200): "eth0", w.At("client", 101): "eth0", w.Node[0]: "",
	}
	for _, sp := range p.Services {
		if sp.ID.Family != w.Family {
			continue
		}
		for _, f := range sp.Frontends {
			if f.Kind == plan.NodePort {
				for _, a := range w.Node {
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
	add(plan.TCP, w.At("service", 250), 80)
	add(plan.TCP, w.Node[0], 22)
	add(plan.TCP, w.At("client", 9), 80)
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
