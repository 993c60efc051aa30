package ipvs

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
	priorityKeep     = -110 // before destinations are translated, at -100
	priorityInput    = -1   // before the host's own filter
	priorityMark     = 97
	priorityUnserved = 110
	priorityOutput   = -105 // behind -110, before -100
	priorityMissed   = -90
	priorityFilter   = 0
	prioritySNAT     = 100
	priorityUnmark   = 110
)

// settings is everything but the Services that chains depend on, for one family.
type settings struct {
	family  plan.Family
	bit     int  // of the mark that asks for masquerading
	liberal bool // nothing is dropped as INVALID
	pods    plan.LocalKind
	name    string         // of the interface, or how its name begins
	ranges  []netip.Prefix // of pods
	addrs   []netip.Addr   // that accept node ports
	choice  choice
}

// key stands for all of it, to compare.
func (s settings) key() string { return fmt.Sprint(s) }

// mark asks for masquerading.
func (s settings) mark() uint32 { return 1 << s.bit }

// newSettings takes what matters of a node. The error names a value that no rule can
// have.
func newSettings(f plan.Family, bit int, liberal bool, n *plan.Node) (settings, error) {
	s := settings{family: f, bit: bit, liberal: liberal}
	local := n.Local[f]
	s.pods, s.name = local.Kind, local.Name
	switch s.pods {
	case plan.LocalPrefix:
		s.name, s.ranges = "", rangesOf(f, local.Prefixes)
		if len(s.ranges) == 0 {
			s.pods = plan.LocalUnknown
		}
	case plan.LocalInterface, plan.LocalInterfacePrefix:
		const longest = 15
		if s.name == "" || len(s.name) > longest || strings.ContainsAny(s.name, " \t\n\"'\\/*") {
			return s, fmt.Errorf("local traffic: %q is no interface name: give 1 to %d characters without spaces, quotes, '/' and '*'", s.name, longest)
		}
	}
	for _, a := range n.NodePorts[f].Addrs {
		if plan.FamilyOf(a) == f {
			s.addrs = append(s.addrs, a)
		}
	}
	return s, nil
}

// rangesOf are the prefixes of one family, in canonical form.
func rangesOf(f plan.Family, prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		if plan.FamilyOf(p.Addr()) == f {
			out = append(out, p.Masked())
		}
	}
	return out
}

// object is a chain with its rules, or a set with fixed elements.
type object struct {
	chain    *nft.Chain
	rules    []*nft.Rule
	set      *nft.Set
	elements []nft.Element
}

func (o *object) name() string {
	if o.set != nil {
		return o.set.Name
	}
	return o.chain.Name
}

func (s settings) rule(statements ...nft.Statement) *nft.Rule {
	return nft.NewRule(nftFamily(s.family), statements...)
}

func (s settings) chain(name, remark string, rules ...*nft.Rule) object {
	return object{chain: &nft.Chain{Name: name, Comment: remark}, rules: rules}
}

func (s settings) hooked(name, typ string, num nft.HookNum, priority int32, rules ...*nft.Rule) object {
	o := s.chain(name, "", rules...)
	o.chain.Hook = &nft.Hook{Type: typ, Num: num, Priority: priority}
	return o
}

// Statements that come often.
var (
	isNew     = nft.Has{Field: nft.State, Bits: nft.StateNew}
	front     = []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}
	frontPort = []nft.Field{nft.Proto, nft.DstPort}
	toReject  = nft.Do{Code: nft.Goto, Chain: chainReject}
	toReturn  = nft.Do{Code: nft.Return}
)

func isIn(k setKind, fields ...nft.Field) nft.In { return nft.In{Fields: fields, Set: k.name()} }

func isProto(p plan.Protocol) nft.Statement {
	return nft.Is{Field: nft.Proto, Value: nft.Tuple([]byte{byte(p)})}
}

// isPod matches packets of this node's pods; nil if they cannot be told.
func (s settings) isPod() nft.Statement {
	switch s.pods {
	case plan.LocalPrefix:
		return nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: setPodRanges}
	case plan.LocalInterface, plan.LocalInterfacePrefix:
		return nft.InterfaceIs{Name: s.name, Prefix: s.pods == plan.LocalInterfacePrefix}
	}
	return nil
}

