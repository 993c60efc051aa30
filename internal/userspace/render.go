package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// settings is everything but the Services that the table depends on, for one family.
type settings struct {
	family plan.Family
	block  netip.Prefix // of the listening addresses
	own    uint32       // the mark of the relay's own packets
	route  uint32       // the mark that brings packets to the relay's sockets
	pods   plan.LocalKind
	name   string // of the interface, or how its name begins
	ranges []netip.Prefix
}

// key stands for all of it, to compare.
func (s settings) key() string { return fmt.Sprint(s) }

// follow takes what matters of a node. The error names a value that no rule can have.
func (s settings) follow(n *plan.Node) (settings, error) {
	local := n.Local[s.family]
	s.pods, s.name, s.ranges = local.Kind, local.Name, nil
	switch s.pods {
	case plan.LocalPrefix:
		s.name, s.ranges = "", rangesOf(s.family, local.Prefixes)
		if len(s.ranges) == 0 {
			s.pods = plan.LocalUnknown
		}
	case plan.LocalInterface, plan.LocalInterfacePrefix:
		const longest = 15
		if s.name == "" || len(s.name) > longest || strings.ContainsAny(s.name, " \t\n\"'\\/*") {
			return s, fmt.Errorf("local traffic: %q is no interface name: give 1 to %d characters without spaces, quotes, '/' and '*'", s.name, longest)
		}
	}
	return s, nil
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
	guards   map[string][]netip.Prefix // source ranges by rangesName
	classes  [classes]bool             // those that something leads to
}

// render says what a Service port needs that is listened for on a port. It is pure.
func (s settings) render(sp *plan.ServicePort, port uint16) *rendered {
	r := &rendered{elements: map[place]content{}, guards: map[string][]netip.Prefix{}}
	if sp == nil {
		return r
	}
	for i := range sp.Frontends {
		fe := &sp.Frontends[i]
		listeners, verdicts := setListeners, setVerdicts
		if fe.Kind == plan.NodePort {
			listeners, verdicts = setPorts, setPortVerdicts
		}
		for _, o := range plan.Origins {
			if o == plan.FromPod && s.pods == plan.LocalUnknown {
				continue
			}
			key := frontKey(sp.ID.Protocol, fe).Number(originNumber(o)).Tuple()
			rt := effective(sp, fe.Route[o])
			switch rt.Verdict {
			case plan.Forward:
				c := classOf(rt)
				r.classes[c] = true
				to := nft.Concat(nil).Addr(c.addr(s.block)).Port(port).Tuple()
				r.elements[place{listeners, key}] = content{data: to, comment: remark(sp.ID)}
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
	if own := rangesOf(s.family, fe.Allow); len(own) > 0 {
		name := rangesName(own)
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

// check says what of a Service port cannot be carried out.
func check(f plan.Family, sp *plan.ServicePort) error {
	switch sp.ID.Protocol {
	case plan.TCP, plan.UDP, plan.SCTP:
	default:
		return fmt.Errorf("protocol %s: want TCP, UDP or SCTP", sp.ID.Protocol)
	}
	for _, fe := range sp.Frontends {
		if fe.Kind != plan.NodePort && (!fe.Addr.IsValid() || plan.FamilyOf(fe.Addr) != f) {
			return fmt.Errorf("%s %s: not an %s address", fe.Kind, fe.Addr, f)
		}
		if fe.Port == 0 {
			return fmt.Errorf("%s %s: port 0", fe.Kind, fe.Addr)
		}
	}
	for _, pool := range sp.Pools {
		for _, e := range pool {
			if !e.Addr.IsValid() || plan.FamilyOf(e.Addr.Addr()) != f || e.Addr.Port() == 0 {
				return fmt.Errorf("endpoint %s: want an %s address and a port", e.Addr, f)
			}
		}
	}
	if len(sp.Frontends) == 0 {
		return errors.New("it has no frontends")
	}
	return nil
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
