package userspace

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// settings is everything but the Services that the table depends on, for one family.
type settings struct {
	family plan.Family
	block  netip.Prefix      // of the listening addresses
	own    uint32            // the mark of the relay's own packets
	route  uint32            // the mark that brings packets to the relay's sockets
	local  plan.LocalTraffic // in the family
}

// key stands for all of it, to compare.
func (s settings) key() string { return fmt.Sprint(s) }

// follow takes what matters of a node. The error names a value that no rule can have.
func (s settings) follow(n *plan.Node) (settings, error) {
	local, err := n.Local[s.family].In(s.family)
	s.local = local
	return s, err
}

// place is where an element is.
type place struct {
	set string
	key nft.Tuple
}

// content is what an element says.
type content struct {
	data    nft.Tuple
	verdict nft.Verdict
	comment string
}

func (c content) element(key nft.Tuple) nft.Element {
	return nft.Element{Key: key, Data: c.data, Verdict: c.verdict, Comment: c.comment}
}

func contentOf(e nft.Element) content {
	return content{data: e.Data, verdict: e.Verdict, comment: e.Comment}
}

// rendered is what one Service port needs of the kernel.
type rendered struct {
	elements map[place]content
	shared   []place                   // elements that other Service ports may need too
	guards   map[string][]netip.Prefix // source ranges by nft.PrefixesName
	classes  listeners.Set             // those that something leads to
}

// render says what a Service port needs that is listened for on a port. It is pure.
func (s settings) render(sp *plan.ServicePort, port uint16) *rendered {
	r := &rendered{elements: map[place]content{}, guards: map[string][]netip.Prefix{}}
	if sp == nil {
		return r
	}
	for i := range sp.Frontends {
		fe := &sp.Frontends[i]
		leads, verdicts := setListeners, setVerdicts
		if fe.Kind == plan.NodePort {
			leads, verdicts = setPorts, setPortVerdicts
		}
		for _, o := range plan.Origins {
			if o == plan.FromPod && s.local.Kind == plan.LocalUnknown {
				continue
			}
			key := frontKey(sp.ID.Protocol, fe).Number(originNumber(o)).Tuple()
			rt := effective(sp, fe.Route[o])
			switch rt.Verdict {
			case plan.Forward:
				c := listeners.ClassOf(rt)
				r.classes[c] = true
				to := nft.Concat(nil).Addr(c.Addr(s.block)).Port(port).Tuple()
				r.elements[place{leads, key}] = content{data: to, comment: remark(sp.ID)}
			case plan.Reject:
				r.elements[place{verdicts, key}] = content{verdict: nft.Verdict{Code: nft.Goto, Chain: chainReject}, comment: remark(sp.ID)}
			case plan.Drop:
				r.elements[place{verdicts, key}] = content{verdict: nft.Verdict{Code: nft.Drop}, comment: remark(sp.ID)}
			}
		}
		s.guard(sp, fe, r)
		switch fe.Kind {
		case plan.ClusterIP:
			r.shared = append(r.shared, place{setClusterIPs, nft.AddrTuple(fe.Addr)})
		case plan.ExternalIP, plan.LoadBalancerIP:
			r.shared = append(r.shared, place{setExternalIPs, nft.AddrTuple(fe.Addr)})
		}
	}
	return r
}

// effective is what a route comes to: nobody answers for an empty pool, and SCTP
// cannot be relayed.
func effective(sp *plan.ServicePort, rt plan.Route) plan.Route {
	if rt.Verdict != plan.Forward {
		return plan.Route{Verdict: rt.Verdict}
	}
	takes := func(e plan.Endpoint) bool { return e.Weight > 0 }
	if sp.ID.Protocol == plan.SCTP || !slices.ContainsFunc(sp.Pools[rt.Pool], takes) {
		return plan.Route{Verdict: plan.Reject}
	}
	return rt
}

// guard restricts a frontend to the sources that may use it.
func (s settings) guard(sp *plan.ServicePort, fe *plan.Frontend, r *rendered) {
	if fe.Allow == nil {
		return
	}
	set := setGuards
	if fe.Kind == plan.NodePort {
		set = setPortGuards
	}
	v := nft.Verdict{Code: nft.Drop}
	if own := s.family.Prefixes(fe.Allow); len(own) > 0 {
		name := nft.PrefixesName(own)
		r.guards[name] = own
		v = nft.Verdict{Code: nft.Jump, Chain: prefixAllow + name}
	}
	r.elements[place{set, frontKey(sp.ID.Protocol, fe).Tuple()}] = content{verdict: v, comment: remark(sp.ID)}
}

// frontKey is how the key of a frontend begins.
func frontKey(p plan.Protocol, f *plan.Frontend) nft.Concat {
	if f.Kind == plan.NodePort {
		return nft.Concat(nil).Proto(uint8(p)).Port(f.Port)
	}
	return nft.Concat(nil).Addr(f.Addr).Proto(uint8(p)).Port(f.Port)
}
