package iptables

import (
	"fmt"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// markMasq asks for masquerading.
const markMasq = "-j " + chainMarkMasq

// settings is everything but the Services that rules depend on, for one family.
type settings struct {
	family  plan.Family
	mark    uint32
	liberal bool // nothing is dropped as INVALID
	// comments: rules per endpoint name their Service. Each comment costs 288 bytes
	// of kernel memory, so large clusters do without.
	comments bool
	// compact: an endpoint has a chain only if affinity needs it; else the chain that
	// chooses translates. Legacy rewrites the table with any change, and chains per
	// endpoint are four fifths of it.
	compact bool
	node    *plan.Node
}

// renderer turns Service ports into chains. It is pure: the same settings and
// Service port give the same text.
type renderer struct {
	settings
	rule.Set
	// pod matches packets of this node's pods, one entry per way; empty if they
	// cannot be told. notPod matches all others, if one rule can.
	pod    []string
	notPod string
}

// newRenderer prepares for the settings. The error names a value that cannot be
// written as a rule.
func newRenderer(s settings) (*renderer, error) {
	r := &renderer{settings: s}
	local := s.node.Local[s.family]
	switch local.Kind {
	case plan.LocalPrefix:
		for _, p := range local.Prefixes {
			r.pod = append(r.pod, rule.From(p.Masked()))
		}
	case plan.LocalInterface:
		r.pod = []string{"-i " + local.Name}
	case plan.LocalInterfacePrefix:
		r.pod = []string{"-i " + local.Name + "+"}
	}
	if local.Kind == plan.LocalInterface || local.Kind == plan.LocalInterfacePrefix {
		if err := rule.CheckInterface(local.Name); err != nil {
			return nil, fmt.Errorf("local traffic: %w", err)
		}
	}
	if len(r.pod) == 1 {
		r.notPod = "! " + r.pod[0]
	}
	return r, nil
}

// service renders all chains of one Service port. The result is valid until the
// next call.
func (r *renderer) service(sp *plan.ServicePort) *rule.Set {
	r.Reset()
	v := newView(sp)
	v.nameCandidates(r.chained(v))
	for _, pool := range []plan.Pool{plan.Cluster, plan.Local} {
		if v.used[pool] {
			r.pool(v, pool)
		}
	}
	r.endpoints(v)
	for _, e := range v.externals {
		r.external(v, e)
	}
	for _, s := range v.sources {
		r.sources(v, s)
	}
	return &r.Set
}

// pool renders the chain of a pool: masquerading of ClusterIP traffic, affinity,
// then the choice.
func (r *renderer) pool(v *view, pool plan.Pool) {
	chain := poolChain(v.sp.ID, pool)
	r.Begin(rule.NAT(chain))
	for _, f := range v.direct {
		if f.route[0].Pool == pool {
			r.masqueradeDirect(v, f)
		}
	}
	members := v.candidates[pool]
	if v.sp.Affinity > 0 {
		for _, m := range members {
			r.Add(r.remark(v, " -> ", m.Addr.String()), rule.Seen(sys.Family(r.family), m.chain, v.sp.Affinity), rule.Jump(m.chain))
		}
	}
	options := make([]rule.Option, len(members))
	for i, m := range members {
		options[i] = rule.Option{Key: m.Addr, Target: rule.Jump(m.chain), Weight: m.Weight, Remark: r.remark(v, " -> ", m.Addr.String())}
		if !r.chained(v) {
			options[i].Match, options[i].Target = rule.Protocol(v.proto), rule.DNAT(m.Addr)
		}
	}
	r.Choose(chain, r.remark(v), options)
}

// masqueradeDirect marks what reaches the pool through a frontend that has no
// chain of its own.
func (r *renderer) masqueradeDirect(v *view, f viewed) {
	dst := []string{rule.ToAddr(f.Addr), rule.Protocol(v.proto), rule.Comment(v.name + " cluster IP"), rule.DPort(v.proto, f.Port)}
	switch {
	case f.route[plan.FromNode].SNAT && (f.route[plan.FromPod].SNAT || len(r.pod) == 0):
		r.Add(append(dst, markMasq)...)
	case f.route[plan.FromNode].SNAT && r.notPod != "":
		// "! -s" stands before "-d", "! -i" behind it.
		at := 0
		if strings.HasPrefix(r.notPod, "! -i") {
			at = 1
		}
		r.Add(append(slices.Insert(dst, at, r.notPod), markMasq)...)
	case f.route[plan.FromNode].SNAT:
		r.Add(append(dst, rule.Jump(chainMasqOthers))...)
	}
}

// remark names the Service in a rule per endpoint, unless there are too many.
func (r *renderer) remark(v *view, rest ...string) string {
	if !r.comments {
		return ""
	}
	return rule.Comment(v.name + strings.Join(rest, ""))
}

// chained reports whether endpoints have chains of their own.
func (r *renderer) chained(v *view) bool { return !r.compact || v.sp.Affinity > 0 }

// endpoints renders a chain for each endpoint that takes new flows.
func (r *renderer) endpoints(v *view) {
	if !r.chained(v) {
		return
	}
	var all []candidate
	switch {
	case v.used[plan.Cluster] && v.used[plan.Local]:
		all = slices.Concat(v.candidates[plan.Cluster], v.candidates[plan.Local])
		slices.SortFunc(all, func(a, b candidate) int { return a.Addr.Compare(b.Addr) })
		all = slices.CompactFunc(all, func(a, b candidate) bool { return a.Addr == b.Addr })
	case v.used[plan.Cluster]:
		all = v.candidates[plan.Cluster]
	case v.used[plan.Local]:
		all = v.candidates[plan.Local]
	}
	meetsItself := v.sp.MayMeetItself(r.node.Local[r.family])
	for i := range all {
		m := &all[i]
		r.Begin(rule.NAT(m.chain))
		if !r.compact && meetsItself(m.Endpoint) {
			r.Add(rule.FromAddr(m.Addr.Addr()), r.remark(v), markMasq)
		}
		set := ""
		if v.sp.Affinity > 0 {
			set = rule.Remember(sys.Family(r.family), m.chain)
		}
		r.Add(rule.Protocol(v.proto), r.remark(v), set, rule.DNAT(m.Addr))
	}
}

// external renders a chain that leads a frontend's packets to a pool by where
// they come from.
func (r *renderer) external(v *view, e external) {
	r.Begin(rule.NAT(e.chain))
	routes := e.routes
	if len(r.pod) == 0 {
		routes[plan.FromPod] = routes[plan.FromNode]
	}
	if routes[plan.FromPod] == routes[plan.FromNode] && routes[plan.FromNode] == routes[plan.FromOutside] {
		r.lead(v, "", routes[plan.FromOutside], "")
		return
	}
	if routes[plan.FromPod] != routes[plan.FromNode] || len(r.pod) > 0 {
		for _, pod := range r.pod {
			r.lead(v, pod, routes[plan.FromPod], "pod")
		}
	}
	if routes[plan.FromNode] != routes[plan.FromOutside] {
		r.lead(v, rule.SrcLocal, routes[plan.FromNode], "node")
	}
	r.lead(v, "", routes[plan.FromOutside], "outside")
}

// lead carries out a route for the packets that match. What is not forwarded goes
// back untranslated and is refused or dropped in the filter table.
func (r *renderer) lead(v *view, match string, route plan.Route, who string) {
	text := v.name + " external destinations"
	if who != "" {
		text += " from " + who
	}
	before, after := match, "" // "-s" and "-i" stand before the comment
	if strings.HasPrefix(match, "-m") {
		before, after = "", match
	}
	if route.Verdict != plan.Forward {
		if match != "" {
			r.Add(before, rule.Comment(text+": not forwarded"), after, rule.Return)
		}
		return
	}
	if route.SNAT {
		r.Add(before, rule.Comment(text+": masquerade"), after, markMasq)
	}
	r.Add(before, rule.Comment(text), after, rule.Jump(poolChain(v.sp.ID, route.Pool)))
}

// sources renders the chains that check source ranges: in nat the allowed go on to
// the pool, in filter whatever was not translated is dropped unless it is allowed.
func (r *renderer) sources(v *view, s sources) {
	if s.target != "" {
		r.Begin(rule.NAT(s.chain))
		for _, p := range r.family.Prefixes(s.allow) {
			r.Add(rule.From(p), rule.Comment(v.name+" source range"), rule.Jump(s.target))
		}
		r.Add(rule.Comment("other traffic to " + v.name + " is dropped by " + chainProxyFirewall))
	}
	r.Begin(rule.Filter(s.chain))
	for _, p := range r.family.Prefixes(s.allow) {
		r.Add(rule.From(p), rule.Comment(v.name+" source range"), rule.Return)
	}
	r.Add(rule.Comment(v.name+" has source ranges"), rule.Drop)
}
