package planner_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// chooser makes all choices of a generator: below n, at least 0.
type chooser interface{ IntN(n int) int }

// bytesChooser takes its choices from data, then always 0.
type bytesChooser struct{ data []byte }

func (b *bytesChooser) IntN(n int) int {
	if len(b.data) == 0 {
		return 0
	}
	v := int(b.data[0]) % n
	b.data = b.data[1:]
	return v
}

func (b *bytesChooser) empty() bool { return len(b.data) == 0 }

// generator makes facts out of few names, addresses and ports, so that Services
// meet often.
type generator struct{ c chooser }

func pick[T any](g generator, from ...T) T { return from[g.c.IntN(len(from))] }

func (g generator) chance(oneIn int) bool { return g.c.IntN(oneIn) == 1 }

func (g generator) name() cluster.Name {
	return cluster.Name{Namespace: pick(g, "a", "b"), Name: pick(g, "s", "t", "u", "v")}
}

func (g generator) address(v4, v6 string, n int) netip.Addr {
	if g.chance(2) {
		return netip.MustParseAddr(fmt.Sprintf(v6, g.c.IntN(n)+1))
	}
	return netip.MustParseAddr(fmt.Sprintf(v4, g.c.IntN(n)+1))
}

func (g generator) service(n cluster.Name) *cluster.Service {
	svc := &cluster.Service{
		Name: n, Created: int64(g.c.IntN(3)),
		Type:          pick[corev1.ServiceType](g, "LoadBalancer", "NodePort", "ClusterIP", "LoadBalancer", "ExternalName"),
		Headless:      g.chance(12),
		ExternalLocal: g.chance(2), InternalLocal: g.chance(3),
		HasProxyName:        g.chance(12),
		HealthCheckNodePort: uint16(pick(g, 0, 32100, 32101)),
		DNS:                 g.chance(5),
	}
	// ClusterIPs are the API server's to give: they rarely collide.
	own := int(n.Namespace[0]-'a')*4 + int(n.Name[0]-'s') + 1
	if g.chance(10) {
		own = 99
	}
	if !svc.Headless {
		v4, v6 := netip.AddrFrom4([4]byte{10, 62, 0, byte(own)}), netip.MustParseAddr(fmt.Sprintf("2001:db8:62::%d", own))
		svc.ClusterIPs = pick(g, []netip.Addr{v4, v6}, []netip.Addr{v6, v4}, []netip.Addr{v4}, []netip.Addr{v6}, nil)
	}
	for range g.c.IntN(3) {
		svc.ExternalIPs = append(svc.ExternalIPs, g.address("203.0.113.%d", "2001:db8:113::%d", 3))
	}
	for range g.c.IntN(3) {
		svc.Ingress = append(svc.Ingress, cluster.Ingress{Addr: g.address("203.0.113.%d", "2001:db8:113::%d", 3), Proxy: g.chance(6)})
	}
	for range g.c.IntN(3) {
		svc.SourceRanges = append(svc.SourceRanges, netip.PrefixFrom(g.address("192.0.2.%d", "2001:db8:1::%d", 12), pick(g, 24, 32, 0, 8)).Masked())
	}
	if g.chance(3) {
		svc.Affinity = 10800e9
	}
	if g.chance(3) {
		svc.Annotations = map[string]string{
			"svcproxy.io/weights":        pick(g, "zone=2", "node=3,zone/z2=0", "node/birch=0,other=5", "wrong", "other=0"),
			"svcproxy.io/health-check":   pick(g, "tcp", "off", "tcp,port=80", "what"),
			"svcproxy.io/proxy-protocol": pick(g, "v1", "v9"),
		}
	}
	for i := range g.c.IntN(3) + 1 {
		svc.Ports = append(svc.Ports, cluster.ServicePort{
			Name: g.portName(i), Protocol: pick[corev1.Protocol](g, "TCP", "UDP", "SCTP"),
			Port: uint16(pick(g, 80, 443, 53)), NodePort: uint16(pick(g, 0, 31000, 31001, 31002)),
		})
	}
	return svc
}

func (g generator) portName(i int) cluster.String {
	return pick(g, cluster.Intern(fmt.Sprintf("p%d", i)), cluster.Intern(fmt.Sprintf("p%d", i)), cluster.Intern(""), cluster.String{})
}

