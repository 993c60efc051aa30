package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/sys/route"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// Interception by routes alone, for kernels without nf_tables: every address of a
// Service that is not the node's own becomes local by a route, and the relay listens
// on the addresses themselves. Where a packet comes from is told by its source address
// in the process, so that what needs the kernel's help is less than in the other way:
// see the README.

// routes keeps addresses and listeners as they should be.
type routes struct {
	*backend
	known    bool // the host's routing and services follow a whole plan
	services map[plan.ID]*routed
	vips     map[netip.Addr]int // listeners' Services that need a route
	node     *plan.Node
}

// routed is a Service port with its listeners.
type routed struct {
	sp        *plan.ServicePort
	service   *relay.Service
	pools     [2][]plan.Endpoint // that the relay has
	listeners map[netip.AddrPort]*relay.Listener
	vips      []netip.Addr
}

// apply does what Backend.Apply says.
func (r *routes) apply(ctx context.Context, u plan.Update) error {
	ids := map[plan.ID]bool{}
	for _, c := range u.Changed {
		ids[c.ID] = true
	}
	if !r.known || u.Node {
		for id := range u.Plan.Services {
			ids[id] = true
		}
		for id := range r.services {
			ids[id] = true
		}
	}
	r.node = u.Plan.Node
	order := slices.SortedFunc(maps.Keys(ids), plan.ID.Compare)
	for _, id := range order { // what goes makes room first
		r.shrink(id, u.Plan.Services[id])
	}
	before := maps.Clone(r.vips)
	for _, id := range order {
		r.count(id, u.Plan.Services[id])
	}
	if err := r.addVIPs(ctx, before); err != nil {
		return err
	}
	var bad []error
	for _, id := range order {
		sp := u.Plan.Services[id]
		if sp == nil || !slices.Contains(r.env.Families, id.Family) {
			continue
		}
		if err := r.grow(sp); err != nil {
			bad = append(bad, &dataplane.ObjectError{ID: id, Err: err})
		}
	}
	if err := r.deleteVIPs(ctx, before); err != nil {
		bad = append(bad, err)
	}
	r.known = r.known || !u.Partial
	return errors.Join(bad...)
}

// listensFor returns where a Service port is served, and by which frontend. What
// everybody is refused at is not listened on: the kernel refuses.
func (r *routes) listensFor(sp *plan.ServicePort) map[netip.AddrPort]*plan.Frontend {
	out := map[netip.AddrPort]*plan.Frontend{}
	if sp == nil || sp.ID.Protocol == plan.SCTP {
		return out
	}
	for i := range sp.Frontends {
		fe := &sp.Frontends[i]
		refuses := func(rt plan.Route) bool { return effective(sp, rt).Verdict == plan.Reject }
		switch {
		case refuses(fe.Route[0]) && refuses(fe.Route[1]) && refuses(fe.Route[2]):
		case fe.Kind == plan.NodePort:
			for _, a := range r.node.NodePorts[sp.ID.Family].Addrs {
				out[netip.AddrPortFrom(a, fe.Port)] = fe
			}
		default:
			out[netip.AddrPortFrom(fe.Addr, fe.Port)] = fe
		}
	}
	return out
}

// shrink closes what a Service port does not have any more.
func (r *routes) shrink(id plan.ID, sp *plan.ServicePort) {
	s := r.services[id]
	if s == nil {
		return
	}
	keep := r.listensFor(sp)
	for at, ln := range s.listeners {
		if keep[at] == nil {
			ln.Close()
			delete(s.listeners, at)
		}
	}
	if sp == nil {
		s.service.Update(&plan.ServicePort{})
	}
}

// count says which addresses a Service port needs.
func (r *routes) count(id plan.ID, sp *plan.ServicePort) {
	s := r.services[id]
	if s == nil {
		s = &routed{listeners: map[netip.AddrPort]*relay.Listener{}}
		r.services[id] = s
	}
	for _, a := range s.vips {
		if r.vips[a]--; r.vips[a] == 0 {
			delete(r.vips, a)
		}
	}
	s.vips = nil
	if sp == nil {
		delete(r.services, id)
		return
	}
	for i := range sp.Frontends {
		if fe := &sp.Frontends[i]; fe.Kind != plan.NodePort && !slices.Contains(r.node.Addrs, fe.Addr) {
			s.vips = append(s.vips, fe.Addr)
			r.vips[fe.Addr]++
		}
	}
}

