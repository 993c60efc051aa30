package table

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Priorities of base chains. ip_vs itself stands at 98 and 99 in input and at -99 and
// -98 in output (ip_vs_ops in net/netfilter/ipvs/ip_vs_core.c): ours are the last ones
// before it and the first ones behind.
const (
	prioritySteer    = -150 // with mangle
	PriorityKeep     = -110 // before destinations are translated, at -100
	PriorityInput    = -1   // before the host's own filter
	priorityMark     = 97
	priorityUnserved = 110
	PriorityOutput   = -105 // behind -110, before -100
	priorityMissed   = -90
	priorityFilter   = 0
	PrioritySNAT     = 100
	priorityUnmark   = 110
)

// Settings is everything but the Services that chains depend on, for one family.
type Settings struct {
	Family  plan.Family
	Bit     int               // of the mark that asks for masquerading
	Liberal bool              // nothing is dropped as INVALID
	Local   plan.LocalTraffic // in the family
	Addrs   []netip.Addr      // that accept node ports
}

// Mark asks for masquerading.
func (s Settings) Mark() uint32 { return 1 << s.Bit }

// NewSettings takes what matters of a node. The error names a value that no rule can
// have.
func NewSettings(f plan.Family, bit int, liberal bool, n *plan.Node) (Settings, error) {
	local, err := n.Local[f].In(f)
	s := Settings{Family: f, Bit: bit, Liberal: liberal, Local: local}
	for _, a := range n.NodePorts[f].Addrs {
		if plan.FamilyOf(a) == f {
			s.Addrs = append(s.Addrs, a)
		}
	}
	return s, err
}

func (s Settings) Rule(statements ...nft.Statement) *nft.Rule {
	return nft.NewRule(FamilyOf(s.Family), statements...)
}

// Statements that come often.
var (
	IsNew     = nft.Has{Field: nft.State, Bits: nft.StateNew}
	front     = []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}
	frontPort = []nft.Field{nft.Proto, nft.DstPort}
	toReject  = nft.Do{Code: nft.Goto, Chain: chainReject}
	toReturn  = nft.Do{Code: nft.Return}
)

func isIn(k Kind, fields ...nft.Field) nft.In { return nft.In{Fields: fields, Set: k.Name()} }

// isPod matches packets of this node's pods; nil if they cannot be told.
func (s Settings) isPod() nft.Statement {
	switch s.Local.Kind {
	case plan.LocalPrefix:
		return nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: PodRanges}
	case plan.LocalInterface, plan.LocalInterfacePrefix:
		return nft.InterfaceIs{Name: s.Local.Name, Prefix: s.Local.Kind == plan.LocalInterfacePrefix}
	}
	return nil
}

// Sets are the sets and maps that are always there.
func (s Settings) Sets() []*nft.Set {
	addr := nft.AddrType(FamilyOf(s.Family))
	out := []*nft.Set{
		{Name: ServiceRanges, Key: []nft.Type{addr}, Interval: true, Comment: "addresses that no Service has are dropped"},
		{Name: PodRanges, Key: []nft.Type{addr}, Interval: true, Comment: "pods of this node"},
	}
	for k := range Kinds {
		out = append(out, k.Set(s.Family))
	}
	return out
}

// Inner are the chains to which others lead.
func (s Settings) Inner() []nft.Object {
	return []nft.Object{
		nft.NewChain(chainReject, "",
			s.Rule(nft.IsProto(uint8(plan.TCP)), nft.Reject{Reset: true}),
			s.Rule(nft.Reject{}),
		),
		nft.NewChain(ChainOthers, "node ports at addresses where others have a virtual server", s.Rule(nft.Do{Code: nft.Accept})),
		nft.NewChain(ChainRetired, "frontends that are gone: only flows of before",
			s.Rule(IsNew, toReject),
			s.Rule(nft.ReplaceMark(0)),
		),
		// It returns for what a frontend lets through, and ends with a verdict else.
		nft.NewChain(ChainServices, "what is sent to a Service",
			s.Rule(nft.Dispatch{Fields: front, Map: Services.Name()}),
			s.Rule(isIn(ClusterIPs, nft.DstAddr), IsNew, toReject),
			s.Rule(isIn(ClusterIPs, nft.DstAddr), nft.Do{Code: nft.Accept}),
			s.Rule(isIn(NodeAddrs, nft.DstAddr), nft.Dispatch{Fields: frontPort, Map: NodePorts.Name()}),
			s.dropUnallocated(),
			s.Rule(nft.Do{Code: nft.Accept}),
		),
	}
}

