package table

import (
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Kind is a set or map of the table that grows with the cluster.
type Kind uint8

const (
	Services     Kind = iota // address, protocol, port: what happens to packets
	NodePorts                // protocol, port: the same
	Servers                  // address, protocol, port: our virtual servers
	ServerMarks              // mark: our virtual servers by mark
	Marks                    // address, protocol, port: the mark of another virtual server
	PortMarks                // protocol, port: the same
	External                 // address, protocol, port: frontends on addresses that are not bound
	ClusterIPs               // address: bound, whose other ports are refused
	ExternalIPs              // address: not bound, whose other ports are left alone
	NodeAddrs                // address: accepts node ports
	Hairpin                  // endpoint, endpoint: reached itself
	Endpoints                // address: of TCP endpoints
	HealthPorts              // port: of health checks
	OwnEndpoints             // address, protocol, port: endpoints that are the node's own ports
	Kinds
)

// Interval sets.
const (
	ServiceRanges = "service-ranges"
	PodRanges     = "pod-ranges"
)

// Name is the set's name.
func (k Kind) Name() string {
	return [...]string{
		"services", "node-ports", "virtual-servers", "virtual-server-marks", "marks", "node-port-marks", "external",
		"cluster-ips", "external-addresses", "node-port-addresses", "hairpin", "endpoint-addresses", "health-ports", "own-endpoints",
	}[k]
}

// Set is the declaration.
func (k Kind) Set(f plan.Family) *nft.Set {
	addr := nft.AddrType(FamilyOf(f))
	front := []nft.Type{addr, nft.TypeProto, nft.TypePort}
	port := []nft.Type{nft.TypeProto, nft.TypePort}
	number := []nft.Type{nft.TypeNumber}
	s := [...]nft.Set{
		Services:     {Key: front, Verdicts: true, Comment: "frontends: address, protocol, port"},
		NodePorts:    {Key: port, Verdicts: true, Comment: "node ports"},
		Servers:      {Key: front, Comment: "virtual servers that svcproxy made"},
		ServerMarks:  {Key: number, Comment: "virtual servers by mark that svcproxy made"},
		Marks:        {Key: front, Data: number, Comment: "the whole cluster's endpoints, for pods and the node"},
		PortMarks:    {Key: port, Data: number, Comment: "the same for node ports"},
		External:     {Key: front, Comment: "frontends on addresses that are on no interface"},
		ClusterIPs:   {Key: []nft.Type{addr}, Comment: "on " + host.VIPDevice + "; undefined ports are refused"},
		ExternalIPs:  {Key: []nft.Type{addr}, Comment: "of Services; undefined ports are left alone"},
		NodeAddrs:    {Key: []nft.Type{addr}, Comment: "addresses of the node that accept node ports"},
		Hairpin:      {Key: []nft.Type{addr, addr, nft.TypeProto, nft.TypePort}, Comment: "endpoints that reached themselves"},
		Endpoints:    {Key: []nft.Type{addr}, Comment: "whose segments outside of any connection are dropped"},
		HealthPorts:  {Key: []nft.Type{nft.TypePort}, Comment: "health checks of Services"},
		OwnEndpoints: {Key: front, Comment: "endpoints at ports of the node, which may be those of virtual servers too"},
	}[k]
	s.Name = k.Name()
	return &s
}

// Element names an element of a set. One may be needed by several Service ports.
type Element struct {
	Kind  Kind
	Proto plan.Protocol
	Port  uint16
	Mark  uint32 // ServerMarks
	addr  [16]byte
}

// Content is what belongs to an element.
type Content struct {
	Chain  string // where a verdict leads
	Mark   uint32 // in a map of marks
	Remark string // the comment of a verdict
}

// At is the element of an address and port.
func At(k Kind, p plan.Protocol, a netip.AddrPort) Element {
	return Element{Kind: k, Proto: p, Port: a.Port(), addr: a.Addr().As16()}
}

// OnPort is the element of a port alone.
func OnPort(k Kind, p plan.Protocol, port uint16) Element {
	return Element{Kind: k, Proto: p, Port: port}
}

// OnAddr is the element of an address alone.
func OnAddr(k Kind, a netip.Addr) Element { return Element{Kind: k, addr: a.As16()} }

// Address is its address; unspecified if it has none.
func (e Element) Address(f plan.Family) netip.Addr {
	a := netip.AddrFrom16(e.addr)
	if f == plan.IPv4 {
		return a.Unmap()
	}
	return a
}

// Encode is the element as the kernel has it.
func (e Element) Encode(f plan.Family, c Content) nft.Element {
	a := e.Address(f)
	var out nft.Element
	switch e.Kind {
	case Services, Servers, Marks, External, OwnEndpoints:
		out.Key = nft.Concat(nil).Addr(a).Proto(uint8(e.Proto)).Port(e.Port).Tuple()
	case NodePorts, PortMarks:
		out.Key = nft.Concat(nil).Proto(uint8(e.Proto)).Port(e.Port).Tuple()
	case ServerMarks:
		out.Key = nft.Concat(nil).Number(e.Mark).Tuple()
	case ClusterIPs, ExternalIPs, NodeAddrs, Endpoints:
		out.Key = nft.AddrTuple(a)
	case Hairpin:
		out.Key = nft.Concat(nil).Addr(a).Addr(a).Proto(uint8(e.Proto)).Port(e.Port).Tuple()
	case HealthPorts:
		out.Key = nft.PortTuple(e.Port)
	}
	switch e.Kind {
	case Services, NodePorts:
		out.Verdict = nft.Verdict{Code: nft.Goto, Chain: c.Chain}
		out.Comment = c.Remark
	case Marks, PortMarks:
		out.Data = nft.Concat(nil).Number(c.Mark).Tuple()
	}
	return out
}

// Decode is the reverse of Encode; false for what Encode never writes.
func Decode(f plan.Family, k Kind, in nft.Element) (Element, Content, bool) {
	e := Element{Kind: k}
	rest := in.Key
	addr := func() {
		var a netip.Addr
		a, rest = rest.Addr(FamilyOf(f))
		if a.IsValid() {
			e.addr = a.As16()
		}
	}
	protoPort := func() {
		if len(rest) >= 4 {
			e.Proto, rest = plan.Protocol(rest[0]), rest[4:]
		}
		e.Port, _ = rest.Port()
	}
	switch k {
	case Services, Servers, Marks, External, OwnEndpoints:
		addr()
		protoPort()
	case NodePorts, PortMarks:
		protoPort()
	case ServerMarks:
		e.Mark = rest.Number()
	case ClusterIPs, ExternalIPs, NodeAddrs, Endpoints:
		addr()
	case Hairpin:
		addr()
		addr()
		protoPort()
	case HealthPorts:
		if len(rest) >= 2 {
			e.Port = uint16(rest[0])<<8 | uint16(rest[1])
		}
	}
	c := Content{Chain: in.Verdict.Chain, Remark: in.Comment, Mark: in.Data.Number()}
	return e, c, e.Encode(f, c) == in
}
