package planner

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// buffers are reused from Service to Service, so that planning one that did not
// change allocates next to nothing.
type buffers struct {
	wanted    []wanted
	found     []candidate
	cluster   []plan.Endpoint
	local     []plan.Endpoint
	serving   []netip.AddrPort
	draining  []netip.AddrPort
	frontends []plan.Frontend
	ports     []*plan.ServicePort
	ready     []netip.Addr // addresses of ready endpoints on this node
	kept      []plan.ID    // ports held at another version than the facts ask for
}

// ignored reports why the whole Service is left alone, "" if it is not.
func (p *Planner) ignored(svc *cluster.Service) plan.Reason {
	switch {
	case svc.HasProxyName != (p.opt.ServiceProxyName != "") || svc.ProxyName != p.opt.ServiceProxyName:
		return OtherProxy
	case svc.Type == "ExternalName":
		return ExternalName
	case svc.Headless:
		return Headless
	case len(svc.ClusterIPs) == 0:
		return NoClusterIP
	}
	return ""
}

// wantedBy returns the frontends that svc asks for, sorted by family, port, kind
// and address. The result is valid until the next call.
func (p *Planner) wantedBy(svc *cluster.Service) []wanted {
	out := p.buf.wanted[:0]
	if svc == nil || p.ignored(svc) != "" {
		return out
	}
	for _, f := range p.opt.Families {
		clusterIP, ok := clusterIPOf(svc, f)
		if !ok {
			continue
		}
		for i := range svc.Ports {
			if repeated(svc, i) {
				continue
			}
			port := &svc.Ports[i]
			want := func(kind plan.Kind, a netip.Addr, number uint16) {
				if kind == plan.NodePort || plan.FamilyOf(a) == f {
					key := claimKey{addr: a, port: number, protocol: protocolOf(port), family: f}
					out = append(out, wanted{key: key, kind: kind, port: uint16(i)})
				}
			}
			want(plan.ClusterIP, clusterIP, port.Port)
			if p.opt.AllowExternalIPs {
				for _, a := range svc.ExternalIPs {
					if p.refused(a) == "" {
						want(plan.ExternalIP, a, port.Port)
					}
				}
			}
			for _, in := range svc.Ingress {
				if !in.Proxy && p.refused(in.Addr) == "" {
					want(plan.LoadBalancerIP, in.Addr, port.Port)
				}
			}
			if port.NodePort != 0 {
				want(plan.NodePort, netip.Addr{}, port.NodePort)
			}
		}
	}
	p.buf.wanted = onceEach(out)
	return p.buf.wanted
}

// onceEach drops frontends that the same Service asks for twice. An address that
// is an external and a load-balancer address stays the latter, so that its source
// ranges hold.
func onceEach(in []wanted) []wanted {
	precedence := [...]int{plan.ClusterIP: 0, plan.LoadBalancerIP: 1, plan.ExternalIP: 2, plan.NodePort: 3}
	slices.SortFunc(in, func(a, b wanted) int {
		return cmp.Or(a.key.compare(b.key), cmp.Compare(precedence[a.kind], precedence[b.kind]), cmp.Compare(a.port, b.port))
	})
	in = slices.CompactFunc(in, func(a, b wanted) bool { return a.key == b.key })
	slices.SortFunc(in, func(a, b wanted) int {
		return cmp.Or(cmp.Compare(a.key.family, b.key.family), cmp.Compare(a.port, b.port), cmp.Compare(a.kind, b.kind), a.key.compare(b.key))
	})
	return in
}

func (k claimKey) compare(o claimKey) int {
	return cmp.Or(k.addr.Compare(o.addr), cmp.Compare(k.port, o.port), cmp.Compare(k.protocol, o.protocol), cmp.Compare(k.family, o.family))
}