// dropUnallocated ends flows to addresses of Service ranges that no Service has.
func (s Settings) dropUnallocated() *nft.Rule {
	external := isIn(ExternalIPs, nft.DstAddr)
	external.Not = true
	return s.Rule(nft.In{Fields: []nft.Field{nft.DstAddr}, Set: ServiceRanges}, external, IsNew, nft.Do{Code: nft.Drop})
}

// Base are the chains that the kernel calls; see README.md for why each is where it is.
func (s Settings) Base() []nft.Object {
	keep := []*nft.Rule{
		s.Rule(isIn(Servers, front...), nft.KeepDst{}),
		s.Rule(isIn(ClusterIPs, nft.DstAddr), nft.KeepDst{}),
	}
	toServices := s.Rule(nft.Do{Code: nft.Jump, Chain: ChainServices})
	// ip_vs lets pass what it translates to a port of the node, which it may have been sent to.
	own := isIn(OwnEndpoints, front...)
	own.Not = true
	unserved := s.Rule(isIn(Servers, front...), own, toReject)
	passes := nft.SetMark(s.Mark())
	input := []*nft.Rule{
		s.Rule(nft.IsProto(uint8(plan.TCP)), isIn(HealthPorts, nft.DstPort), passes),
		toServices,
		s.Rule(passes),
	}
	forward := []*nft.Rule{s.dropUnallocated()}
	if !s.Liberal {
		invalid := s.Rule(nft.IsProto(uint8(plan.TCP)), nft.Has{Field: nft.State, Bits: nft.StateInvalid}, isIn(Endpoints, nft.SrcAddr), nft.Do{Code: nft.Drop})
		input, forward = append([]*nft.Rule{invalid}, input...), append([]*nft.Rule{invalid}, forward...)
	}
	return []nft.Object{
		nft.NewHooked(chainSteer, "filter", nft.Prerouting, prioritySteer,
			s.Rule(isIn(External, front...), nft.ReplaceMark(MarkOf(SteerID, s.Bit)))),
		nft.NewHooked(chainKeepIn, "nat", nft.Prerouting, PriorityKeep, keep...),
		nft.NewHooked(chainKeepOut, "nat", nft.Output, PriorityKeep, keep...),
		nft.NewHooked(chainInput, "filter", nft.Input, PriorityInput, input...),
		nft.NewHooked(chainMark, "filter", nft.Input, priorityMark, toServices),
		nft.NewHooked(chainOutput, "filter", nft.Output, PriorityOutput, toServices),
		nft.NewHooked(chainUnservedIn, "filter", nft.Input, priorityUnserved, unserved),
		nft.NewHooked(chainUnservedOut, "filter", nft.Output, priorityMissed, unserved),
		nft.NewHooked(chainForward, "filter", nft.Forward, priorityFilter, forward...),
		nft.NewHooked(chainNAT, "nat", nft.Postrouting, PrioritySNAT,
			s.Rule(nft.Has{Field: nft.Mark, Bits: s.Mark()}, nft.Masquerade{}),
			s.Rule(isIn(ServerMarks, nft.Mark), nft.SrcIsLocal{}, nft.Masquerade{}),
			s.Rule(isIn(Hairpin, nft.SrcAddr, nft.DstAddr, nft.Proto, nft.DstPort), nft.Masquerade{})),
		// Marks go, so that a tunnel's packets are not translated again.
		nft.NewHooked(chainUnmark, "filter", nft.Postrouting, priorityUnmark,
			s.Rule(nft.Has{Field: nft.Mark, Bits: s.Mark()}, nft.ClearMark(s.Mark())),
			s.Rule(isIn(ServerMarks, nft.Mark), nft.ReplaceMark(0))),
	}
}

// Treatment is what a class does with packets of one origin.
type Treatment struct {
	Verdict plan.Verdict
	Masq    bool
	Marked  bool // to the virtual server by mark
}

// Place is what kind of address a class is for.
type Place uint8

const (
	onDevice Place = iota // a ClusterIP, or a node port without marks
	OnNode                // a node port with marks
	Steered               // an address that is not bound: packets come with our mark
)

// Class is one way to treat packets: frontends that want the same share a chain.
type Class struct {
	Routes      [3]Treatment // by plan.Origin
	Place       Place
	PodsUnknown bool
}

// Marks reports whether packets of some origin go to a virtual server by mark.
func (c *Class) Marks() bool {
	return slices.ContainsFunc(c.Routes[:], func(r Treatment) bool { return r.Marked })
}