// addVIPs makes addresses local that are new, or all if the routing is not known.
func (r *routes) addVIPs(ctx context.Context, before map[netip.Addr]int) error {
	if !r.settled {
		var want []route.Entry
		for _, a := range slices.SortedFunc(maps.Keys(r.vips), netip.Addr.Compare) {
			want = append(want, vipRoute(a))
		}
		if _, err := route.Settle(ctx, r.host.routing, want); err != nil {
			return fmt.Errorf("route the Services' addresses to this host: %w", err)
		}
		r.settled = true
		return nil
	}
	for a := range r.vips {
		if before[a] == 0 {
			if err := r.host.routing.Add(ctx, vipRoute(a)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *routes) deleteVIPs(ctx context.Context, before map[netip.Addr]int) error {
	var errs []error
	for a := range before {
		if r.vips[a] == 0 {
			errs = append(errs, r.host.routing.Delete(ctx, vipRoute(a)))
		}
	}
	return errors.Join(errs...)
}

func vipRoute(a netip.Addr) route.Entry {
	return route.Entry{Local: netip.PrefixFrom(a, a.BitLen()), Table: route.LocalTable}
}

// grow has the relay know a Service port and listen on all of its addresses.
func (r *routes) grow(sp *plan.ServicePort) error {
	if err := sp.Validate(); err != nil {
		return err
	}
	r.remarkProtocol(sp.ID)
	s := r.services[sp.ID]
	if s.service == nil {
		s.service = r.relay.NewService(listeners.Key(sp.ID))
	}
	s.sp = sp
	hidden := *sp // answers to a client's own address would not come back here
	policy := sp.Chosen()
	policy.ClientAddress = plan.ClientAddressHidden
	hidden.Policy = &policy
	hidden.Pools = listeners.Pools(sp, s.pools)
	s.pools = hidden.Pools
	s.service.Update(&hidden)
	var errs []error
	for at, fe := range r.listensFor(sp) {
		router := r.router(s.service, sp, fe)
		if ln := s.listeners[at]; ln != nil {
			ln.SetRouter(router)
			continue
		}
		ln, err := r.relay.Listen(relay.ListenConfig{
			Key: listeners.Key(sp.ID), Protocol: sp.ID.Protocol, Addr: at, FreeBind: true, Router: router,
		})
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.listeners[at] = ln
	}
	return errors.Join(errs...)
}

// router decides by the source address what the kernel's rules decide elsewhere.
func (r *routes) router(s *relay.Service, sp *plan.ServicePort, fe *plan.Frontend) relay.Router {
	node, fam := r.node, sp.ID.Family
	return func(f relay.Flow) (*relay.Service, plan.Route) {
		client := f.Client.Addr()
		allows := func(p netip.Prefix) bool { return p.Contains(client) }
		if fe.Allow != nil && !slices.ContainsFunc(fe.Allow, allows) {
			return s, plan.Route{Verdict: plan.Drop}
		}
		rt := effective(sp, fe.Route[originOf(node, fam, f)])
		rt.SNAT = true
		return s, rt
	}
}

// originOf says where a flow comes from, as far as its addresses tell: the node's own
// processes use an address of the node, or the Service's as it is local.
func originOf(n *plan.Node, fam plan.Family, f relay.Flow) plan.Origin {
	client := f.Client.Addr()
	local := n.Local[fam]
	in := func(p netip.Prefix) bool { return p.Contains(client) }
	switch {
	case client.IsLoopback() || client == f.Local.Addr() || slices.Contains(n.Addrs, client):
		return plan.FromNode
	case local.Kind == plan.LocalPrefix && slices.ContainsFunc(local.Prefixes, in):
		return plan.FromPod
	}
	return plan.FromOutside
}
