package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// settings is everything but the Services that virtual servers and chains depend on.
type settings struct {
	table.Settings
	choice scheduler.Choice
	// others are the virtual servers that are not ours: node ports at their addresses are
	// left to them.
	others map[ipvs.Key]bool
	// coinciding are those where another frontend has what a node port would need.
	coinciding map[ipvs.Key]bool
}

// key stands for all of it, to compare.
func (s settings) key() string { return fmt.Sprint(s) }

// service is a Service port with the number of its marks.
type service struct {
	sp     *plan.ServicePort
	number uint32
}

// server is a virtual server with the endpoints that it sends clients to.
type server struct {
	ipvs.VirtualServer
	pool plan.Pool
}

// realKey names a real server.
type realKey struct {
	server ipvs.Key
	addr   netip.AddrPort
}

// real is what there is to say of one.
type real struct {
	weight     uint32
	forwarding ipvs.Forwarding
}

// item is an element with its content.
type item struct {
	table.Element
	table.Content
}

// rendered is what one Service port needs.
type rendered struct {
	*service
	servers []server
	items   []item
	objects []nft.Object // chains and sets, those that others lead to first
	bound   []netip.Addr
}

// render says what a Service port needs. It is pure. A nil svc needs nothing.
func (s settings) render(svc *service) *rendered {
	r := &rendered{service: svc}
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
	marked := map[bool]bool{} // by whether they are masqueraded
	var used [2]bool
	for i := range svc.sp.Frontends {
		fe := &svc.sp.Frontends[i]
		c, base := s.ClassOf(fe)
		used[base] = true
		for _, rt := range c.Routes {
			if rt.Marked {
				used[plan.Cluster] = true
				marked[rt.Masq] = true
			}
		}
		s.front(r, fe, c, base, need)
	}
	for _, masq := range [...]bool{false, true} {
		if marked[masq] {
			m := table.MarkOf(svc.number, s.Bit)
			if masq {
				m |= s.Mark()
			}
			r.add(ipvs.ByMark(table.ServerFamilyOf(s.Family), m), plan.Cluster, s)
			r.items = append(r.items, item{Element: table.Element{Kind: table.ServerMarks, Mark: m}})
		}
	}
	s.endpoints(r, used)
	return r
}

// front adds what a frontend needs.
func (s settings) front(r *rendered, fe *plan.Frontend, c *table.Class, base plan.Pool, need func(nft.Object)) {
	id := r.sp.ID
	need(s.ClassChain(c))
	lead := c.Name()
	if fe.Allow != nil {
		chain, set := s.AllowChain(fe.Allow, lead)
		if set != nil {
			need(*set)
		}
		need(chain)
		lead = chain.Name()
	}
	verdict := table.Content{Chain: lead, Remark: table.Remark(id)}
	marks := c.Marks()
	number := table.Content{Mark: table.MarkOf(r.number, s.Bit)}
	add := func(e table.Element, c table.Content) { r.items = append(r.items, item{e, c}) }
	if fe.Kind == plan.NodePort {
		add(table.OnPort(table.NodePorts, id.Protocol, fe.Port), verdict)
		if marks {
			add(table.OnPort(table.PortMarks, id.Protocol, fe.Port), number)
		}
		for _, a := range s.Addrs {
			at := netip.AddrPortFrom(a, fe.Port)
			k := ipvs.ByAddr(ipvs.Protocol(id.Protocol), at)
			if s.coinciding[k] {
				continue
			}
			if s.others[k] {
				add(table.At(table.Services, id.Protocol, at), table.Content{Chain: table.ChainOthers, Remark: table.Remark(id)})
				continue
			}
			s.at(r, at, base)
		}
		return
	}
	at := netip.AddrPortFrom(fe.Addr, fe.Port)
	add(table.At(table.Services, id.Protocol, at), verdict)
	if marks {
		add(table.At(table.Marks, id.Protocol, at), number)
	}
	switch fe.Kind {
	case plan.ClusterIP:
		add(table.OnAddr(table.ClusterIPs, fe.Addr), table.Content{})
		r.bound = append(r.bound, fe.Addr)
	default:
		add(table.At(table.External, id.Protocol, at), table.Content{})
		add(table.OnAddr(table.ExternalIPs, fe.Addr), table.Content{})
	}
	s.at(r, at, base)
}

// at adds the virtual server at an address.
func (s settings) at(r *rendered, a netip.AddrPort, pool plan.Pool) {
	p := r.sp.ID.Protocol
	r.items = append(r.items, item{Element: table.At(table.Servers, p, a)})
	r.add(ipvs.ByAddr(ipvs.Protocol(p), a), pool, s)
}

// add adds a virtual server.
func (r *rendered) add(k ipvs.Key, pool plan.Pool, s settings) {
	v := ipvs.VirtualServer{Key: k, ClientBits: 32}
	if s.Family == plan.IPv6 {
		v.ClientBits = 128
	}
	v.Scheduler, v.Flags = s.choice.Of(r.sp)
	switch {
	case r.sp.Affinity > 0 && k.Mark != 0:
		v.Scheduler, v.Flags = s.choice.Sticky()
	case r.sp.Affinity > 0:
		v.Flags |= ipvs.Persistent
		v.Timeout = wholeSeconds(r.sp.Affinity)
	}
	r.servers = append(r.servers, server{v, pool})
}

func wholeSeconds(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}

// isOwn reports whether an endpoint may be where a virtual server is: at a node's own port.
func (s settings) isOwn(r *rendered, e *plan.Endpoint) bool {
	return e.OnNode && slices.Contains(s.Addrs, e.Addr.Addr()) ||
		slices.ContainsFunc(r.servers, func(v server) bool { return v.Addr == e.Addr })
}

// endpoints adds the elements that endpoints of the used pools need.
func (s settings) endpoints(r *rendered, used [2]bool) {
	sp := r.sp
	meetsItself := sp.MayMeetItself(s.Local)
	seen := map[table.Element]bool{}
	add := func(e table.Element) {
		if !seen[e] {
			seen[e] = true
			r.items = append(r.items, item{Element: e})
		}
	}
	guarded := !s.Liberal && sp.ID.Protocol == plan.TCP
	if guarded {
		for _, a := range sp.Draining {
			add(table.OnAddr(table.Endpoints, a.Addr()))
		}
	}
	for pool, eps := range sp.Pools {
		if !used[pool] {
			continue
		}
		for i := range eps {
			e := &eps[i]
			if e.Weight > 0 && meetsItself(*e) {
				add(table.At(table.Hairpin, sp.ID.Protocol, e.Addr))
			}
			if guarded {
				add(table.OnAddr(table.Endpoints, e.Addr.Addr()))
			}
			if s.isOwn(r, e) {
				add(table.At(table.OwnEndpoints, sp.ID.Protocol, e.Addr))
			}
		}
	}
}
