package plan

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Write writes the plan's text form: one line per entry, in an order that depends
// on the plan only, so that two plans can be compared line by line. An entry that
// belongs to another is indented below it:
//
//	node alder
//	  address 192.0.2.11
//	  node-ports IPv4 all loopback
//	  node-port-address 192.0.2.11
//	  pods IPv4 from 10.61.0.0/16
//	  service-cidr 10.62.0.0/16
//	service default/web:http TCP IPv4 affinity=3h0m0s
//	  policy scheduler=wlc health-check=tcp,interval=5s,timeout=1s,rise=2,fall=3
//	  ClusterIP 10.62.0.20:80 pod=cluster node=cluster+snat outside=cluster+snat
//	  LoadBalancerIP 203.0.113.5:80 pod=cluster node=cluster+snat outside=local
//	    allow 198.51.100.0/25
//	  NodePort *:31080 pod=cluster node=cluster+snat outside=local
//	  endpoint 10.61.1.5:8080 cluster local here
//	  endpoint 10.61.2.7:8080 cluster elsewhere weight=3
//	health-check default/web IPv4 port=32100 local=1
//
// A frontend's line says what happens to packets from pods of this node, from the
// node itself and from outside; an endpoint's line says which pools it is in,
// "serving" if it is in ServicePort.Serving, and "here" or "elsewhere" if it is known
// whether it is on this node. A weight other than 1 is there, and what the
// Service's annotations choose (see [Policy.String]).
func Write(w io.Writer, p *Plan) error {
	b := bufio.NewWriter(w)
	if p.Node != nil {
		writeNode(b, p.Node)
	}
	for _, id := range slices.SortedFunc(maps.Keys(p.Services), ID.Compare) {
		writeServicePort(b, p.Services[id])
	}
	for _, id := range slices.SortedFunc(maps.Keys(p.Health), HealthID.Compare) {
		h := p.Health[id]
		fmt.Fprintf(b, "health-check %s %s port=%d local=%d\n", id.Service, id.Family, h.Port, h.Local)
	}
	if err := b.Flush(); err != nil {
		return fmt.Errorf("write the plan: %w", err)
	}
	return nil
}

// String is the text form that [Write] writes.
func (p *Plan) String() string {
	var b strings.Builder
	_ = Write(&b, p) // a strings.Builder takes everything
	return b.String()
}

// String is the text form that [Write] writes for one ServicePort.
func (s *ServicePort) String() string {
	var b strings.Builder
	writeServicePort(&b, s)
	return b.String()
}

func writeNode(w io.Writer, n *Node) {
	fmt.Fprintf(w, "node %s\n", n.Name)
	for _, a := range n.Addrs {
		fmt.Fprintf(w, "  address %s\n", a)
	}
	for _, f := range Families {
		if np, ok := n.NodePorts[f]; ok {
			fmt.Fprintf(w, "  node-ports %s %s\n", f, np)
			for _, a := range np.Addrs {
				fmt.Fprintf(w, "  node-port-address %s\n", a)
			}
		}
	}
	for _, f := range Families {
		if l, ok := n.Local[f]; ok {
			fmt.Fprintf(w, "  pods %s %s\n", f, l)
		}
	}
	for _, c := range n.ServiceCIDRs {
		fmt.Fprintf(w, "  service-cidr %s\n", c)
	}
}

// String says what is selected: "all loopback", "selected".
func (np NodePorts) String() string {
	s := "selected"
	if np.All {
		s = "all"
	}
	if np.Loopback {
		s += " loopback"
	}
	return s
}

// String says how pods are recognised: "from 10.61.0.0/16", "in cni0", "in veth*".
func (l LocalTraffic) String() string {
	switch l.Kind {
	case LocalPrefix:
		s := make([]string, len(l.Prefixes))
		for i, p := range l.Prefixes {
			s[i] = p.String()
		}
		return "from " + strings.Join(s, " ")
	case LocalInterface:
		return "in " + l.Name
	case LocalInterfacePrefix:
		return "in " + l.Name + "*"
	}
	return "unknown"
}

// String is "cluster", "local+snat", "reject" or "drop".
func (r Route) String() string {
	if r.Verdict != Forward {
		return r.Verdict.String()
	}
	if r.SNAT {
		return r.Pool.String() + "+snat"
	}
	return r.Pool.String()
}

func writeServicePort(w io.Writer, s *ServicePort) {
	fmt.Fprintf(w, "service %s %s %s", s.ID, s.ID.Protocol, s.ID.Family)
	if s.Affinity != 0 {
		fmt.Fprintf(w, " affinity=%s", s.Affinity)
	}
	fmt.Fprintln(w)
	if p := s.Chosen(); p != (Policy{}) {
		fmt.Fprintf(w, "  policy %s\n", p)
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		addr := fmt.Sprintf("*:%d", f.Port)
		if f.Addr.IsValid() {
			addr = netip.AddrPortFrom(f.Addr, f.Port).String()
		}
		fmt.Fprintf(w, "  %s %s", f.Kind, addr)
		for _, o := range Origins {
			fmt.Fprintf(w, " %s=%s", o, f.Route[o])
		}
		fmt.Fprintln(w)
		for _, p := range f.Allow {
			fmt.Fprintf(w, "    allow %s\n", p)
		}
		if f.Allow != nil && len(f.Allow) == 0 {
			fmt.Fprintln(w, "    allow nobody")
		}
	}
	writeEndpoints(w, s)
}

// writeEndpoints writes a line for each endpoint, whatever lists it is in; one that
// is in both pools in different ways gets two.
func writeEndpoints(w io.Writer, s *ServicePort) {
	words := map[Endpoint]string{}
	for _, p := range [...]Pool{Cluster, Local} {
		for _, e := range s.Pools[p] {
			words[e] += " " + p.String()
		}
	}
	serving := make(map[netip.AddrPort]bool, len(s.Serving)) // and not in a pool
	for _, a := range s.Serving {
		serving[a] = true
	}
	for e := range words {
		if _, ok := serving[e.Addr]; ok {
			words[e] += " serving"
			serving[e.Addr] = false
		}
	}
	for a, alone := range serving {
		if alone {
			words[Endpoint{Addr: a}] = " serving"
		}
	}
	for _, a := range s.Draining {
		words[Endpoint{Addr: a}] = " draining"
	}
	for _, e := range slices.SortedFunc(maps.Keys(words), compareEndpoints) {
		fmt.Fprintf(w, "  endpoint %s%s", e.Addr, words[e])
		switch {
		case e.OnNode:
			fmt.Fprint(w, " here")
		case e.Elsewhere:
			fmt.Fprint(w, " elsewhere")
		}
		if e.Weight != 1 && (words[e] != " serving" && words[e] != " draining") {
			fmt.Fprintf(w, " weight=%d", e.Weight)
		}
		fmt.Fprintln(w)
	}
}

func compareEndpoints(a, b Endpoint) int {
	rank := func(yes bool) int {
		if yes {
			return 0
		}
		return 1
	}
	return cmp.Or(
		a.Addr.Compare(b.Addr),
		cmp.Compare(rank(a.OnNode), rank(b.OnNode)),
		cmp.Compare(rank(a.Elsewhere), rank(b.Elsewhere)),
		cmp.Compare(a.Weight, b.Weight),
	)
}