// sets are the sets and maps that are always there.
func (s settings) sets() []*nft.Set {
	addr := nft.AddrType(nftFamily(s.family))
	out := []*nft.Set{
		{Name: setServiceRanges, Key: []nft.Type{addr}, Interval: true, Comment: "addresses that no Service has are dropped"},
		{Name: setPodRanges, Key: []nft.Type{addr}, Interval: true, Comment: "pods of this node"},
	}
	for k := range setKinds {
		out = append(out, k.set(s.family))
	}
	return out
}

// inner are the chains to which others lead.
func (s settings) inner() []object {
	return []object{
		s.chain(chainReject, "",
			s.rule(isProto(plan.TCP), nft.Reject{Reset: true}),
			s.rule(nft.Reject{}),
		),
		s.chain(chainRetired, "frontends that are gone: only flows of before",
			s.rule(isNew, toReject),
			s.rule(nft.ReplaceMark(0)),
		),
		// It returns for what a frontend lets through, and ends with a verdict else.
		s.chain(chainServices, "what is sent to a Service",
			s.rule(nft.Dispatch{Fields: front, Map: inServices.name()}),
			s.rule(isIn(inClusterIPs, nft.DstAddr), isNew, toReject),
			s.rule(isIn(inClusterIPs, nft.DstAddr), nft.Do{Code: nft.Accept}),
			s.rule(isIn(inNodeAddrs, nft.DstAddr), nft.Dispatch{Fields: frontPort, Map: inNodePorts.name()}),
			s.rule(nft.In{Fields: []nft.Field{nft.DstAddr}, Set: setServiceRanges}, isNew, nft.Do{Code: nft.Drop}),
			s.rule(nft.Do{Code: nft.Accept}),
		),
	}
}

// base are the chains that the kernel calls; see README.md for why each is where it is.
func (s settings) base() []object {
	keep := []*nft.Rule{
		s.rule(isIn(inServers, front...), nft.KeepDst{}),
		s.rule(isIn(inClusterIPs, nft.DstAddr), nft.KeepDst{}),
	}
	toServices := s.rule(nft.Do{Code: nft.Jump, Chain: chainServices})
	unserved := s.rule(isIn(inServers, front...), toReject)
	passes := nft.SetMark(s.mark())
	input := []*nft.Rule{
		s.rule(isProto(plan.TCP), isIn(inHealthPorts, nft.DstPort), passes),
		toServices,
		s.rule(passes),
	}
	forward := []*nft.Rule{s.rule(nft.In{Fields: []nft.Field{nft.DstAddr}, Set: setServiceRanges}, isNew, nft.Do{Code: nft.Drop})}
	if !s.liberal {
		invalid := s.rule(isProto(plan.TCP), nft.Has{Field: nft.State, Bits: nft.StateInvalid}, isIn(inEndpoints, nft.SrcAddr), nft.Do{Code: nft.Drop})
		input, forward = append([]*nft.Rule{invalid}, input...), append([]*nft.Rule{invalid}, forward...)
	}
	return []object{
		s.hooked(chainSteer, "filter", nft.Prerouting, prioritySteer,
			s.rule(isIn(inExternal, front...), nft.ReplaceMark(markOf(steerID, s.bit)))),
		s.hooked(chainKeepIn, "nat", nft.Prerouting, priorityKeep, keep...),
		s.hooked(chainKeepOut, "nat", nft.Output, priorityKeep, keep...),
		s.hooked(chainInput, "filter", nft.Input, priorityInput, input...),
		s.hooked(chainMark, "filter", nft.Input, priorityMark, toServices),
		s.hooked(chainOutput, "filter", nft.Output, priorityOutput, toServices),
		s.hooked(chainUnservedIn, "filter", nft.Input, priorityUnserved, unserved),
		s.hooked(chainUnservedOut, "filter", nft.Output, priorityMissed, unserved),
		s.hooked(chainForward, "filter", nft.Forward, priorityFilter, forward...),
		s.hooked(chainNAT, "nat", nft.Postrouting, prioritySNAT,
			s.rule(nft.Has{Field: nft.Mark, Bits: s.mark()}, nft.Masquerade{}),
			s.rule(isIn(inServerMarks, nft.Mark), nft.SrcIsLocal{}, nft.Masquerade{}),
			s.rule(isIn(inHairpin, nft.SrcAddr, nft.DstAddr, nft.Proto, nft.DstPort), nft.Masquerade{})),
		// Marks go, so that a tunnel's packets are not translated again.
		s.hooked(chainUnmark, "filter", nft.Postrouting, priorityUnmark,
			s.rule(nft.Has{Field: nft.Mark, Bits: s.mark()}, nft.ClearMark(s.mark())),
			s.rule(isIn(inServerMarks, nft.Mark), nft.ReplaceMark(0))),
	}
}

