package userspace

import (
	"context"
	"fmt"
	"hash/fnv"
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
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/route"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

func testEnv() dataplane.Env {
	return dataplane.Env{Log: slog.New(slog.DiscardHandler), Stats: &plantest.Counts{}, Families: plan.Families[:], MasqueradeBit: 14}
}

// testSockets remember what is listened on. Ports follow from the Service port.
type testSockets struct {
	refuse bool
	open   map[plan.ID]*listeners.Set
}

func portFor(id plan.ID) uint16 {
	h := fnv.New32a()
	fmt.Fprint(h, listeners.Key(id))
	return uint16(20000 + h.Sum32()%20000)
}

func (s *testSockets) Serve(sp *plan.ServicePort, on listeners.Set, _ uint16) (uint16, error) {
	if s.refuse {
		return 0, fmt.Errorf("no port is free")
	}
	if s.open[sp.ID] == nil {
		s.open[sp.ID] = &listeners.Set{}
	}
	for c := range on {
		s.open[sp.ID][c] = s.open[sp.ID][c] || on[c]
	}
	return portFor(sp.ID), nil
}

func (s *testSockets) Trim(id plan.ID, on listeners.Set) { s.open[id] = &on }
func (s *testSockets) Drop(id plan.ID)                   { delete(s.open, id) }
func (s *testSockets) Known(f plan.Family) (out []plan.ID) {
	for id := range s.open {
		if id.Family == f {
			out = append(out, id)
		}
	}
	return out
}

// testFlows are the UDP flows of connection tracking, by destination, client's port
// and where they lead.
type testFlows map[[2]netip.AddrPort]int

func (f testFlows) DeleteUDP(_ context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort) bool) (int, error) {
	n := 0
	for k := range f {
		if slices.Contains(to, k[0]) && stale(k[0], k[1]) {
			delete(f, k)
			n++
		}
	}
	return n, nil
}

// rig is a backend on fakes.
type rig struct {
	*backend
	tables  *fake.Tables
	routing *route.Fake
	sockets *testSockets
	flows   testFlows
}

// newRig makes one; what stays over a restart is taken from another.
func newRig(t testing.TB, before *rig) *rig {
	t.Helper()
	r := &rig{tables: &fake.Tables{}, routing: &route.Fake{}, flows: testFlows{}}
	if before != nil {
		r.tables, r.routing, r.flows = before.tables, before.routing, before.flows
	}
	r.sockets = &testSockets{open: map[plan.ID]*listeners.Set{}}
	b, err := newBackend(testEnv(), Options{}, host{r.tables, r.routing, r.flows})
	if err != nil {
		t.Fatal(err)
	}
	b.begun = true
	for _, f := range b.families {
		f.sockets = r.sockets
	}
	r.backend = b
	return r
}

