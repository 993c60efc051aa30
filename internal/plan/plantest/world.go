package plantest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// World has the addresses of a small world: one family of a node, its pods and what is
// around.
type World struct {
	Family   plan.Family
	Pods     netip.Prefix // of this node
	Cluster  netip.Prefix // of all nodes
	Services netip.Prefix
	Node     []netip.Addr // the first is the primary one
}

// NewWorld returns the world of a family. IPv4 and IPv6 do not overlap.
func NewWorld(f plan.Family) World {
	w := World{Family: f}
	prefixes := []string{"10.61.1.0/24", "10.61.0.0/16", "10.62.0.0/16"}
	addrs := []string{"192.0.2.11", "192.0.2.21"}
	if f == plan.IPv6 {
		prefixes = []string{"2001:db8:61:1::/64", "2001:db8:61::/48", "2001:db8:62::/112"}
		addrs = []string{"2001:db8:1::11", "2001:db8:1::21"}
	}
	w.Pods, w.Cluster, w.Services = netip.MustParsePrefix(prefixes[0]), netip.MustParsePrefix(prefixes[1]), netip.MustParsePrefix(prefixes[2])
	for _, a := range addrs {
		w.Node = append(w.Node, netip.MustParseAddr(a))
	}
	return w
}

// At returns the n-th address of a kind: "pod", "remote" (another node's pod), "service",
// "external" or "client".
func (w World) At(kind string, n int) netip.Addr {
	format := map[string]string{
		"pod": "10.61.1.%d", "remote": "10.61.2.%d", "service": "10.62.0.%d", "external": "203.0.113.%d", "client": "198.51.100.%d",
	}[kind]
	if w.Family == plan.IPv6 {
		format = map[string]string{
			"pod": "2001:db8:61:1::%x", "remote": "2001:db8:61:2::%x", "service": "2001:db8:62::%x", "external": "2001:db8:cb::%x", "client": "2001:db8:f::%x",
		}[kind]
	}
	return netip.MustParseAddr(fmt.Sprintf(format, n))
}

// rows are the rows of the policy table that fit a kind of frontend.
func rows(kind plan.Kind, cluster, here bool) [][3]plan.Route {
	to := func(p plan.Pool, snat ...bool) (out [3]plan.Route) {
		for i, s := range snat {
			out[i] = plan.Route{Pool: p, SNAT: s}
		}
		return out
	}
	all := func(v plan.Verdict) [3]plan.Route { return [3]plan.Route{{Verdict: v}, {Verdict: v}, {Verdict: v}} }
	masqueraded := plan.Route{SNAT: true}
	switch {
	case !cluster && !here:
		return [][3]plan.Route{all(plan.Reject)}
	case kind == plan.ClusterIP && here:
		return [][3]plan.Route{
			to(plan.Cluster, false, true, true), to(plan.Cluster, false, false, false), to(plan.Cluster, true, true, true),
			to(plan.Local, false, true, true),
		}
	case kind == plan.ClusterIP:
		return [][3]plan.Route{to(plan.Cluster, false, true, true), to(plan.Cluster, true, true, true), all(plan.Drop)}
	case here:
		toLocal := plan.Route{Pool: plan.Local}
		return [][3]plan.Route{to(plan.Cluster, true, true, true), {{}, masqueraded, toLocal}, {toLocal, masqueraded, toLocal}}
	}
	dropped := plan.Route{Verdict: plan.Drop}
	return [][3]plan.Route{to(plan.Cluster, true, true, true), {{}, masqueraded, dropped}, {dropped, masqueraded, dropped}}
}

