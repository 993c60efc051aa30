package userspace

import (
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Priorities of base chains (linux/netfilter_ipv4.h). Marks are set after connection
// tracking (-200) and before the routing decision. They are taken off once they have
// done their work, before others look: what is routed keeps its route, and kubelets
// before 1.28 drop packets with bit 15 in the filter tables.
const (
	priorityMark   = -150
	priorityDNAT   = -100
	priorityUnmark = -90
	prioritySNAT   = 100
)

func (s settings) rule(statements ...nft.Statement) *nft.Rule {
	return nft.NewRule(familyOf(s.family), statements...)
}

// sets are the sets and maps that are always there.
func (s settings) sets() []*nft.Set {
	addr := nft.AddrType(familyOf(s.family))
	front, port := []nft.Type{addr, nft.TypeProto, nft.TypePort}, []nft.Type{nft.TypeProto, nft.TypePort}
	numbered := func(t []nft.Type) []nft.Type { return append(t[:len(t):len(t)], nft.TypeNumber) }
	listener := []nft.Type{addr, nft.TypePort}
	return []*nft.Set{
		{Name: setListeners, Key: numbered(front), Data: listener,
			Comment: "where the relay listens for a frontend; 1: from pods here, 2: from the node, 3: from outside"},
		{Name: setPorts, Key: numbered(port), Data: listener, Comment: "the same for node ports"},
		{Name: setVerdicts, Key: numbered(front), Verdicts: true, Comment: "frontends that refuse or drop"},
		{Name: setPortVerdicts, Key: numbered(port), Verdicts: true, Comment: "the same for node ports"},
		{Name: setGuards, Key: front, Verdicts: true, Comment: "frontends that only some sources may use"},
		{Name: setPortGuards, Key: port, Verdicts: true, Comment: "the same for node ports"},
		{Name: setClusterIPs, Key: []nft.Type{addr}, Comment: "whose undefined ports are refused"},
		{Name: setExternalIPs, Key: []nft.Type{addr}, Comment: "whose undefined ports are not touched"},
		{Name: setNodeAddrs, Key: []nft.Type{addr}, Comment: "addresses of the node that accept node ports"},
		{Name: setRanges, Key: []nft.Type{addr}, Interval: true, Comment: "addresses that no Service has are dropped"},
		{Name: setPodRanges, Key: []nft.Type{addr}, Interval: true, Comment: "pods of this node"},
		{Name: setOwn, Key: []nft.Type{addr}, Interval: true, Comment: "of the relay, for translated packets only"},
	}
}

// chains are those that are always there; those that others lead to come first.
func (s settings) chains() []nft.Object {
	out := []nft.Object{nft.NewChain(chainReject, "",
		s.rule(nft.IsProto(uint8(plan.TCP)), nft.Reject{Reset: true}),
		s.rule(nft.Reject{}))}
	for _, o := range plan.Origins {
		out = append(out, nft.NewChain(chainFrom(o), "", s.lead(o)...))
	}
	to := func(o plan.Origin, match ...nft.Statement) *nft.Rule {
		return s.rule(append(match, nft.Do{Code: nft.Goto, Chain: chainFrom(o)})...)
	}
	var incoming []*nft.Rule
	if pod := s.isPod(); pod != nil {
		incoming = append(incoming, to(plan.FromPod, pod))
	}
	incoming = append(incoming, to(plan.FromOutside))
	returning := func(mark uint32) *nft.Rule {
		return s.rule(nft.Has{Field: nft.FlowMark, Bits: s.route}, nft.Is{Field: nft.Direction, Value: nft.ToClient}, nft.SetMark(mark))
	}
	isOwn := nft.Has{Field: nft.Mark, Bits: s.own}
	return append(out,
		nft.NewHooked(chainMarkIn, "filter", nft.Prerouting, priorityMark, returning(s.route)),
		// The answers of the node's own processes are routed before they get here: the
		// type has them routed again. What ip_vs masquerades has the bit too, and began before.
		nft.NewHooked(chainMarkOut, "route", nft.Output, priorityMark, s.rule(isOwn, nft.Has{Field: nft.State, Bits: nft.StateNew}, nft.SetFlowMark(s.route)), returning(s.route|s.own)),
		nft.NewHooked(chainUnmarkOut, "filter", nft.Output, priorityUnmark,
			s.rule(nft.Has{Field: nft.Mark, Bits: s.own | s.route}, nft.ClearMark(s.own|s.route))),
		nft.NewHooked(chainUnmarkIn, "filter", nft.Input, priorityMark,
			s.rule(nft.Has{Field: nft.FlowMark, Bits: s.route}, nft.Has{Field: nft.Mark, Bits: s.route}, nft.ClearMark(s.route)), // not ipvs mode's mark
			s.rule(s.toOwn(), nft.Has{Field: nft.Status, Bits: nft.StatusDNAT}, nft.Do{Code: nft.Accept}),
			s.rule(s.toOwn(), nft.Do{Code: nft.Drop})),
		nft.NewHooked(chainPrerouting, "nat", nft.Prerouting, priorityDNAT, incoming...),
		nft.NewHooked(chainOutput, "nat", nft.Output, priorityDNAT,
			s.rule(isOwn, nft.Do{Code: nft.Accept}), // what the relay sends is not led back to it
			to(plan.FromNode)),
	)
}

// front and nodePort are what frontends are known by in a packet.
func front() []nft.Field    { return []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort} }
func nodePort() []nft.Field { return []nft.Field{nft.Proto, nft.DstPort} }

