package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// settings is everything but the Services that chains depend on, for one family.
type settings struct {
	family  plan.Family
	mark    uint32
	liberal bool              // nothing is dropped as INVALID
	local   plan.LocalTraffic // in the family
}

// key stands for all of it, to compare.
func (s settings) key() string { return fmt.Sprint(s) }

// newSettings takes what matters of a node. The error names a value that no rule can
// have.
func newSettings(f plan.Family, mark uint32, liberal bool, n *plan.Node) (settings, error) {
	local, err := n.Local[f].In(f)
	return settings{family: f, mark: mark, liberal: liberal, local: local}, err
}

// isPod matches packets of this node's pods, or, with not, all others; nil if they
// cannot be told.
func (s settings) isPod(not bool) nft.Statement {
	switch s.local.Kind {
	case plan.LocalPrefix:
		return nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: setPodRanges, Not: not}
	case plan.LocalInterface, plan.LocalInterfacePrefix:
		return nft.InterfaceIs{Name: s.local.Name, Prefix: s.local.Kind == plan.LocalInterfacePrefix, Not: not}
	}
	return nil
}

func (s settings) rule(statements ...nft.Statement) *nft.Rule {
	return nft.NewRule(owned.Family(s.family), statements...)
}

// service is a Service port with a place for each of its endpoints.
type service struct {
	sp *plan.ServicePort
	// slots are the endpoints of each pool by the number that the random choice
	// gives. One with a larger weight has several.
	slots [2][]netip.AddrPort
}

// front is a frontend as the kernel has it.
type front struct {
	*plan.Frontend
	key     nft.Concat // of its verdict, and the beginning of its endpoints' keys
	verdict nft.Verdict
	record  string  // the chain in which its clients are remembered, or ""
	uses    [2]bool // by Pool: the chain chooses among its slots
}

// nodePort reports whether it is one.
func (f *front) nodePort() bool { return f.Kind == plan.NodePort }

// rendered is what one Service port needs.
type rendered struct {
	*service
	fronts  []front
	objects []nft.Object // those that others lead to first
	local   plan.LocalTraffic
}

// class is one way to treat packets: frontends that want the same share a chain.
type class struct {
	routes      [3]plan.Route
	places      [2]int // by Pool: among how many slots is drawn; see slots.Places
	nodePort    bool
	podsUnknown bool
}

// render says what a Service port needs. It is pure.
func (s settings) render(svc *service) *rendered {
	r := &rendered{service: svc, local: s.local}
	if svc == nil {
		return r
	}
	seen := map[string]bool{}
	need := func(o nft.Object) {
		if !seen[o.Name()] {
			seen[o.Name()] = true
			r.objects = append(r.objects, o)
		}
	}
	for i := range svc.sp.Frontends {
		r.fronts = append(r.fronts, s.front(svc, &svc.sp.Frontends[i], need))
	}
	return r
}

func (s settings) front(svc *service, fe *plan.Frontend, need func(nft.Object)) front {
	id := svc.sp.ID
	f := front{Frontend: fe, key: frontKey(id.Protocol, fe)}
	c := s.classOf(svc, fe)
	for _, rt := range c.routes {
		if rt.Verdict == plan.Forward {
			f.uses[rt.Pool] = true
		}
	}
	f.verdict = s.lead(svc, c, need)
	if svc.sp.Affinity > 0 && (f.uses[plan.Cluster] || f.uses[plan.Local]) {
		o := s.recordChain(svc, c)
		need(o)
		f.record = o.Name()
	}
	if fe.Allow != nil && f.verdict.Code != nft.Drop {
		f.verdict = s.allow(fe.Allow, f.verdict, need)
	}
	return f
}

// classOf reduces a frontend's routes to what makes a difference.
func (s settings) classOf(svc *service, fe *plan.Frontend) *class {
	c := &class{routes: fe.Route, nodePort: fe.Kind == plan.NodePort, podsUnknown: s.local.Kind == plan.LocalUnknown}
	if c.podsUnknown {
		c.routes[plan.FromPod] = c.routes[plan.FromOutside]
	}
	for i := range c.routes {
		rt := &c.routes[i]
		if rt.Verdict == plan.Forward && len(svc.slots[rt.Pool]) == 0 {
			*rt = plan.Route{Verdict: plan.Reject}
		}
		if rt.Verdict != plan.Forward {
			rt.Pool, rt.SNAT = plan.Cluster, false
			continue
		}
		c.places[rt.Pool] = slots.Places(len(svc.slots[rt.Pool]))
	}
	return c
}

