package ipvs

import (
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// setKind is a set or map of the table that grows with the cluster.
type setKind uint8

const (
	inServices    setKind = iota // address, protocol, port: what happens to packets
	inNodePorts                  // protocol, port: the same
	inServers                    // address, protocol, port: our virtual servers
	inServerMarks                // mark: our virtual servers by mark
	inMarks                      // address, protocol, port: the mark of another virtual server
	inPortMarks                  // protocol, port: the same
	inExternal                   // address, protocol, port: frontends on addresses that are not bound
	inClusterIPs                 // address: bound, whose other ports are refused
	inNodeAddrs                  // address: accepts node ports
	inHairpin                    // endpoint, endpoint: reached itself
	inEndpoints                  // address: of TCP endpoints
	inHealthPorts                // port: of health checks
	setKinds
)

// Interval sets.
const (
	setServiceRanges = "service-ranges"
	setPodRanges     = "pod-ranges"
)

// name is the set's name.
func (k setKind) name() string {
	return [...]string{
		"services", "node-ports", "virtual-servers", "virtual-server-marks", "marks", "node-port-marks", "external",
		"cluster-ips", "node-port-addresses", "hairpin", "endpoint-addresses", "health-ports",
	}[k]
}

// set is the declaration.
func (k setKind) set(f plan.Family) *nft.Set {
	addr := nft.AddrType(nftFamily(f))
	front := []nft.Type{addr, nft.TypeProto, nft.TypePort}
	port := []nft.Type{nft.TypeProto, nft.TypePort}
	number := []nft.Type{nft.TypeNumber}
	s := [...]nft.Set{
		inServices:    {Key: front, Verdicts: true, Comment: "frontends: address, protocol, port"},
		inNodePorts:   {Key: port, Verdicts: true, Comment: "node ports"},
		inServers:     {Key: front, Comment: "virtual servers that svcproxy made"},
		inServerMarks: {Key: number, Comment: "virtual servers by mark that svcproxy made"},
		inMarks:       {Key: front, Data: number, Comment: "the whole cluster's endpoints, for pods and the node"},
		inPortMarks:   {Key: port, Data: number, Comment: "the same for node ports"},
		inExternal:    {Key: front, Comment: "frontends on addresses that are on no interface"},
		inClusterIPs:  {Key: []nft.Type{addr}, Comment: "on " + host.VIPDevice + "; undefined ports are refused"},
		inNodeAddrs:   {Key: []nft.Type{addr}, Comment: "addresses of the node that accept node ports"},
		inHairpin:     {Key: []nft.Type{addr, addr, nft.TypeProto, nft.TypePort}, Comment: "endpoints that reached themselves"},
		inEndpoints:   {Key: []nft.Type{addr}, Comment: "whose segments outside of any connection are dropped"},
		inHealthPorts: {Key: []nft.Type{nft.TypePort}, Comment: "health checks of Services"},
	}[k]
	s.Name = k.name()
	return &s
}

// element names an element of a set. One may be needed by several Service ports.
type element struct {
	kind  setKind
	proto plan.Protocol
	port  uint16
	mark  uint32 // inServerMarks
	addr  [16]byte
}

// content is what belongs to an element.
type content struct {
	chain  string // where a verdict leads
	mark   uint32 // in a map of marks
	remark string // the comment of a verdict
}

func frontElement(k setKind, p plan.Protocol, a netip.AddrPort) element {
	return element{kind: k, proto: p, port: a.Port(), addr: a.Addr().As16()}
}

func portElement(k setKind, p plan.Protocol, port uint16) element {
	return element{kind: k, proto: p, port: port}
}

func addrElement(k setKind, a netip.Addr) element { return element{kind: k, addr: a.As16()} }

func (e element) address(f plan.Family) netip.Addr {
	a := netip.AddrFrom16(e.addr)
	if f == plan.IPv4 {
		return a.Unmap()
	}
	return a
}

// encode is the element as the kernel has it.
func (e element) encode(f plan.Family, c content) nft.Element {
	a := e.address(f)
	var out nft.Element
	switch e.kind {
	case inServices, inServers, inMarks, inExternal:
		out.Key = nft.Concat(nil).Addr(a).Proto(uint8(e.proto)).Port(e.port).Tuple()
	case inNodePorts, inPortMarks:
		out.Key = nft.Concat(nil).Proto(uint8(e.proto)).Port(e.port).Tuple()
	case inServerMarks:
		out.Key = nft.Concat(nil).Number(e.mark).Tuple()
	case inClusterIPs, inNodeAddrs, inEndpoints:
		out.Key = nft.AddrTuple(a)
	case inHairpin:
		out.Key = nft.Concat(nil).Addr(a).Addr(a).Proto(uint8(e.proto)).Port(e.port).Tuple()
	case inHealthPorts:
		out.Key = nft.PortTuple(e.port)
	}
	switch e.kind {
	case inServices, inNodePorts:
		out.Verdict = nft.Verdict{Code: nft.Goto, Chain: c.chain}
		out.Comment = c.remark
	case inMarks, inPortMarks:
		out.Data = nft.Concat(nil).Number(c.mark).Tuple()
	}
	return out
}

// decode is the reverse of encode; false for what encode never writes.
func decode(f plan.Family, k setKind, in nft.Element) (element, content, bool) {
	e := element{kind: k}
	rest := in.Key
	addr := func() {
		var a netip.Addr
		a, rest = rest.Addr(nftFamily(f))
		if a.IsValid() {
			e.addr = a.As16()
		}
	}
	protoPort := func() {
		if len(rest) >= 4 {
			e.proto, rest = plan.Protocol(rest[0]), rest[4:]
		}
		e.port, _ = rest.Port()
	}
	switch k {
	case inServices, inServers, inMarks, inExternal:
		addr()
		protoPort()
	case inNodePorts, inPortMarks:
		protoPort()
	case inServerMarks:
		e.mark = rest.Number()
	case inClusterIPs, inNodeAddrs, inEndpoints:
		addr()
	case inHairpin:
		addr()
		addr()
		protoPort()
	case inHealthPorts:
		if len(rest) >= 2 {
			e.port = uint16(rest[0])<<8 | uint16(rest[1])
		}
	}
	c := content{chain: in.Verdict.Chain, remark: in.Comment, mark: in.Data.Number()}
	return e, c, e.encode(f, c) == in
}
