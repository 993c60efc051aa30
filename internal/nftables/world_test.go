package nftables

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// counts are dataplane.Stats in memory; values add up.
type counts struct {
	mu sync.Mutex
	at map[string]float64
}

func (c *counts) Add(metric string, v float64, labels ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at == nil {
		c.at = map[string]float64{}
	}
	c.at[fmt.Sprint(metric, labels)] += v
}

func (c *counts) Set(metric string, v float64, labels ...string)     { c.Add(metric, v, labels...) }
func (c *counts) Observe(metric string, v float64, labels ...string) { c.Add(metric, v, labels...) }

func testEnv(families ...plan.Family) dataplane.Env {
	return dataplane.Env{Log: slog.New(slog.DiscardHandler), Stats: &counts{}, Families: families, MasqueradeBit: 14}
}

func mustApply(t testing.TB, b *backend, u plan.Update) {
	t.Helper()
	if err := b.Apply(context.Background(), u); err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

// difference makes the update from one plan to another, as a planner would.
func difference(a, b *plan.Plan) plan.Update {
	u := plan.Update{Plan: b, Node: a == nil || !a.Node.Equal(b.Node)}
	olds := map[plan.ID]*plan.ServicePort{}
	if a != nil {
		olds = a.Services
	}
	for id, old := range olds {
		if sp := b.Services[id]; sp != old {
			u.Changed = append(u.Changed, plan.Change{ID: id, Old: old, New: sp})
		}
	}
	for id, sp := range b.Services {
		if olds[id] == nil {
			u.Changed = append(u.Changed, plan.Change{ID: id, New: sp})
		}
	}
	slices.SortFunc(u.Changed, func(x, y plan.Change) int { return x.ID.Compare(y.ID) })
	return u
}

// state lists a family's table so that what may differ by history does not count:
// which endpoint has which slot, and whether the table goes by the other name.
func state(t testing.TB, tables nft.Tables, f plan.Family) string {
	t.Helper()
	for _, name := range owned.Tables(f) {
		c, err := tables.Read(context.Background(), name)
		if err != nil {
			continue
		}
		for _, set := range []string{setEndpoints, setPortEndpoints} {
			c.Elements[set] = regardlessOfSlots(c.Elements[set])
		}
		c.Table.Name = "svcproxy"
		return c.String()
	}
	return ""
}

// regardlessOfSlots renumbers the slots of each frontend and pool by endpoint.
func regardlessOfSlots(elements []nft.Element) []nft.Element {
	const number = 4 // bytes, at the end of a key
	pools := map[nft.Tuple][]nft.Element{}
	for _, e := range elements {
		front := e.Key[:len(e.Key)-number]
		pools[front] = append(pools[front], e)
	}
	var out []nft.Element
	for _, list := range pools {
		var slots, eps []nft.Tuple
		for _, p := range [][]nft.Element{local(list, false), local(list, true)} {
			slots, eps = slots[:0], eps[:0]
			for _, e := range p {
				slots, eps = append(slots, e.Key), append(eps, e.Data)
			}
			slices.Sort(slots)
			slices.Sort(eps)
			for i := range slots {
				out = append(out, nft.Element{Key: slots[i], Data: eps[i]})
			}
		}
	}
	return out
}

// local picks the elements of the Local pool, or the others.
func local(list []nft.Element, yes bool) []nft.Element {
	first := nft.Concat(nil).Number(slots.Local).Tuple()
	var out []nft.Element
	for _, e := range list {
		slot := e.Key[len(e.Key)-len(first):]
		if strings.Contains(string(slot), string(first[1:3])) == yes {
			out = append(out, e)
		}
	}
	return out
}

func firstDifference(have, want string) string {
	h, w := strings.Split(have, "\n"), strings.Split(want, "\n")
	for i := range min(len(h), len(w)) {
		if h[i] != w[i] {
			return fmt.Sprintf("line %d:\nhave %s\nwant %s", i+1, h[i], w[i])
		}
	}
	return fmt.Sprintf("have %d lines, want %d", len(h), len(w))
}

// The addresses of a small world.
type world struct {
	family                  plan.Family
	pods, cluster, services netip.Prefix
	node                    []netip.Addr
}

func testWorld(f plan.Family) world {
	w := world{family: f}
	prefixes := []string{"10.61.1.0/24", "10.61.0.0/16", "10.62.0.0/16"}
	addrs := []string{"192.0.2.11", "192.0.2.21"}
	if f == plan.IPv6 {
		prefixes = []string{"2001:db8:61:1::/64", "2001:db8:61::/48", "2001:db8:62::/112"}
		addrs = []string{"2001:db8:1::11", "2001:db8:1::21"}
	}
	w.pods, w.cluster, w.services = netip.MustParsePrefix(prefixes[0]), netip.MustParsePrefix(prefixes[1]), netip.MustParsePrefix(prefixes[2])
	for _, a := range addrs {
		w.node = append(w.node, netip.MustParseAddr(a))
	}
	return w
}

// at returns the n-th address of a kind.
func (w world) at(kind string, n int) netip.Addr {
	format := map[string]string{
		"pod": "10.61.1.%d", "remote": "10.61.2.%d", "service": "10.62.0.%d", "external": "203.0.113.%d", "client": "198.51.100.%d",
	}[kind]
	if w.family == plan.IPv6 {
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
func randomService(rng *rand.Rand, w world, n int) *plan.ServicePort {
	sp := &plan.ServicePort{ID: plan.ID{
		Namespace: "ns", Name: fmt.Sprintf("svc-%d", n/2), Port: []string{"", "http"}[n%2],
		Protocol: []plan.Protocol{plan.TCP, plan.UDP, plan.SCTP}[rng.IntN(3)], Family: w.family,
	}}
	here := rng.IntN(3) > 0
	for i := range []int{0, 1, 2, 5, 40}[rng.IntN(5)] {
		e := plan.Endpoint{Weight: uint16(rng.IntN(4)), Addr: netip.AddrPortFrom(w.at("remote", 1+(n*3+i)%100), 8080), Elsewhere: rng.IntN(2) > 0}
		if here && i%2 == 0 {
			e = plan.Endpoint{Weight: uint16(rng.IntN(4)), Addr: netip.AddrPortFrom(w.at("pod", 10+(n*3+i)%100), 8080), OnNode: true}
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
	sp.Frontends = []plan.Frontend{{Kind: plan.ClusterIP, Addr: w.at("service", n/2+1), Port: uint16(80 + n%2), Route: pick(plan.ClusterIP)}}
	if rng.IntN(2) > 0 {
		a := w.at("external", n/2+1)
		if n/2%3 == 0 {
			a = w.at("service", 100+n/2) // in a Service range
		}
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: a, Port: uint16(90 + n%2), Route: pick(plan.ExternalIP)})
	}
	if rng.IntN(2) > 0 {
		f := plan.Frontend{Kind: plan.LoadBalancerIP, Addr: w.at("external", 100+n/2), Port: uint16(90 + n%2), Route: pick(plan.LoadBalancerIP)}
		switch rng.IntN(8) {
		case 0:
			f.Allow = []netip.Prefix{}
		case 1, 2, 3:
			bits := w.node[0].BitLen()
			f.Allow = []netip.Prefix{netip.PrefixFrom(w.at("client", 0), bits-7), netip.PrefixFrom(w.at("client", 100), bits-3).Masked(), netip.PrefixFrom(w.node[0], bits)}
		}
		sp.Frontends = append(sp.Frontends, f)
	}
	if rng.IntN(2) > 0 {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Port: uint16(30000 + n), Route: pick(plan.NodePort)})
	}
	return sp
}

// randomNode makes a node; pods are recognised in the way given.
func randomNode(rng *rand.Rand, way int, families ...plan.Family) *plan.Node {
	n := &plan.Node{Name: "alder", NodePorts: map[plan.Family]plan.NodePorts{}, Local: map[plan.Family]plan.LocalTraffic{}}
	for _, f := range families {
		w := testWorld(f)
		n.Addrs = append(n.Addrs, w.node...)
		n.NodePorts[f] = plan.NodePorts{Addrs: w.node[:1+rng.IntN(2)]}
		n.Local[f] = localTraffic(w, way)
		if rng.IntN(2) > 0 {
			n.ServiceCIDRs = append(n.ServiceCIDRs, w.services)
		}
	}
	return n
}

const localWays = 5

func localTraffic(w world, way int) plan.LocalTraffic {
	half := w.pods.Bits() + 1
	switch way {
	case 1:
		return plan.LocalTraffic{Kind: plan.LocalInterface, Name: "cni0"}
	case 2:
		return plan.LocalTraffic{Kind: plan.LocalInterfacePrefix, Name: "cn"}
	case 3:
		return plan.LocalTraffic{Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{w.cluster}}
	case 4: // two ranges that touch
		return plan.LocalTraffic{Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{
			netip.PrefixFrom(w.at("pod", 128), half).Masked(), netip.PrefixFrom(w.pods.Addr(), half),
		}}
	}
	return plan.LocalTraffic{}
}

// randomPlan makes a plan; or, from another one, one that differs a little.
func randomPlan(rng *rand.Rand, from *plan.Plan, families ...plan.Family) *plan.Plan {
	const services = 30
	p := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{}}
	if from != nil {
		maps.Copy(p.Services, from.Services)
		p.Node = from.Node
	}
	if from == nil || rng.IntN(10) == 0 {
		p.Node = randomNode(rng, rng.IntN(localWays), families...)
	}
	for range 1 + rng.IntN(8) {
		w := testWorld(families[rng.IntN(len(families))])
		n := rng.IntN(services)
		sp := randomService(rng, w, n)
		for id, old := range p.Services { // nothing claims what another has
			if id.Family == w.family && (id.Name == sp.ID.Name && id.Port == sp.ID.Port || overlap(old, sp)) {
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