// Name says what the chain does: "pod.forward/other.forward-masq".
func (c *Class) Name() string {
	s := [...]string{"", prefixNodePort, prefixExternal}[c.Place]
	pod, node, outside := c.Routes[plan.FromPod].label(), c.Routes[plan.FromNode].label(), c.Routes[plan.FromOutside].label()
	switch {
	case pod == node && node == outside:
		return s + "all." + pod
	case node == outside:
		return s + "pod." + pod + "/other." + node
	case c.PodsUnknown:
		return s + "node." + node + "/outside." + outside
	}
	return s + "pod." + pod + "/node." + node + "/outside." + outside
}

const labelMarked = "cluster"

func (r Treatment) label() string {
	if r.Verdict != plan.Forward {
		return r.Verdict.String()
	}
	s := "forward"
	if r.Marked {
		s = labelMarked
	}
	if r.Masq {
		s += "-masq"
	}
	return s
}

// LeadsByMark reports whether a chain needs virtual servers by mark.
func LeadsByMark(chain string) bool { return strings.Contains(chain, "."+labelMarked) }

// ClassChain is the chain of a class: it ends new flows that have no way, and marks
// packets of all others.
func (s Settings) ClassChain(c *Class) nft.Object {
	return nft.Object{Chain: &nft.Chain{Name: c.Name()}, Rules: func() []*nft.Rule { return s.classRules(c) }}
}

func (s Settings) classRules(c *Class) []*nft.Rule {
	pod, node, outside := c.Routes[plan.FromPod], c.Routes[plan.FromNode], c.Routes[plan.FromOutside]
	var rules []*nft.Rule
	if node != outside || pod != outside {
		if node != outside {
			rules = s.carryOut(rules, c, node, nft.SrcIsLocal{})
		}
		if pod != outside {
			if node == outside { // the node may use an address of the pods' range
				rules = s.carryOut(rules, c, node, nft.SrcIsLocal{})
			}
			rules = s.carryOut(rules, c, pod, s.isPod())
		}
	}
	return s.carryOut(rules, c, outside)
}

// carryOut appends the rules of a route for the packets that match.
func (s Settings) carryOut(rules []*nft.Rule, c *Class, r Treatment, match ...nft.Statement) []*nft.Rule {
	add := func(then ...nft.Statement) { rules = append(rules, s.Rule(append(slices.Clone(match), then...)...)) }
	last := func(then ...nft.Statement) {
		if len(match) > 0 {
			then = append(then, toReturn)
		}
		add(then...)
	}
	masq := uint32(0)
	if r.Masq {
		masq = s.Mark()
	}
	switch {
	case r.Verdict == plan.Reject:
		add(IsNew, toReject)
	case r.Verdict == plan.Drop:
		add(IsNew, nft.Do{Code: nft.Drop})
	case r.Marked && c.Place == OnNode:
		add(nft.MarkFrom{Fields: frontPort, Map: PortMarks.Name()})
	case r.Marked:
		add(nft.MarkFrom{Fields: front, Map: Marks.Name()})
	case c.Place == Steered:
		last(nft.ReplaceMark(masq))
		return rules
	case r.Masq:
		last(nft.SetMark(masq))
		return rules
	default:
		last(nft.ClearMark(s.Mark()))
		return rules
	}
	switch {
	case r.Verdict == plan.Forward && r.Masq:
		add(nft.SetMark(masq))
	case r.Verdict != plan.Forward && c.Place == Steered:
		add(nft.ReplaceMark(0))
	}
	if len(match) > 0 {
		add(toReturn)
	}
	return rules
}

// AllowChain lets new flows of some sources only on to a chain, and the set it needs.
func (s Settings) AllowChain(ranges []netip.Prefix, to string) (chain nft.Object, set *nft.Object) {
	own := s.Family.Prefixes(ranges)
	if len(own) == 0 {
		o := nft.NewChain(PrefixAllow+"nobody/"+to, "", s.Rule(IsNew, nft.Do{Code: nft.Drop}), s.Rule(nft.Do{Code: nft.Goto, Chain: to}))
		return o, nil
	}
	name := prefixSources + nft.PrefixesName(own)
	set = &nft.Object{
		Set: &nft.Set{
			Name: name, Key: []nft.Type{nft.AddrType(FamilyOf(s.Family))}, Interval: true, Comment: fmt.Sprintf("%d source ranges", len(own)),
		},
		Elements: nft.Intervals(own),
	}
	return nft.NewChain(PrefixAllow+strings.TrimPrefix(name, prefixSources)+"/"+to, "",
		s.Rule(IsNew, nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: name, Not: true}, nft.Do{Code: nft.Drop}),
		s.Rule(nft.Do{Code: nft.Goto, Chain: to})), set
}