func (g generator) slice(n cluster.Name) *cluster.Slice {
	sl := &cluster.Slice{
		Name:    cluster.Name{Namespace: n.Namespace, Name: fmt.Sprintf("%s-%d", n.Name, g.c.IntN(3))},
		Service: n.Name, IPv6: g.chance(2),
	}
	for i := range g.c.IntN(3) + 1 {
		sl.Ports = append(sl.Ports, cluster.SlicePort{
			Name: g.portName(i), Protocol: pick[corev1.Protocol](g, "TCP", "UDP", "SCTP"), Port: uint16(pick(g, 8080, 8081, 0)),
		})
	}
	for range g.c.IntN(5) {
		ep := cluster.Endpoint{
			Addr:     netip.AddrFrom4([4]byte{10, 61, 1, byte(g.c.IntN(4) + 1)}),
			Node:     pick(g, cluster.Intern("alder"), cluster.Intern("birch"), cluster.Intern(""), cluster.String{}),
			Topology: g.topology(),
			Flags:    cluster.EndpointFlags(g.c.IntN(8)),
		}
		if sl.IPv6 {
			ep.Addr = netip.MustParseAddr(fmt.Sprintf("2001:db8:61:1::%d", g.c.IntN(4)+1))
		}
		if g.chance(2) {
			ep.Flags = cluster.Ready | cluster.Serving
		}
		sl.Endpoints = append(sl.Endpoints, ep)
	}
	return sl
}

func (g generator) topology() cluster.Topology {
	set := pick(g, cluster.TopologySet{HintZones: "z1"}, cluster.TopologySet{HintZones: "z1\nz2"}, cluster.TopologySet{HintZones: "z2"},
		cluster.TopologySet{HintZones: "z1", HintNodes: "alder"}, cluster.TopologySet{HintZones: "z2", HintNodes: "birch"}, cluster.TopologySet{})
	set.Zone = pick(g, "z1", "z2", "")
	if set == (cluster.TopologySet{}) {
		return cluster.Topology{}
	}
	return mustTopology(set)
}

