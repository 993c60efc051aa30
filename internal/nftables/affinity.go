package nftables

import (
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Affinity keeps for each client the endpoint that it was sent to, in a map of its
// Service port that the kernel fills itself. The Service's chains look there before
// they choose at random; after the translation the flow's original destination
// leads to a chain that remembers the client. So nothing needs a mark, and a flow
// of a Service without affinity costs two lookups that find nothing.

// affinityClients is how many clients a Service port remembers for each pool. More
// of them are balanced like those of a Service without affinity.
const affinityClients = 1 << 16

// affinitySet is the map from a client to its endpoint.
func (s settings) affinitySet(id plan.ID, p plan.Pool) *nft.Set {
	addr := nft.AddrType(owned.Family(s.family))
	return &nft.Set{
		Name: affinityName(id, p), Key: []nft.Type{addr}, Data: []nft.Type{addr, nft.TypePort},
		Dynamic: true, Size: affinityClients, Comment: "clients of " + id.String(),
	}
}

// recordChain remembers the clients of frontends of one class. It asks where a
// packet comes from in the order in which the class's chain does.
func (s settings) recordChain(svc *service, c *class) nft.Object {
	id := svc.sp.ID
	chain := &nft.Chain{Name: prefixRecord + servicePath(id) + "/" + c.name(), Comment: id.String()}
	remember := func(p plan.Pool, match ...nft.Statement) *nft.Rule {
		return s.rule(append(match, nft.Remember{
			Map: affinityName(id, p), Timeout: svc.sp.Affinity,
			Key: []nft.Field{nft.SrcAddr}, Data: []nft.Field{nft.DstAddr, nft.DstPort},
		})...)
	}
	return nft.Object{Chain: chain, Rules: func() []*nft.Rule {
		switch {
		case c.places[plan.Local] == 0:
			return []*nft.Rule{remember(plan.Cluster)}
		case c.places[plan.Cluster] == 0:
			return []*nft.Rule{remember(plan.Local)}
		}
		var out []*nft.Rule
		add := func(o plan.Origin, match ...nft.Statement) {
			if r := c.routes[o]; r.Verdict == plan.Forward {
				out = append(out, remember(r.Pool, match...))
			}
			if len(match) > 0 {
				out = append(out, s.rule(append(match[:len(match):len(match)], nft.Do{Code: nft.Accept})...))
			}
		}
		if !c.podsUnknown {
			add(plan.FromPod, s.isPod(false))
		}
		add(plan.FromNode, nft.SrcIsLocal{})
		add(plan.FromOutside)
		return out
	}}
}

// recorder dispatches translated flows by their original destination.
func (s settings) recorder() nft.Object {
	var rules []*nft.Rule
	for _, p := range protocols {
		rules = append(rules,
			s.rule(nft.IsProto(uint8(p)), nft.Dispatch{Fields: []nft.Field{nft.OrigDstAddr, nft.OrigDstPort}, Map: setSticky + protoName(p)}),
			s.rule(nft.IsProto(uint8(p)), nft.In{Fields: []nft.Field{nft.OrigDstAddr}, Set: setNodeAddrs},
				nft.Dispatch{Fields: []nft.Field{nft.OrigDstPort}, Map: setStickyPorts + protoName(p)}))
	}
	return nft.NewChain(chainRecord, "clients of Services with affinity", rules...)
}

// stickyElement is what leads flows of a frontend to its record chain, and the map
// that it belongs to.
func stickyElement(id plan.ID, f *front) (set string, e nft.Element) {
	e.Verdict = nft.Verdict{Code: nft.Goto, Chain: f.record}
	e.Comment = remark(id)
	if f.nodePort() {
		e.Key = nft.PortTuple(f.Port)
		return setStickyPorts + protoName(id.Protocol), e
	}
	e.Key = nft.Concat(nil).Addr(f.Addr).Port(f.Port).Tuple()
	return setSticky + protoName(id.Protocol), e
}