// randomService makes Service port number n. Some share addresses, so that
// frontends change hands when one goes and another comes.
func randomService(rng *rand.Rand, w World, n int) *plan.ServicePort {
	sp := &plan.ServicePort{ID: plan.ID{
		Namespace: "ns", Name: fmt.Sprintf("svc-%d", n/2), Port: []string{"", "http"}[n%2],
		Protocol: []plan.Protocol{plan.TCP, plan.UDP, plan.SCTP}[rng.IntN(3)], Family: w.Family,
	}}
	here := rng.IntN(3) > 0
	for i := range []int{0, 1, 2, 5, 40}[rng.IntN(5)] {
		e := plan.Endpoint{Weight: uint16(rng.IntN(4)), Addr: netip.AddrPortFrom(w.At("remote", 1+(n*3+i)%100), 8080), Elsewhere: rng.IntN(2) > 0}
		if here && i%2 == 0 {
			e = plan.Endpoint{Weight: uint16(rng.IntN(4)), Addr: netip.AddrPortFrom(w.At("pod", 10+(n*3+i)%100), 8080), OnNode: true}
			sp.Pools[plan.Local] = append(sp.Pools[plan.Local], e)
		}
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], e)
	}
	for _, p := range sp.Pools {
		slices.SortFunc(p, func(a, b plan.Endpoint) int { return a.Addr.Compare(b.Addr) })
	}
	if rng.IntN(3) == 0 {
		sp.Affinity = time.Duration(1+rng.IntN(3)) * time.Hour
	}
	pick := func(k plan.Kind) [3]plan.Route {
		r := rows(k, len(sp.Pools[plan.Cluster]) > 0, len(sp.Pools[plan.Local]) > 0)
		return r[rng.IntN(len(r))]
	}
	sp.Frontends = []plan.Frontend{{Kind: plan.ClusterIP, Addr: w.At("service", n/2+1), Port: uint16(80 + n%2), Route: pick(plan.ClusterIP)}}
	if rng.IntN(2) > 0 {
		a := w.At("external", n/2+1)
		if n/2%3 == 0 {
			a = w.At("service", 100+n/2) // in a Service range
		}
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: a, Port: uint16(90 + n%2), Route: pick(plan.ExternalIP)})
	}
	if rng.IntN(2) > 0 {
		f := plan.Frontend{Kind: plan.LoadBalancerIP, Addr: w.At("external", 100+n/2), Port: uint16(90 + n%2), Route: pick(plan.LoadBalancerIP)}
		switch rng.IntN(8) {
		case 0:
			f.Allow = []netip.Prefix{}
		case 1, 2, 3:
			bits := w.Node[0].BitLen()
			f.Allow = []netip.Prefix{netip.PrefixFrom(w.At("client", 0), bits-7), netip.PrefixFrom(w.At("client", 100), bits-3).Masked(), netip.PrefixFrom(w.Node[0], bits)}
		}
		sp.Frontends = append(sp.Frontends, f)
	}
	if rng.IntN(2) > 0 {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Port: uint16(30000 + n), Route: pick(plan.NodePort)})
	}
	return sp
}

// RandomNode makes a node; its pods are recognised in a way of LocalTraffic.
func RandomNode(rng *rand.Rand, way int, families ...plan.Family) *plan.Node {
	n := &plan.Node{Name: "alder", NodePorts: map[plan.Family]plan.NodePorts{}, Local: map[plan.Family]plan.LocalTraffic{}}
	for _, f := range families {
		w := NewWorld(f)
		n.Addrs = append(n.Addrs, w.Node...)
		n.NodePorts[f] = plan.NodePorts{Addrs: w.Node[:1+rng.IntN(2)]}
		n.Local[f] = LocalTraffic(w, way)
		if rng.IntN(2) > 0 {
			n.ServiceCIDRs = append(n.ServiceCIDRs, w.Services)
		}
	}
	return n
}

// LocalWays is how many ways LocalTraffic knows.
const LocalWays = 5

// LocalTraffic is how this node's pods are recognised; way is below LocalWays, and 0
// means not at all.
func LocalTraffic(w World, way int) plan.LocalTraffic {
	half := w.Pods.Bits() + 1
	switch way {
	case 1:
		return plan.LocalTraffic{Kind: plan.LocalInterface, Name: "cni0"}
	case 2:
		return plan.LocalTraffic{Kind: plan.LocalInterfacePrefix, Name: "cn"}
	case 3:
		return plan.LocalTraffic{Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{w.Cluster}}
	case 4: // two ranges that touch
		return plan.LocalTraffic{Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{
			netip.PrefixFrom(w.At("pod", 128), half).Masked(), netip.PrefixFrom(w.Pods.Addr(), half),
		}}
	}
	return plan.LocalTraffic{}
}

// RandomPlan makes a plan; or, from another one, one that differs a little.
func RandomPlan(rng *rand.Rand, from *plan.Plan, families ...plan.Family) *plan.Plan {
	const services = 30
	p := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{}}
	if from != nil {
		maps.Copy(p.Services, from.Services)
		p.Node = from.Node
	}
	if from == nil || rng.IntN(10) == 0 {
		p.Node = RandomNode(rng, rng.IntN(LocalWays), families...)
	}
	for range 1 + rng.IntN(8) {
		w := NewWorld(families[rng.IntN(len(families))])
		n := rng.IntN(services)
		sp := randomService(rng, w, n)
		for id, old := range p.Services { // nothing claims what another has
			if id.Family == w.Family && (id.Name == sp.ID.Name && id.Port == sp.ID.Port || overlap(old, sp)) {
				delete(p.Services, id)
			}
		}
		if rng.IntN(4) > 0 {
			p.Services[sp.ID] = sp
		}
		if rng.IntN(4) == 0 { // the same frontends under another name
			heir := *sp
			heir.ID.Namespace = "heir"
			delete(p.Services, sp.ID)
			p.Services[heir.ID] = &heir
		}
	}
	return p
}

func overlap(a, b *plan.ServicePort) bool {
	for _, f := range a.Frontends {
		for _, g := range b.Frontends {
			if a.ID.Protocol == b.ID.Protocol && f.Addr == g.Addr && f.Port == g.Port {
				return true
			}
		}
	}
	return false
}