func clusterIPOf(svc *cluster.Service, f plan.Family) (netip.Addr, bool) {
	for _, a := range svc.ClusterIPs {
		if plan.FamilyOf(a) == f {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// repeated reports whether a port before that with index i has its name and
// protocol, which are what tells ports apart.
func repeated(svc *cluster.Service, i int) bool {
	for j := range svc.Ports[:i] {
		a, b := &svc.Ports[j], &svc.Ports[i]
		if a.Protocol == b.Protocol && interned(a.Name) == interned(b.Name) {
			return true
		}
	}
	return false
}

func protocolOf(port *cluster.ServicePort) plan.Protocol {
	switch port.Protocol {
	case "UDP":
		return plan.UDP
	case "SCTP":
		return plan.SCTP
	}
	return plan.TCP
}

// draft is what the ports of one Service in one family have in common.
type draft struct {
	p      *Planner
	s      *service
	svc    *cluster.Service
	slices []*cluster.Slice
	family plan.Family
	allow  []netip.Prefix // of load-balancer addresses, nil: everyone
	node   bool           // allow covers this node
	// failing are the endpoints that fail the Service's health check, sorted.
	failing []netip.AddrPort
	notes   noter
}

// planFamily adds the ServicePorts of family f to buf.ports and returns the
// Service's health-check port, zero if it has none.
func (d *draft) planFamily(f plan.Family) plan.HealthPort {
	if _, ok := clusterIPOf(d.svc, f); !ok {
		d.remarkFamily(f)
		return plan.HealthPort{}
	}
	d.family = f
	d.setAllow()
	d.p.buf.ready = d.p.buf.ready[:0]
	for i := range d.svc.Ports {
		if repeated(d.svc, i) {
			continue
		}
		if sp := d.port(i); sp != nil {
			d.p.buf.ports = append(d.p.buf.ports, sp)
		}
	}
	if !d.externalLocal() || d.svc.Type != "LoadBalancer" {
		return plan.HealthPort{}
	}
	ready := d.p.buf.ready
	slices.SortFunc(ready, netip.Addr.Compare)
	return plan.HealthPort{Port: d.svc.HealthCheckNodePort, Local: len(slices.Compact(ready))}
}

// externalLocal reports whether externalTrafficPolicy Local has effect.
func (d *draft) externalLocal() bool {
	switch d.svc.Type {
	case "LoadBalancer", "NodePort":
		return d.svc.ExternalLocal
	}
	return d.svc.ExternalLocal && len(d.svc.ExternalIPs) > 0
}

// setAllow prepares the source ranges: those of the family, nobody kept out by a
// range of length 0 nor by ranges of the other family only.
func (d *draft) setAllow() {
	d.allow, d.node = nil, false
	ranges := ofFamily(d.svc.SourceRanges, d.family)
	if len(ranges) == 0 || slices.Contains(ranges, everything(d.family)) {
		return
	}
	slices.SortFunc(ranges, comparePrefixes)
	d.allow = slices.Compact(ranges)
	ip, ok := d.p.env.ips[d.family]
	d.node = ok && covers(d.allow, ip)
}

// allowed returns who may use the load-balancer address a. A node that connects to
// an address of its own has this very address as source.
func (d *draft) allowed(a netip.Addr) []netip.Prefix {
	if !d.node {
		return d.allow
	}
	own := netip.PrefixFrom(a, a.BitLen())
	at, found := slices.BinarySearchFunc(d.allow, own, comparePrefixes)
	if found {
		return d.allow
	}
	return slices.Insert(slices.Clone(d.allow), at, own)
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// port plans the port with index i, nil: nothing is left of it.
func (d *draft) port(i int) *plan.ServicePort {
	p, port := d.p, &d.svc.Ports[i]
	id := plan.ID{
		Namespace: d.s.name.Namespace, Name: d.s.name.Name, Port: text(port.Name),
		Protocol: protocolOf(port), Family: d.family,
	}
	p.collect(d.slices, port, d.family)
	d.pools(id.Protocol)
	for j := range p.buf.found {
		if c := &p.buf.found[j]; c.here && c.ready() {
			p.buf.ready = append(p.buf.ready, c.addr.Addr())
		}
	}
	found, usable := len(p.buf.found), len(p.buf.cluster) > 0
	d.frontends(i)
	if len(p.buf.frontends) == 0 {
		return nil
	}
	d.remarkPort(i, found, usable)
	base := p.plan.Services[id]
	h, held := p.held[id]
	if held {
		base = h.refused
	}
	sp := d.build(id, base)
	if held && sp == h.refused {
		p.buf.kept = append(p.buf.kept, id)
		return h.good
	}
	delete(p.held, id)
	return sp
}

// frontends fills buf.frontends with those of the port with index i that the
// Service won, and empties the pools that none of them uses.
func (d *draft) frontends(i int) {
	p, b := d.p, &d.p.buf
	b.frontends = b.frontends[:0]
	t := traffic{
		any: len(b.cluster) > 0, here: len(b.local) > 0,
		podsKnown: p.env.podsKnown[d.family], masqAll: p.opt.MasqueradeAll,
	}
	var used [2]bool
	for _, w := range d.s.wanted {
		if w.key.family != d.family || int(w.port) != i {
			continue
		}
		if !p.claims.has(d.s, w.key) {
			d.remarkLost(w)
			continue
		}
		t.external, t.local = w.kind != plan.ClusterIP, d.svc.InternalLocal
		if t.external {
			t.local = d.externalLocal()
		}
		f := plan.Frontend{Kind: w.kind, Addr: w.key.addr, Port: w.key.port, Route: t.routes()}
		if w.kind == plan.LoadBalancerIP {
			f.Allow = d.allowed(f.Addr)
		}
		for _, r := range f.Route {
			used[r.Pool] = used[r.Pool] || r.Verdict == plan.Forward
		}
		b.frontends = append(b.frontends, f)
	}
	if !used[plan.Cluster] {
		b.cluster = b.cluster[:0]
	}
	if !used[plan.Local] {
		b.local = b.local[:0]
	}
}