// treatment is what a class does with packets of one origin.
type treatment struct {
	verdict plan.Verdict
	masq    bool
	marked  bool // to the virtual server by mark
}

// place is what kind of address a class is for.
type place uint8

const (
	onDevice place = iota // a ClusterIP, or a node port without marks
	onNode                // a node port with marks
	steered               // an address that is not bound: packets come with our mark
)

// class is one way to treat packets: frontends that want the same share a chain.
type class struct {
	routes      [3]treatment // by plan.Origin
	place       place
	podsUnknown bool
}

// name says what the chain does: "pod.forward/other.forward-masq".
func (c *class) name() string {
	s := [...]string{"", prefixNodePort, prefixExternal}[c.place]
	pod, node, outside := c.routes[plan.FromPod].label(), c.routes[plan.FromNode].label(), c.routes[plan.FromOutside].label()
	switch {
	case pod == node && node == outside:
		return s + "all." + pod
	case node == outside:
		return s + "pod." + pod + "/other." + node
	case c.podsUnknown:
		return s + "node." + node + "/outside." + outside
	}
	return s + "pod." + pod + "/node." + node + "/outside." + outside
}

const labelMarked = "cluster"

func (r treatment) label() string {
	if r.verdict != plan.Forward {
		return r.verdict.String()
	}
	s := "forward"
	if r.marked {
		s = labelMarked
	}
	if r.masq {
		s += "-masq"
	}
	return s
}

// leadsByMark reports whether a chain needs virtual servers by mark.
func leadsByMark(chain string) bool { return strings.Contains(chain, "."+labelMarked) }

// classChain is the chain of a class: it ends new flows that have no way, and marks
// packets of all others.
func (s settings) classChain(c *class) object {
	pod, node, outside := c.routes[plan.FromPod], c.routes[plan.FromNode], c.routes[plan.FromOutside]
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
	return s.chain(c.name(), "", s.carryOut(rules, c, outside)...)
}

// carryOut appends the rules of a route for the packets that match.
func (s settings) carryOut(rules []*nft.Rule, c *class, r treatment, match ...nft.Statement) []*nft.Rule {
	add := func(then ...nft.Statement) { rules = append(rules, s.rule(append(slices.Clone(match), then...)...)) }
	last := func(then ...nft.Statement) {
		if len(match) > 0 {
			then = append(then, toReturn)
		}
		add(then...)
	}
	masq := uint32(0)
	if r.masq {
		masq = s.mark()
	}
	switch {
	case r.verdict == plan.Reject:
		add(isNew, toReject)
	case r.verdict == plan.Drop:
		add(isNew, nft.Do{Code: nft.Drop})
	case r.marked && c.place == onNode:
		add(nft.MarkFrom{Fields: frontPort, Map: inPortMarks.name()})
	case r.marked:
		add(nft.MarkFrom{Fields: front, Map: inMarks.name()})
	case c.place == steered:
		last(nft.ReplaceMark(masq))
		return rules
	case r.masq:
		last(nft.SetMark(masq))
		return rules
	default:
		last(nft.ClearMark(s.mark()))
		return rules
	}
	switch {
	case r.verdict == plan.Forward && r.masq:
		add(nft.SetMark(masq))
	case r.verdict != plan.Forward && c.place == steered:
		add(nft.ReplaceMark(0))
	}
	if len(match) > 0 {
		add(toReturn)
	}
	return rules
}

// allowChain lets new flows of some sources only on to a chain, and the set it needs.
func (s settings) allowChain(ranges []netip.Prefix, to string) (chain object, set *object) {
	own := rangesOf(s.family, ranges)
	if len(own) == 0 {
		o := s.chain(prefixAllow+"nobody/"+to, "", s.rule(isNew, nft.Do{Code: nft.Drop}), s.rule(nft.Do{Code: nft.Goto, Chain: to}))
		return o, nil
	}
	name := rangesName(own)
	set = &object{
		set: &nft.Set{
			Name: name, Key: []nft.Type{nft.AddrType(nftFamily(s.family))}, Interval: true, Comment: fmt.Sprintf("%d source ranges", len(own)),
		},
		elements: nft.Intervals(own),
	}
	return s.chain(prefixAllow+strings.TrimPrefix(name, prefixSources)+"/"+to, "",
		s.rule(isNew, nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: name, Not: true}, nft.Do{Code: nft.Drop}),
		s.rule(nft.Do{Code: nft.Goto, Chain: to})), set
}
