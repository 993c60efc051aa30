package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

func testEnv(families ...plan.Family) dataplane.Env {
	return dataplane.Env{
		Log: slog.New(slog.DiscardHandler), Stats: &plantest.Counts{},
		Families: families, MasqueradeBit: 14,
	}
}

// onFakes returns a backend on fakes of one store, and the fakes by family.
func onFakes(t testing.TB, store sys.Store, families ...plan.Family) (*backend, map[plan.Family]*sys.Fake) {
	t.Helper()
	fakes := map[plan.Family]*sys.Fake{}
	for _, f := range families {
		fakes[f] = sys.NewFake(sys.Family(f), store)
	}
	return withFakes(fakes, families...), fakes
}

// withFakes returns a new backend on existing fakes, as a process that starts again.
func withFakes(fakes map[plan.Family]*sys.Fake, families ...plan.Family) *backend {
	return newBackend(testEnv(families...), func(_ context.Context, f plan.Family) (sys.Tables, sys.Tables, error) {
		return fakes[f], nil, nil
	})
}

// always is a limit that makes every cluster a large one.
const always = -1

// setMany makes b take a cluster of more than n endpoints for a large one.
func setMany(t testing.TB, b *backend, n int) {
	t.Helper()
	if err := b.find(context.Background()); err != nil {
		t.Fatal(err)
	}
	for _, f := range b.families {
		f.many = n
	}
}

func mustApply(t testing.TB, b *backend, u plan.Update) {
	t.Helper()
	if err := b.Apply(context.Background(), u); err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

// state prints what the fakes hold.
func state(fakes map[plan.Family]*sys.Fake) string {
	var out string
	for _, f := range plan.Families {
		if fakes[f] != nil {
			out += fmt.Sprintf("# %s\n%s", f, fakes[f])
		}
	}
	return out
}

// The addresses of a small world, IPv4 and IPv6.
type world struct {
	family   plan.Family
	pods     netip.Prefix // of this node
	cluster  netip.Prefix // of all nodes
	services netip.Prefix
	node     []netip.Addr
	outside  netip.Addr
}

func testWorld(f plan.Family) world {
	if f == plan.IPv6 {
		return world{
			f, netip.MustParsePrefix("2001:db8:61:1::/64"), netip.MustParsePrefix("2001:db8:61::/48"), netip.MustParsePrefix("2001:db8:62::/112"),
			[]netip.Addr{netip.MustParseAddr("2001:db8:1::11"), netip.MustParseAddr("2001:db8:61:1::1")},
			netip.MustParseAddr("2001:db8:f::7"),
		}
	}
	return world{
		f, netip.MustParsePrefix("10.61.1.0/24"), netip.MustParsePrefix("10.61.0.0/16"), netip.MustParsePrefix("10.62.0.0/16"),
		[]netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("10.61.1.1")},
		netip.MustParseAddr("198.51.100.7"),
	}
}

// at returns the n-th address of a kind.
func (w world) at(kind string, n int) netip.Addr {
	format := map[string]string{
		"pod": "10.61.1.%d", "remote": "10.61.2.%d", "service": "10.62.0.%d", "external": "203.0.113.%d", "other": "198.51.100.%d",
	}[kind]
	if w.family == plan.IPv6 {
		format = map[string]string{
			"pod": "2001:db8:61:1::%x", "remote": "2001:db8:61:2::%x", "service": "2001:db8:62::%x", "external": "2001:db8:cb::%x", "other": "2001:db8:f::%x",
		}[kind]
	}
	return netip.MustParseAddr(fmt.Sprintf(format, n))
}

var (
	toCluster     = plan.Route{Pool: plan.Cluster}
	toClusterSNAT = plan.Route{Pool: plan.Cluster, SNAT: true}
	toLocal       = plan.Route{Pool: plan.Local}
	toLocalSNAT   = plan.Route{Pool: plan.Local, SNAT: true}
	rejected      = plan.Route{Verdict: plan.Reject}
	dropped       = plan.Route{Verdict: plan.Drop}
)

// routesFor lists the rows of the policy table by kind and endpoints.
func routesFor(kind plan.Kind, cluster, local bool) [][3]plan.Route {
	all := func(r plan.Route) [3]plan.Route { return [3]plan.Route{r, r, r} }
	if !cluster && !local {
		return [][3]plan.Route{all(rejected)}
	}
	if kind == plan.ClusterIP {
		rows := [][3]plan.Route{{toCluster, toClusterSNAT, toClusterSNAT}, all(toCluster), all(toClusterSNAT)}
		if local {
			return append(rows, [3]plan.Route{toLocal, toLocalSNAT, toLocalSNAT})
		}
		return append(rows, all(dropped))
	}
	rows := [][3]plan.Route{all(toClusterSNAT)}
	if local {
		return append(rows, [3]plan.Route{toCluster, toClusterSNAT, toLocal}, [3]plan.Route{toLocal, toClusterSNAT, toLocal})
	}
	return append(rows, [3]plan.Route{toCluster, toClusterSNAT, dropped}, [3]plan.Route{dropped, toClusterSNAT, dropped})
}

