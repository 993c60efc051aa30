package plan

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Packet is the first packet of a flow as it enters the node's IP stack.
type Packet struct {
	Proto Protocol
	Src   netip.Addr
	Dst   netip.AddrPort
	// In is the interface on which the packet came in; "" for a packet that a
	// process in the node's own network namespace sends.
	In string
}

// Outcome is what the node does with a packet.
type Outcome uint8

const (
	Pass      Outcome = iota // not a Service's business: routed as it is
	Refused                  // ICMP port unreachable, or a reset
	Dropped                  // silently
	Forwarded                // to one of Result.Endpoints
)

func (o Outcome) String() string {
	return [...]string{"pass", "refused", "dropped", "forwarded"}[o]
}

// Share is one endpoint that may answer a flow.
type Share struct {
	Endpoint
	// Share is the probability with which a new client gets the endpoint.
	Share float64
	// SNAT: the endpoint sees one of the node's addresses in place of the
	// client's. Endpoints of one result can differ: one that reaches itself
	// through a Service is always masqueraded.
	SNAT bool
}

// Result is the fate of a packet.
type Result struct {
	Outcome Outcome
	Origin  Origin
	// Service and Frontend are those that matched; Frontend is nil if none did.
	Service  ID
	Frontend *Frontend
	// Affinity is the time for which the same client keeps its endpoint.
	Affinity  time.Duration
	Endpoints []Share // with Forwarded
}

// String is one line for messages: "forwarded 10.61.1.5:8080 10.61.2.7:8080+snat".
func (r Result) String() string {
	var b strings.Builder
	b.WriteString(r.Outcome.String())
	for _, e := range r.Endpoints {
		fmt.Fprintf(&b, " %s", e.Addr)
		if e.SNAT {
			b.WriteString("+snat")
		}
	}
	return b.String()
}

// Origin says where a packet comes from, as the node recognises it.
func (n *Node) Origin(pkt Packet) Origin {
	if pkt.In == "" {
		return FromNode
	}
	l := n.Local[FamilyOf(pkt.Dst.Addr())]
	local := false
	switch l.Kind {
	case LocalPrefix:
		local = contains(l.Prefixes, pkt.Src)
	case LocalInterface:
		local = pkt.In == l.Name
	case LocalInterfacePrefix:
		local = strings.HasPrefix(pkt.In, l.Name)
	}
	if local {
		return FromPod
	}
	return FromOutside
}

// accepts reports whether a packet to the address a may be for a node port.
func (n *Node) accepts(a netip.Addr, from Origin) bool {
	np := n.NodePorts[FamilyOf(a)]
	if a.IsLoopback() {
		return np.Loopback && from == FromNode &&
			(a == netip.IPv6Loopback() || a == netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	for _, have := range np.Addrs {
		if have == a {
			return true
		}
	}
	return false
}

// Eval says what a node that carries out p does with pkt: the meaning of a plan,
// against which every mode is checked. It walks the whole plan, since it is for
// tests and questions, not for traffic.
//
// A frontend with the packet's own address goes before node ports. An undefined
// port of a ClusterIP is refused, an address within Node.ServiceCIDRs that no
// Service has is dropped, Frontend.Allow is checked before the route.
func Eval(p *Plan, pkt Packet) Result {
	r := Result{Origin: p.Node.Origin(pkt)}
	sp, f, known := find(p, pkt, r.Origin)
	if f == nil {
		switch {
		case known == addressClusterIP:
			r.Outcome = Refused
		case known == addressUnknown && contains(p.Node.ServiceCIDRs, pkt.Dst.Addr()):
			r.Outcome = Dropped
		}
		return r
	}
	r.Service, r.Frontend = sp.ID, f
	if f.Allow != nil && !contains(f.Allow, pkt.Src) {
		r.Outcome = Dropped
		return r
	}
	route := f.Route[r.Origin]
	switch route.Verdict {
	case Reject:
		r.Outcome = Refused
		return r
	case Drop:
		r.Outcome = Dropped
		return r
	}
	r.Affinity = sp.Affinity
	r.Endpoints = shares(sp.Pools[route.Pool], route.SNAT, pkt.Src)
	r.Outcome = Forwarded
	if len(r.Endpoints) == 0 {
		r.Outcome = Refused // nobody takes new flows
	}
	return r
}

// addressUse is what a plan knows of an address apart from its ports.
type addressUse uint8

const (
	addressUnknown   addressUse = iota
	addressExternal             // some frontend has it
	addressClusterIP            // a ClusterIP frontend has it
)

// find returns the frontend that pkt is for, nil if there is none, and what its
// destination address is.
func find(p *Plan, pkt Packet, from Origin) (*ServicePort, *Frontend, addressUse) {
	dst, family := pkt.Dst.Addr(), FamilyOf(pkt.Dst.Addr())
	var exact, port *Frontend
	var exactOf, portOf *ServicePort
	known := addressUnknown
	for _, sp := range p.Services {
		if sp.ID.Family != family {
			continue
		}
		for i := range sp.Frontends {
			f := &sp.Frontends[i]
			matches := sp.ID.Protocol == pkt.Proto && f.Port == pkt.Dst.Port()
			switch {
			case f.Kind == NodePort:
				if matches && p.Node.accepts(dst, from) {
					port, portOf = f, sp
				}
			case f.Addr == dst:
				use := addressExternal
				if f.Kind == ClusterIP {
					use = addressClusterIP
				}
				known = max(known, use)
				if matches {
					exact, exactOf = f, sp
				}
			}
		}
	}
	if exact != nil {
		return exactOf, exact, known
	}
	if known == addressClusterIP {
		return nil, nil, known
	}
	return portOf, port, known
}

// shares returns who answers among the endpoints, for a client at src.
func shares(pool []Endpoint, snat bool, src netip.Addr) []Share {
	total := 0
	for _, e := range pool {
		total += int(e.Weight)
	}
	var out []Share
	for _, e := range pool {
		if e.Weight > 0 {
			out = append(out, Share{
				Endpoint: e,
				Share:    float64(e.Weight) / float64(total),
				SNAT:     snat || e.Addr.Addr() == src,
			})
		}
	}
	return out
}
