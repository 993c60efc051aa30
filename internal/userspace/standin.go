package userspace

import (
	"context"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// A process that ends without a successor leaves the table so that the kernel forwards
// by itself: new flows are translated to one of a few endpoints of the route's pool.
// Nothing is retried, affinity and schedulers do not count, and what changes meanwhile
// is not followed, as in other modes without a process. The next process of this mode
// leads to its listeners again, one of another mode removes the table once it works.
// Flows that the kernel has forwarded go on in both cases.
//
// Endpoints that want a PROXY header cannot be reached so: new connections to them are
// dropped, and clients try again.

// What is there only while the kernel stands in.
const (
	setDirect          = "direct"                        // as listeners: address and port of an endpoint; four for each key
	setDirectPorts     = "direct-node-ports"             // the same for node ports
	setMasqueraded     = "direct-masqueraded"            // the keys whose endpoints see the node's address
	setMasqueradePorts = "direct-node-ports-masqueraded" // the same for node ports
	setHairpins        = "direct-hairpins"               // endpoints that can be their own clients
	chainPostrouting   = "nat-postrouting"
)

// directSlots is how many endpoints share the flows of one frontend and origin.
const directSlots = 4

// standIn has the kernel forward what begins from now on.
func (b *backend) standIn(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone = true
	for _, f := range b.families {
		if !f.known || !f.caughtUp || b.routes != nil {
			continue
		}
		f.ctx, f.err, f.batch, f.size = ctx, nil, nil, 0
		f.writeDirect()
		if f.err != nil {
			b.env.Log.Warn("new connections are refused until the next start", "family", f.fam, "err", f.err)
			continue
		}
		if err := f.moveFlows(); err != nil {
			b.env.Log.Warn("UDP flows are refused until they pause", "family", f.fam, "err", err)
		}
	}
}

// writeDirect brings the table to where the kernel stands in.
func (f *family) writeDirect() {
	elements := map[place]content{}
	for _, svc := range f.services {
		f.settings.direct(svc.sp, elements)
	}
	sets := map[string]*nft.Set{}
	for _, set := range f.settings.directSets() {
		sets[set.Name] = set
		f.add(nft.Op{Kind: nft.AddSet, Set: set})
	}
	bySet := func(a, b place) int { return strings.Compare(a.set, b.set) }
	for _, at := range slices.SortedFunc(maps.Keys(elements), bySet) {
		if f.size >= elementsPerCommit {
			f.commit()
		}
		f.addElements(nft.AddElements, sets[at.set], elements[at].element(at.key))
	}
	for _, c := range f.settings.directChains() {
		f.putChain(c)
	}
	f.commit()
}

// moveFlows has the next packet of each UDP flow translated anew.
func (f *family) moveFlows() error {
	moved := staleFlows{due: map[netip.AddrPort]lead{}}
	for _, svc := range f.services {
		if svc.sp.ID.Protocol == plan.UDP {
			for dst := range f.leads(svc, f.addrs) {
				moved.due[dst] = lead{gone: true}
			}
		}
	}
	return moved.remove(f.ctx, f)
}

// directSets are the sets and maps that the kernel needs while it stands in.
func (s settings) directSets() []*nft.Set {
	addr := nft.AddrType(familyOf(s.family))
	front := []nft.Type{addr, nft.TypeProto, nft.TypePort, nft.TypeNumber}
	port := []nft.Type{nft.TypeProto, nft.TypePort, nft.TypeNumber}
	endpoint := []nft.Type{addr, nft.TypePort}
	return []*nft.Set{
		{Name: setDirect, Key: front, Data: endpoint, Comment: "endpoints of a frontend while no process relays; four for each origin"},
		{Name: setDirectPorts, Key: port, Data: endpoint, Comment: "the same for node ports"},
		{Name: setMasqueraded, Key: front, Comment: "whose endpoints see the node's address"},
		{Name: setMasqueradePorts, Key: port, Comment: "the same for node ports"},
		{Name: setHairpins, Key: []nft.Type{addr, addr}, Comment: "endpoints that can be their own clients"},
	}
}

// directChains are the chains that differ while the kernel stands in.
func (s settings) directChains() []nft.Object {
	var out []nft.Object
	for _, o := range plan.Origins {
		out = append(out, nft.NewChain(chainFrom(o), "", s.leadDirectly(o)...))
	}
	translated := nft.Has{Field: nft.Status, Bits: nft.StatusDNAT}
	out = append(out, nft.NewHooked(chainPostrouting, "nat", nft.Postrouting, prioritySNAT,
		s.rule(translated, nft.Has{Field: nft.FlowMark, Bits: s.own}, nft.Masquerade{}),
		s.rule(translated, nft.In{Fields: []nft.Field{nft.SrcAddr, nft.DstAddr}, Set: setHairpins}, nft.Masquerade{})))
	for _, c := range s.chains() {
		if c.Name() == chainUnmarkIn { // what still gets to the listeners comes too late
			rules := append([]*nft.Rule{s.rule(s.toOwn(), nft.Has{Field: nft.State, Bits: nft.StateNew}, nft.Do{Code: nft.Drop})}, c.Rules()...)
			out = append(out, nft.NewHooked(chainUnmarkIn, "filter", nft.Input, priorityMark, rules...))
		}
	}
	return out
}

// leadDirectly are the rules for packets of one origin: those of lead, with the
// endpoints before the listeners.
func (s settings) leadDirectly(o plan.Origin) []*nft.Rule {
	before := func(rule *nft.Rule, fields []nft.Field, masqueraded, endpoints string, match ...nft.Statement) []*nft.Rule {
		mark := append(match[:len(match):len(match)], nft.In{Fields: fields, Number: originNumber(o), Set: masqueraded}, nft.SetFlowMark(s.own))
		to := append(match[:len(match):len(match)], nft.DNAT{Fields: fields, Slots: directSlots, First: firstSlot(o), Map: endpoints})
		return []*nft.Rule{s.rule(mark...), s.rule(to...), rule}
	}
	var out []*nft.Rule
	for i, rule := range s.lead(o) {
		switch i {
		case leadListeners:
			out = append(out, before(rule, front(), setMasqueraded, setDirect)...)
		case leadPorts:
			out = append(out, before(rule, nodePort(), setMasqueradePorts, setDirectPorts, nft.In{Fields: []nft.Field{nft.DstAddr}, Set: setNodeAddrs})...)
		default:
			out = append(out, rule)
		}
	}
	return out
}

// firstSlot is the number in a key of an origin's first endpoint.
func firstSlot(o plan.Origin) uint32 { return uint32(o)*directSlots + 1 }

// direct adds what a Service port needs while the kernel stands in.
func (s settings) direct(sp *plan.ServicePort, to map[place]content) {
	policy := sp.Chosen()
	if policy.ProxyProtocol != 0 && sp.ID.Protocol == plan.TCP {
		return
	}
	for i := range sp.Frontends {
		fe := &sp.Frontends[i]
		endpoints, masqueraded := setDirect, setMasqueraded
		if fe.Kind == plan.NodePort {
			endpoints, masqueraded = setDirectPorts, setMasqueradePorts
		}
		for _, o := range plan.Origins {
			rt := effective(sp, fe.Route[o])
			if rt.Verdict != plan.Forward {
				continue
			}
			key := func(n uint32) nft.Tuple { return frontKey(sp.ID.Protocol, fe).Number(n).Tuple() }
			for slot, e := range choose(sp.Pools[rt.Pool]) {
				to[place{endpoints, key(firstSlot(o) + uint32(slot))}] = content{
					data: nft.Concat(nil).Addr(e.Addr()).Port(e.Port()).Tuple(), comment: remark(sp.ID),
				}
				to[place{setHairpins, nft.Concat(nil).Addr(e.Addr()).Addr(e.Addr()).Tuple()}] = content{}
			}
			if rt.SNAT && policy.ClientAddress != plan.ClientAddressKept || policy.ClientAddress == plan.ClientAddressHidden {
				to[place{masqueraded, key(originNumber(o))}] = content{}
			}
		}
	}
}

// choose returns an endpoint for each slot, any of those that take flows, all of them
// if there are no more than slots: nodes choose differently.
func choose(pool []plan.Endpoint) (out [directSlots]netip.AddrPort) {
	var takes []netip.AddrPort
	for _, e := range pool {
		if e.Weight > 0 {
			takes = append(takes, e.Addr)
		}
	}
	rand.Shuffle(len(takes), func(i, j int) { takes[i], takes[j] = takes[j], takes[i] })
	for i := range out {
		out[i] = takes[i%len(takes)]
	}
	return out
}