// randomService makes a Service port number n of a family.
func randomService(rng *rand.Rand, w world, n int, known bool) *plan.ServicePort {
	sp := &plan.ServicePort{ID: plan.ID{
		Namespace: "ns", Name: fmt.Sprintf("svc-%d", n/2), Port: []string{"", "http"}[n%2],
		Protocol: []plan.Protocol{plan.TCP, plan.UDP, plan.SCTP}[rng.IntN(3)], Family: w.family,
	}}
	count := []int{0, 1, 2, 5, 40}[rng.IntN(5)]
	local := rng.IntN(3) > 0
	for i := range count {
		e := plan.Endpoint{Weight: uint16(rng.IntN(4)), Addr: netip.AddrPortFrom(w.at("remote", n*3%100+i+1), 8080), Elsewhere: rng.IntN(2) > 0}
		if local && i%2 == 0 {
			e = plan.Endpoint{Weight: uint16(rng.IntN(4)), Addr: netip.AddrPortFrom(w.at("pod", n*3%100+i+10), 8080), OnNode: true}
			sp.Pools[plan.Local] = append(sp.Pools[plan.Local], e)
		}
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], e)
	}
	for _, p := range sp.Pools {
		slices.SortFunc(p, func(a, b plan.Endpoint) int { return a.Addr.Compare(b.Addr) })
	}
	if rng.IntN(4) == 0 {
		sp.Affinity = 3 * time.Hour
	}
	pick := func(k plan.Kind) [3]plan.Route {
		rows := routesFor(k, len(sp.Pools[plan.Cluster]) > 0, len(sp.Pools[plan.Local]) > 0)
		return rows[rng.IntN(len(rows))]
	}
	sp.Frontends = []plan.Frontend{{Kind: plan.ClusterIP, Addr: w.at("service", n/2+1), Port: uint16(80 + n%2), Route: pick(plan.ClusterIP)}}
	external := pick(plan.LoadBalancerIP)
	if !known && external[plan.FromPod].Pool == plan.Cluster && external[plan.FromOutside].Pool == plan.Local {
		external[plan.FromPod] = toLocal
	}
	if rng.IntN(2) > 0 {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: w.at("external", n/2+1), Port: uint16(90 + n%2), Route: external})
	}
	if rng.IntN(2) > 0 {
		f := plan.Frontend{Kind: plan.LoadBalancerIP, Addr: w.at("external", 100+n/2), Port: uint16(90 + n%2), Route: external}
		if rng.IntN(2) > 0 {
			f.Allow = []netip.Prefix{netip.PrefixFrom(w.at("other", 0), w.outside.BitLen()-7).Masked()}
		}
		if rng.IntN(8) == 0 {
			f.Allow = []netip.Prefix{}
		}
		sp.Frontends = append(sp.Frontends, f)
	}
	if rng.IntN(2) > 0 {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Port: uint16(30000 + n*37), Route: external})
	}
	return sp
}

// localKinds is the number of ways that localTraffic knows.
const localKinds = 6

// localTraffic is one of the ways to recognise this node's pods.
func localTraffic(w world, kind int) plan.LocalTraffic {
	half := w.pods.Bits() + 1
	switch kind {
	case 1:
		return plan.LocalTraffic{Kind: plan.LocalInterface, Name: "cni0"}
	case 2:
		return plan.LocalTraffic{Kind: plan.LocalInterfacePrefix, Name: "cn"}
	case 3:
		return plan.LocalTraffic{Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{w.pods}}
	case 4:
		return plan.LocalTraffic{Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{
			netip.PrefixFrom(w.pods.Addr(), half), netip.PrefixFrom(w.at("pod", 128), half).Masked(),
		}}
	case 5: // pods of other nodes count as this node's
		return plan.LocalTraffic{Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{w.cluster}}
	}
	return plan.LocalTraffic{}
}

// randomNode makes a node for the families.
func randomNode(rng *rand.Rand, families ...plan.Family) *plan.Node {
	n := &plan.Node{Name: "alder", NodePorts: map[plan.Family]plan.NodePorts{}, Local: map[plan.Family]plan.LocalTraffic{}}
	kind := rng.IntN(localKinds)
	for _, f := range families {
		w := testWorld(f)
		n.Addrs = append(n.Addrs, w.node...)
		n.Addrs = append(n.Addrs, w.at("external", 100)) // a Service's, on an interface
		n.NodePorts[f] = plan.NodePorts{All: rng.IntN(2) > 0, Addrs: w.node}
		if !n.NodePorts[f].All {
			n.NodePorts[f] = plan.NodePorts{Addrs: w.node[:1]}
		}
		n.Local[f] = localTraffic(w, kind)
		if rng.IntN(2) > 0 {
			n.ServiceCIDRs = append(n.ServiceCIDRs, w.services)
		}
	}
	return n
}

// randomPlan makes a plan; or, from another one, one that differs a little.
func randomPlan(rng *rand.Rand, from *plan.Plan, families ...plan.Family) *plan.Plan {
	const services = 40
	p := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{}, Health: map[plan.HealthID]plan.HealthPort{}}
	if from != nil {
		maps.Copy(p.Services, from.Services)
		maps.Copy(p.Health, from.Health)
		p.Node = from.Node
	}
	if from == nil || rng.IntN(10) == 0 {
		p.Node = randomNode(rng, families...)
	}
	known := p.Node.Local[families[0]].Kind != plan.LocalUnknown
	for range 1 + rng.IntN(8) {
		w := testWorld(families[rng.IntN(len(families))])
		n := rng.IntN(services)
		name, port := fmt.Sprintf("svc-%d", n/2), []string{"", "http"}[n%2]
		maps.DeleteFunc(p.Services, func(id plan.ID, _ *plan.ServicePort) bool {
			return id.Name == name && id.Port == port && id.Family == w.family
		})
		if rng.IntN(4) > 0 {
			sp := randomService(rng, w, n, known)
			p.Services[sp.ID] = sp
		}
		if rng.IntN(4) == 0 {
			id := plan.HealthID{Service: plan.Name{Namespace: "ns", Name: name}, Family: w.family}
			p.Health[id] = plan.HealthPort{Port: uint16(32000 + n)}
		}
	}
	return p
}