// lead returns the verdict that carries out a class.
func (s settings) lead(svc *service, c *class, need func(nft.Object)) nft.Verdict {
	if c.routes[0] == c.routes[1] && c.routes[1] == c.routes[2] {
		switch c.routes[0].Verdict {
		case plan.Reject:
			return nft.Verdict{Code: nft.Goto, Chain: chainReject}
		case plan.Drop:
			return nft.Verdict{Code: nft.Drop}
		}
	}
	for pool, places := range c.places {
		if places > 0 {
			need(s.draw(c.nodePort, plan.Pool(pool), places))
		}
	}
	name, remark := c.name(), ""
	if svc.sp.Affinity > 0 {
		for pool, used := range c.places {
			if used > 0 {
				need(nft.Object{Set: s.affinitySet(svc.sp.ID, plan.Pool(pool))})
			}
		}
		name = prefixSticky + servicePath(svc.sp.ID) + "/" + name
		remark = svc.sp.ID.String()
	}
	need(nft.Object{Chain: &nft.Chain{Name: name, Comment: remark}, Rules: func() []*nft.Rule { return s.classRules(svc.sp, c) }})
	return nft.Verdict{Code: nft.Goto, Chain: name}
}

// classRules are the rules of a class's chain.
func (s settings) classRules(sp *plan.ServicePort, c *class) []*nft.Rule {
	var out []*nft.Rule
	pod, node, outside := c.routes[plan.FromPod], c.routes[plan.FromNode], c.routes[plan.FromOutside]
	add := func(r plan.Route, match ...nft.Statement) { out = append(out, s.carryOut(sp, c, r, match)...) }
	unmasked := outside
	unmasked.SNAT = false
	switch {
	case pod == node && node == outside:
		add(outside)
	case !c.podsUnknown && node == outside && node.Verdict == plan.Forward && pod == unmasked:
		out = append(out, s.rule(s.isPod(true), nft.SetMark(s.mark)))
		add(unmasked)
	default:
		if !c.podsUnknown {
			add(pod, s.isPod(false))
		}
		if node != outside {
			add(node, nft.SrcIsLocal{})
		}
		add(outside)
	}
	return out
}

// carryOut are the rules for a route of the packets that match.
func (s settings) carryOut(sp *plan.ServicePort, c *class, r plan.Route, match []nft.Statement) []*nft.Rule {
	switch r.Verdict {
	case plan.Reject:
		return []*nft.Rule{s.rule(append(match, nft.Do{Code: nft.Goto, Chain: chainReject})...)}
	case plan.Drop:
		return []*nft.Rule{s.rule(append(match, nft.Do{Code: nft.Drop})...)}
	}
	if r.SNAT {
		match = append(match, nft.SetMark(s.mark))
	}
	choose := nft.Do{Code: nft.Goto, Chain: drawName(c.nodePort, r.Pool, c.places[r.Pool])}
	var out []*nft.Rule
	if sp.Affinity > 0 {
		known := nft.DNAT{Fields: []nft.Field{nft.SrcAddr}, Map: affinityName(sp.ID, r.Pool)}
		out = append(out, s.rule(append(slices.Clone(match), nft.IsProto(uint8(sp.ID.Protocol)), known)...))
	}
	return append(out, s.rule(append(slices.Clone(match), choose)...))
}

// allow returns the verdict that lets only some sources go on.
func (s settings) allow(ranges []netip.Prefix, to nft.Verdict, need func(nft.Object)) nft.Verdict {
	own := s.family.Prefixes(ranges)
	if len(own) == 0 {
		return nft.Verdict{Code: nft.Drop}
	}
	set := &nft.Set{
		Name: prefixSources + nft.PrefixesName(own), Key: []nft.Type{nft.AddrType(owned.Family(s.family))}, Interval: true,
		Comment: fmt.Sprintf("%d source ranges", len(own)),
	}
	need(nft.Object{Set: set, Elements: nft.Intervals(own)})
	name := prefixAllow + strings.TrimPrefix(set.Name, prefixSources) + "/" + to.Chain
	need(nft.Object{Chain: &nft.Chain{Name: name}, Rules: func() []*nft.Rule {
		return []*nft.Rule{
			s.rule(nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: set.Name}, nft.Do(to)),
			s.rule(nft.Do{Code: nft.Drop}),
		}
	}})
	return nft.Verdict{Code: nft.Goto, Chain: name}
}

// frontKey is the key of a frontend in the verdict maps.
func frontKey(p plan.Protocol, f *plan.Frontend) nft.Concat {
	if f.Kind == plan.NodePort {
		return nft.Concat(nil).Proto(uint8(p)).Port(f.Port)
	}
	return nft.Concat(nil).Addr(f.Addr).Proto(uint8(p)).Port(f.Port)
}

// check says what of a Service port the kernel cannot have.
func check(sp *plan.ServicePort) error {
	for _, pool := range sp.Pools {
		if n := slots.Total(pool); n > slots.Most {
			return fmt.Errorf("%d endpoints in one pool: want at most %d", n, slots.Most)
		}
	}
	return sp.Validate()
}