func (r *rig) mustApply(t testing.TB, u plan.Update) {
	t.Helper()
	if err := r.Apply(context.Background(), u); err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

// state lists the table of a family; "" if there is none.
func state(t testing.TB, tables nft.Tables, f plan.Family) string {
	t.Helper()
	c, err := tables.Read(context.Background(), tableOf(f))
	if err != nil {
		return ""
	}
	return c.String()
}

// at returns the n-th address of a kind.
func at(f plan.Family, kind string, n int) netip.Addr {
	formats := map[string][2]string{
		"pod": {"10.61.1.%d", "2001:db8:61:1::%x"}, "remote": {"10.61.2.%d", "2001:db8:61:2::%x"},
		"service": {"10.62.0.%d", "2001:db8:62::%x"}, "external": {"203.0.113.%d", "2001:db8:cb::%x"},
		"client": {"198.51.100.%d", "2001:db8:f::%x"}, "node": {"192.0.2.%d", "2001:db8:1::%x"},
	}[kind]
	format := formats[0]
	if f == plan.IPv6 {
		format = formats[1]
	}
	return netip.MustParseAddr(fmt.Sprintf(format, n))
}

func prefix(a netip.Addr, v4, v6 int) netip.Prefix {
	if a.Is4() {
		return netip.PrefixFrom(a, v4).Masked()
	}
	return netip.PrefixFrom(a, v6).Masked()
}

// randomNode makes a node on which pods are recognised in one of three ways.
func randomNode(rng *rand.Rand) *plan.Node {
	n := &plan.Node{Name: "alder", NodePorts: map[plan.Family]plan.NodePorts{}, Local: map[plan.Family]plan.LocalTraffic{}}
	way := rng.IntN(4)
	for _, f := range plan.Families {
		own := []netip.Addr{at(f, "node", 11), at(f, "node", 21)}
		n.Addrs = append(n.Addrs, own...)
		n.NodePorts[f] = plan.NodePorts{Addrs: own[:1+rng.IntN(2)]}
		n.Local[f] = []plan.LocalTraffic{
			{}, {Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{prefix(at(f, "pod", 0), 24, 64)}},
			{Kind: plan.LocalInterface, Name: "cni0"}, {Kind: plan.LocalInterfacePrefix, Name: "cn"},
		}[way]
		if rng.IntN(2) > 0 {
			n.ServiceCIDRs = append(n.ServiceCIDRs, prefix(at(f, "service", 0), 16, 112))
		}
	}
	return n
}

// randomRoutes are any: the mode does not decide which make sense.
func randomRoutes(rng *rand.Rand) (out [3]plan.Route) {
	for i := range out {
		switch rng.IntN(6) {
		case 0:
			out[i] = plan.Route{Verdict: plan.Reject}
		case 1:
			out[i] = plan.Route{Verdict: plan.Drop}
		default:
			out[i] = plan.Route{Pool: plan.Pool(rng.IntN(2)), SNAT: rng.IntN(2) > 0}
		}
	}
	return out
}

// randomService makes Service port number n. Some share addresses, so that frontends
// change hands when one goes and another comes.
func randomService(rng *rand.Rand, f plan.Family, n int) *plan.ServicePort {
	sp := &plan.ServicePort{ID: plan.ID{
		Namespace: "ns", Name: fmt.Sprintf("svc-%d", n/2), Port: []string{"", "http"}[n%2],
		Protocol: []plan.Protocol{plan.TCP, plan.UDP, plan.TCP, plan.UDP, plan.SCTP}[rng.IntN(5)], Family: f,
	}}
	for i := range rng.IntN(4) {
		e := plan.Endpoint{Addr: netip.AddrPortFrom(at(f, "remote", 1+(n*3+i)%100), 8080), Weight: uint16(rng.IntN(3))}
		if rng.IntN(2) > 0 {
			e.Addr, e.OnNode = netip.AddrPortFrom(at(f, "pod", 1+(n*3+i)%100), 8080), true
			sp.Pools[plan.Local] = append(sp.Pools[plan.Local], e)
		}
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], e)
	}
	sp.Frontends = []plan.Frontend{{Kind: plan.ClusterIP, Addr: at(f, "service", n/2+1), Port: uint16(80 + n%2), Route: randomRoutes(rng)}}
	if rng.IntN(2) > 0 {
		a := at(f, "external", n/2+1)
		if rng.IntN(2) > 0 { // one that lies in the Service range
			a = at(f, "service", n/2+100)
		}
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: a, Port: uint16(90 + n%2), Route: randomRoutes(rng)})
	}
	if rng.IntN(2) > 0 {
		fe := plan.Frontend{Kind: plan.LoadBalancerIP, Addr: at(f, "external", 100+n/2), Port: uint16(90 + n%2), Route: randomRoutes(rng)}
		switch rng.IntN(6) {
		case 0:
			fe.Allow = []netip.Prefix{}
		case 1, 2:
			fe.Allow = []netip.Prefix{prefix(at(f, "client", 0), 25, 121), prefix(at(f, "pod", 1), 32, 128)}
		case 3:
			fe.Allow = []netip.Prefix{prefix(at(f, "node", 11), 32, 128)}
		}
		sp.Frontends = append(sp.Frontends, fe)
	}
	if rng.IntN(2) > 0 {
		fe := plan.Frontend{Kind: plan.NodePort, Port: uint16(30000 + n), Route: randomRoutes(rng)}
		if rng.IntN(6) == 0 {
			fe.Allow = []netip.Prefix{prefix(at(f, "client", 0), 25, 121)}
		}
		sp.Frontends = append(sp.Frontends, fe)
	}
	return sp
}

// randomPlan makes a plan; or, from another one, one that differs a little.
func randomPlan(rng *rand.Rand, from *plan.Plan) *plan.Plan {
	const services = 24
	p := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{}}
	if from != nil {
		maps.Copy(p.Services, from.Services)
		p.Node = from.Node
	}
	if from == nil || rng.IntN(8) == 0 {
		p.Node = randomNode(rng)
	}
	for range 1 + rng.IntN(8) {
		sp := randomService(rng, plan.Families[rng.IntN(2)], rng.IntN(services))
		for id, old := range p.Services { // nothing claims what another has
			if id.Family == sp.ID.Family && (id.Name == sp.ID.Name && id.Port == sp.ID.Port || overlap(old, sp)) {
				delete(p.Services, id)
			}
		}
		switch rng.IntN(5) {
		case 0:
		case 1: // the same frontends under another name
			sp.ID.Namespace = "heir"
			fallthrough
		default:
			p.Services[sp.ID] = sp
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

// webPlan is a plan with one Service of a few endpoints.
func webPlan(p plan.Protocol, endpoints ...int) *plan.Plan {
	masqueraded := plan.Route{SNAT: true}
	sp := &plan.ServicePort{
		ID: plan.ID{Namespace: "default", Name: "web", Port: "http", Protocol: p, Family: plan.IPv4},
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: at(plan.IPv4, "service", 20), Port: 80, Route: [3]plan.Route{{}, masqueraded, masqueraded}},
			{Kind: plan.NodePort, Port: 31080, Route: [3]plan.Route{masqueraded, masqueraded, masqueraded}},
		},
		Affinity: time.Hour,
	}
	for _, n := range endpoints {
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: netip.AddrPortFrom(at(plan.IPv4, "pod", n), 8080), OnNode: true, Weight: 1})
	}
	node := randomNode(rand.New(rand.NewPCG(1, 1)))
	return &plan.Plan{Services: map[plan.ID]*plan.ServicePort{sp.ID: sp}, Node: node}
}
