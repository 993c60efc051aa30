package demo

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// Hosts of the demo's network, besides the endpoints.
const (
	nodeHost    = "node"
	lanHost     = "lan" // routes between the node and everything that is not on it
	clientHost  = "client"
	outsideHost = "outside"
)

// endpoint is a host of the demo that serves as an endpoint.
type endpoint struct {
	name   string
	addr   netip.Addr
	onNode bool
	ports  []port
}

type port struct {
	proto plan.Protocol
	port  uint16
}

// nodeInterfaces are the node's interfaces and addresses: those of a node with
// docker and flannel on it.
func nodeInterfaces() []lab.EndSpec {
	p := netip.MustParsePrefix
	return []lab.EndSpec{
		{Host: nodeHost, Interface: "eth0", Addrs: []netip.Prefix{p("172.16.65.181/32"), p("2001:db8:65::181/128")}},
		{Host: nodeHost, Interface: "docker0", Addrs: []netip.Prefix{p("172.17.0.1/16")}},
		{Host: nodeHost, Interface: "flannel.1", Addrs: []netip.Prefix{p("10.244.0.0/32")}},
		{Host: nodeHost, Interface: "cni0", Addrs: []netip.Prefix{p("10.244.0.1/24"), p("fd00:244::1/64")}},
	}
}

// NodeAddrs are the addresses of those interfaces and loopback.
func NodeAddrs() []netip.Addr {
	out := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}
	for _, e := range nodeInterfaces() {
		for _, p := range e.Addrs {
			out = append(out, p.Addr())
		}
	}
	return out
}

// nodeAddr is the node's first address of a family.
func nodeAddr(f plan.Family) netip.Addr {
	return nodeInterfaces()[0].Addrs[map[plan.Family]int{plan.IPv4: 0, plan.IPv6: 1}[f]].Addr()
}

// addrsOf are the addresses of a client host, by its name.
func addrsOf(name string) []netip.Addr {
	a := netip.MustParseAddr
	switch name {
	case clientHost:
		return []netip.Addr{a("10.244.0.200"), a("fd00:244::200")}
	case outsideHost:
		return []netip.Addr{a("198.51.100.7"), a("2001:db8:51::7")}
	}
	return NodeAddrs()[2:4]
}

// endpointsOf returns a host for each endpoint address of the plan, named after
// the Service that has it.
func endpointsOf(p *plan.Plan) []*endpoint {
	byAddr := map[netip.Addr]*endpoint{}
	numbers := map[plan.Name]int{}
	for _, id := range slices.SortedFunc(maps.Keys(p.Services), plan.ID.Compare) {
		for _, pool := range p.Services[id].Pools {
			for _, e := range pool {
				d := byAddr[e.Addr.Addr()]
				if d == nil {
					numbers[id.Service()]++
					d = &endpoint{name: fmt.Sprintf("%s-%d", id.Name, numbers[id.Service()]), addr: e.Addr.Addr()}
					byAddr[d.addr] = d
				}
				d.onNode = d.onNode || e.OnNode
				if port := (port{id.Protocol, e.Addr.Port()}); !slices.Contains(d.ports, port) {
					d.ports = append(d.ports, port)
				}
			}
		}
	}
	return slices.SortedFunc(maps.Values(byAddr), func(a, b *endpoint) int { return a.addr.Compare(b.addr) })
}

// topology is the network: the node, behind it its pods, and beyond a router
// everything else.
func topology(endpoints []*endpoint, p *plan.Plan) lab.Topology {
	nics := nodeInterfaces()
	eth0, flannel := nics[0], nics[2]
	t := lab.Topology{
		Hosts: []lab.HostSpec{
			{Name: lanHost, Forwards: true, Addrs: []netip.Addr{netip.MustParseAddr("172.16.65.1"), netip.MustParseAddr("2001:db8:65::1")}},
			{Name: nodeHost, Forwards: true, OwnRun: true},
		},
		Links: []lab.LinkSpec{
			{A: eth0, B: lab.EndSpec{Host: lanHost, Interface: "to-node"}},
			{A: nics[1], B: lab.EndSpec{Host: nodeHost, Interface: "docker0-peer"}},
			{A: flannel, B: lab.EndSpec{Host: lanHost, Interface: "overlay"}},
			{A: nics[3], B: lab.EndSpec{Host: nodeHost, Interface: "cni0-peer"}},
		},
		Leaves: []lab.LeafSpec{
			{Name: clientHost, Behind: nodeHost, Addrs: addrsOf(clientHost), From: NodeAddrs()[2:4]},
			{Name: outsideHost, Behind: lanHost, Addrs: addrsOf(outsideHost)},
		},
	}
	for i, to := range []string{"0.0.0.0/0", "::/0"} {
		t.Routes = append(t.Routes, lab.RouteSpec{Host: nodeHost, To: netip.MustParsePrefix(to), Dev: "eth0",
			Via: t.Hosts[0].Addrs[i], Src: eth0.Addrs[i].Addr()})
	}
	toNode := append(NodeAddrs()[2:], addrsOf(clientHost)...)
	for _, e := range endpoints {
		if slices.Contains(NodeAddrs(), e.addr) {
			continue // a process of the node itself
		}
		leaf := lab.LeafSpec{Name: e.name, Behind: lanHost, Addrs: []netip.Addr{e.addr}}
		if e.onNode {
			leaf.Behind, leaf.From = nodeHost, NodeAddrs()[2:4]
			toNode = append(toNode, e.addr)
		} else if flannel.Addrs[0].Addr().Is4() == e.addr.Is4() && podRange().Contains(e.addr) {
			t.Routes = append(t.Routes, lab.RouteSpec{Host: nodeHost, To: netip.PrefixFrom(e.addr, e.addr.BitLen()), Dev: "flannel.1"})
		}
		t.Leaves = append(t.Leaves, leaf)
	}
	for _, sp := range p.Services { // addresses that lead to the node from outside
		for _, f := range sp.Frontends {
			if f.Kind == plan.ExternalIP || f.Kind == plan.LoadBalancerIP {
				toNode = append(toNode, f.Addr)
			}
		}
	}
	slices.SortFunc(toNode, netip.Addr.Compare)
	for _, a := range slices.Compact(toNode) {
		t.Routes = append(t.Routes, lab.RouteSpec{Host: lanHost, To: netip.PrefixFrom(a, a.BitLen()), Dev: "to-node"})
	}
	return t
}

// PodRanges are the demo cluster's pod ranges, as for --cluster-cidr.
func PodRanges() string { return podRange().String() + ",fd00:244::/48" }

func podRange() netip.Prefix { return netip.MustParsePrefix("10.244.0.0/16") }

// build makes the network and starts the endpoints' servers.
func build(p *plan.Plan) (*lab.Lab, error) {
	endpoints := endpointsOf(p)
	l, err := lab.Build(topology(endpoints, p))
	if err != nil {
		return nil, fmt.Errorf("build the demo's network: %w", err)
	}
	for _, e := range endpoints {
		h := l.Host(e.name)
		if h == nil {
			h = l.Host(nodeHost)
		}
		for _, port := range e.ports {
			if _, err := h.Serve(e.name, lab.Proto(port.proto), port.port); err != nil {
				return nil, fmt.Errorf("start the demo's servers: %w", joinClose(err, l))
			}
		}
	}
	return l, nil
}

// joinClose closes the network because of err.
func joinClose(err error, l *lab.Lab) error {
	if closing := l.Close(); closing != nil {
		return fmt.Errorf("%w; and %w", err, closing)
	}
	return err
}
