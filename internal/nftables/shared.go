package nftables

import (
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Priorities of base chains (linux/netfilter_ipv4.h). Clients are remembered right
// after the destination is translated.
const (
	priorityDNAT   = -100
	priorityRecord = -90
	priorityFilter = 0
	prioritySNAT   = 100
)

var protocols = [...]plan.Protocol{plan.TCP, plan.UDP, plan.SCTP}

// coreSets are the sets and maps that are always there, by name.
func (s settings) coreSets() map[string]*nft.Set {
	addr := nft.AddrType(owned.Family(s.family))
	endpoint := []nft.Type{addr, nft.TypePort}
	out := map[string]*nft.Set{}
	for _, set := range []*nft.Set{
		{Name: setServices, Key: []nft.Type{addr, nft.TypeProto, nft.TypePort}, Verdicts: true,
			Comment: "frontends: address, protocol, port"},
		{Name: setNodePorts, Key: []nft.Type{nft.TypeProto, nft.TypePort}, Verdicts: true, Comment: "node ports"},
		{Name: setEndpoints, Key: []nft.Type{addr, nft.TypeProto, nft.TypePort, nft.TypeNumber}, Data: endpoint,
			Comment: "endpoints by frontend and slot; slots from 0x00100000 on are those on this node"},
		{Name: setPortEndpoints, Key: []nft.Type{nft.TypeProto, nft.TypePort, nft.TypeNumber}, Data: endpoint,
			Comment: "endpoints by node port and slot"},
		{Name: setClusterIPs, Key: []nft.Type{addr}, Comment: "whose undefined ports are refused"},
		{Name: setExternal, Key: []nft.Type{addr}, Comment: "of Services; undefined ports are left alone"},
		{Name: setNodeAddrs, Key: []nft.Type{addr}, Comment: "addresses of the node that accept node ports"},
		{Name: setServiceRanges, Key: []nft.Type{addr}, Interval: true, Comment: "addresses that no Service has are dropped"},
		{Name: setPodRanges, Key: []nft.Type{addr}, Interval: true, Comment: "pods of this node"},
		{Name: setHairpin, Key: []nft.Type{addr, addr, nft.TypeProto, nft.TypePort}, Comment: "endpoints that reached themselves"},
		{Name: setEndpointAddrs, Key: []nft.Type{addr}, Comment: "whose segments outside of any connection are dropped"},
	} {
		out[set.Name] = set
	}
	for _, p := range protocols {
		sticky := &nft.Set{Name: setSticky + protoName(p), Key: endpoint, Verdicts: true, Comment: "frontends with affinity"}
		ports := &nft.Set{Name: setStickyPorts + protoName(p), Key: []nft.Type{nft.TypePort}, Verdicts: true, Comment: "node ports with affinity"}
		out[sticky.Name], out[ports.Name] = sticky, ports
	}
	return out
}

// inner are the chains to which base chains lead.
func (s settings) inner() []nft.Object {
	return []nft.Object{
		nft.NewChain(chainReject, "",
			s.rule(nft.IsProto(uint8(plan.TCP)), nft.Reject{Reset: true}),
			s.rule(nft.Reject{}),
		),
		nft.NewChain(chainServices, "what is sent to a Service",
			s.rule(nft.Dispatch{Fields: []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}, Map: setServices}),
			s.rule(nft.In{Fields: []nft.Field{nft.DstAddr}, Set: setClusterIPs}, nft.Do{Code: nft.Goto, Chain: chainReject}),
			s.rule(nft.In{Fields: []nft.Field{nft.DstAddr}, Set: setNodeAddrs}, nft.Dispatch{Fields: []nft.Field{nft.Proto, nft.DstPort}, Map: setNodePorts}),
			s.rule(nft.In{Fields: []nft.Field{nft.DstAddr}, Set: setServiceRanges},
				nft.In{Fields: []nft.Field{nft.DstAddr}, Set: setExternal, Not: true}, nft.Do{Code: nft.Drop}),
		),
	}
}

// base are the chains that the kernel calls. record: some Service has affinity.
func (s settings) base(record bool) []nft.Object {
	toServices := s.rule(nft.Do{Code: nft.Jump, Chain: chainServices})
	out := []nft.Object{
		nft.NewHooked(chainPrerouting, "nat", nft.Prerouting, priorityDNAT, toServices),
		nft.NewHooked(chainOutput, "nat", nft.Output, priorityDNAT, toServices),
		nft.NewHooked(chainPostrouting, "nat", nft.Postrouting, prioritySNAT,
			// The mark goes, so that a tunnel's packets are not translated again.
			s.rule(nft.Has{Field: nft.Mark, Bits: s.mark}, nft.ClearMark(s.mark), nft.Masquerade{}),
			s.rule(nft.In{Fields: []nft.Field{nft.SrcAddr, nft.DstAddr, nft.Proto, nft.DstPort}, Set: setHairpin}, nft.Masquerade{}),
		),
	}
	if !s.liberal {
		invalid := s.rule(nft.IsProto(uint8(plan.TCP)), nft.Has{Field: nft.State, Bits: nft.StateInvalid},
			nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: setEndpointAddrs}, nft.Do{Code: nft.Drop})
		out = append(out,
			nft.NewHooked(chainForward, "filter", nft.Forward, priorityFilter, invalid),
			nft.NewHooked(chainInput, "filter", nft.Input, priorityFilter, invalid)) // masqueraded flows
	}
	if !record {
		return out
	}
	translated := s.rule(nft.Has{Field: nft.State, Bits: nft.StateNew}, nft.Has{Field: nft.Status, Bits: nft.StatusDNAT},
		nft.Do{Code: nft.Jump, Chain: chainRecord})
	return append(out, s.recorder(),
		nft.NewHooked(chainRecordIn, "filter", nft.Prerouting, priorityRecord, translated),
		nft.NewHooked(chainRecordOut, "filter", nft.Output, priorityRecord, translated))
}