func (g generator) node() *cluster.Node {
	n := &cluster.Node{Name: "alder", Zone: pick(g, "z1", "z2", "")}
	n.Addrs = pick(g, []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8:1::11")}, []netip.Addr{netip.MustParseAddr("192.0.2.11")}, nil)
	n.PodCIDRs = pick(g, []netip.Prefix{netip.MustParsePrefix("10.61.1.0/24"), netip.MustParsePrefix("2001:db8:61:1::/64")}, []netip.Prefix{netip.MustParsePrefix("10.61.1.0/24")})
	return n
}

func (g generator) settings() settings {
	s := defaultSettings()
	s.MasqueradeAll = g.chance(4)
	s.AllowExternalIPs = !g.chance(4)
	s.DetectLocalMode = pick(g, "ClusterCIDR", "NodeCIDR", "BridgeInterface")
	s.ClusterCIDR = pick(g, []string{"10.61.0.0/16"}, []string{"10.61.0.0/16", "2001:db8:61::/48"}, nil)
	s.Families = pick(g, []string{"IPv4", "IPv6"}, []string{"IPv4"}, []string{"IPv6", "IPv4"})
	s.NodePortAddresses = pick(g, nil, []string{"primary"}, []string{"primary", "localhost"}, []string{"192.0.2.0/24"})
	s.Host = g.host()
	return s
}

func (g generator) host() []string {
	host := []string{"127.0.0.1", "192.0.2.11", "2001:db8:1::11"}
	for i := range 3 {
		if g.chance(3) {
			host = append(host, fmt.Sprintf("203.0.113.%d", i+1))
		}
	}
	return host
}

// step changes something in w.
func (g generator) step(w *world) {
	switch g.c.IntN(13) {
	case 0, 1, 2:
		w.sink.SetService(g.service(g.name()))
	case 3:
		w.sink.DeleteService(g.name())
	case 4, 5, 6, 7:
		w.sink.SetSlice(g.slice(g.name()))
	case 8:
		n := g.name()
		w.sink.DeleteSlice(cluster.Name{Namespace: n.Namespace, Name: fmt.Sprintf("%s-%d", n.Name, g.c.IntN(3))})
	case 9:
		w.sink.SetNode(g.node())
	case 10:
		w.settings.Host = g.host()
		w.setHost()
	case 11:
		if g.chance(3) {
			w.settings = g.settings()
			w.planner.SetOptions(w.settings.options(w.tb))
			w.setHost()
		} else {
			w.sync()
		}
	case 12:
		a := g.address("10.61.1.%d", "2001:db8:61:1::%d", 4)
		w.state.SetFailing(g.name(), netip.AddrPortFrom(a, uint16(pick(g, 8080, 8081))), g.chance(2))
	}
}

// checkInvariants checks what holds for every plan.
func checkInvariants(tb testing.TB, p *plan.Plan) {
	tb.Helper()
	type key struct {
		family   plan.Family
		protocol plan.Protocol
		addr     netip.Addr
		port     uint16
	}
	owner := map[key]plan.ID{}
	for id, sp := range p.Services {
		if id != sp.ID {
			tb.Errorf("%v is listed as %v", sp.ID, id)
		}
		if len(sp.Frontends) == 0 {
			tb.Errorf("%s has no frontends", id)
		}
		var used [2]bool
		for i, f := range sp.Frontends {
			if i > 0 && sp.Frontends[i-1].Compare(f) >= 0 {
				tb.Errorf("%s: frontends are not sorted", id)
			}
			if f.Addr.IsValid() != (f.Kind != plan.NodePort) || f.Addr.IsValid() && plan.FamilyOf(f.Addr) != id.Family {
				tb.Errorf("%s: frontend %v %v", id, f.Kind, f.Addr)
			}
			k := key{id.Family, id.Protocol, f.Addr, f.Port}
			if o, taken := owner[k]; taken {
				tb.Errorf("%s and %s both have %v", o, id, k)
			}
			owner[k] = id
			for _, o := range plan.Origins {
				r := f.Route[o]
				if r.Verdict != plan.Forward {
					continue
				}
				used[r.Pool] = true
				if len(sp.Pools[r.Pool]) == 0 {
					tb.Errorf("%s: %v from %v leads to nobody", id, f.Kind, o)
				}
				checkNoBrokenReply(tb, sp, f, o)
			}
		}
		for _, pool := range []plan.Pool{plan.Cluster, plan.Local} {
			checkPool(tb, sp, pool, used[pool])
		}
		if len(sp.Serving) > 0 && id.Protocol != plan.UDP {
			tb.Errorf("%s: Serving is for UDP only", id)
		}
		checkDraining(tb, sp)
	}
	for f, np := range p.Node.NodePorts {
		for _, a := range np.Addrs {
			if a.IsLoopback() || plan.FamilyOf(a) != f {
				tb.Errorf("node-port address %s of %s", a, f)
			}
		}
	}
}

// checkNoBrokenReply: traffic that comes from outside to an external address and
// leaves the node again without SNAT would be answered past this node.
func checkNoBrokenReply(tb testing.TB, sp *plan.ServicePort, f plan.Frontend, o plan.Origin) {
	tb.Helper()
	r := f.Route[o]
	if f.Kind == plan.ClusterIP || o != plan.FromOutside || r.SNAT {
		return
	}
	for _, e := range sp.Pools[r.Pool] {
		if !e.OnNode {
			tb.Errorf("%s: %v from outside leads to %s on another node without SNAT", sp.ID, f.Kind, e.Addr)
		}
	}
}

func checkPool(tb testing.TB, sp *plan.ServicePort, pool plan.Pool, used bool) {
	tb.Helper()
	eps := sp.Pools[pool]
	if !used && len(eps) > 0 {
		tb.Errorf("%s: nobody uses the %v pool", sp.ID, pool)
	}
	if cap(eps) != len(eps) {
		tb.Errorf("%s: the %v pool has spare capacity", sp.ID, pool)
	}
	for i, e := range eps {
		if i > 0 && eps[i-1].Addr.Compare(e.Addr) >= 0 {
			tb.Errorf("%s: the %v pool is not sorted", sp.ID, pool)
		}
		if e.Weight > 5 || plan.FamilyOf(e.Addr.Addr()) != sp.ID.Family || pool == plan.Local && !e.OnNode || e.OnNode && e.Elsewhere {
			tb.Errorf("%s: %v endpoint %+v", sp.ID, pool, e)
		}
	}
}

// checkDraining: only TCP ports have draining endpoints, sorted, and none that takes
// new flows.
func checkDraining(tb testing.TB, sp *plan.ServicePort) {
	tb.Helper()
	if len(sp.Draining) > 0 && sp.ID.Protocol != plan.TCP {
		tb.Errorf("%s: Draining is for TCP only", sp.ID)
	}
	if !slices.IsSortedFunc(sp.Draining, netip.AddrPort.Compare) {
		tb.Errorf("%s: Draining is not sorted: %v", sp.ID, sp.Draining)
	}
	for _, a := range sp.Draining {
		for _, pool := range sp.Pools {
			if slices.ContainsFunc(pool, func(e plan.Endpoint) bool { return e.Addr == a }) {
				tb.Errorf("%s: %s is draining and in a pool", sp.ID, a)
			}
		}
	}
}