// Places of rules in lead.
const (
	leadListeners = 2
	leadPorts     = 6
)

// lead are the rules for packets of one origin.
func (s settings) lead(o plan.Origin) []*nft.Rule {
	front, port := front(), nodePort()
	to := func(set string) nft.In { return nft.In{Fields: []nft.Field{nft.DstAddr}, Set: set} }
	n := originNumber(o)
	return []*nft.Rule{
		s.rule(nft.Dispatch{Fields: front, Map: setGuards}),
		s.rule(nft.Dispatch{Fields: front, Number: n, Map: setVerdicts}),
		s.rule(nft.DNAT{Fields: front, Slots: 1, First: n, Map: setListeners}),
		s.rule(to(setClusterIPs), nft.Do{Code: nft.Goto, Chain: chainReject}),
		s.rule(to(setNodeAddrs), nft.Dispatch{Fields: port, Map: setPortGuards}),
		s.rule(to(setNodeAddrs), nft.Dispatch{Fields: port, Number: n, Map: setPortVerdicts}),
		s.rule(to(setNodeAddrs), nft.DNAT{Fields: port, Slots: 1, First: n, Map: setPorts}),
		s.rule(to(setExternalIPs), nft.Do{Code: nft.Return}),
		s.rule(to(setRanges), nft.Do{Code: nft.Drop}),
	}
}

// isPod matches packets of this node's pods; nil if they cannot be told.
func (s settings) isPod() nft.Statement {
	switch s.local.Kind {
	case plan.LocalPrefix:
		return nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: setPodRanges}
	case plan.LocalInterface, plan.LocalInterfacePrefix:
		return nft.InterfaceIs{Name: s.local.Name, Prefix: s.local.Kind == plan.LocalInterfacePrefix}
	}
	return nil
}

func (s settings) toOwn() nft.Statement {
	return nft.In{Fields: []nft.Field{nft.DstAddr}, Set: setOwn}
}

// guardObjects are the set and the chain that let only some sources go on.
func (s settings) guardObjects(name string) (*nft.Set, nft.Object) {
	set := &nft.Set{Name: prefixSources + name, Key: []nft.Type{nft.AddrType(familyOf(s.family))}, Interval: true}
	c := nft.NewChain(prefixAllow+name, "",
		s.rule(nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: set.Name}, nft.Do{Code: nft.Return}),
		s.rule(nft.Do{Code: nft.Drop}))
	return set, c
}
