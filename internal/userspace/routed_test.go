package userspace

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// By routes, a Service's addresses are local as long as it is there, unless they are
// the node's, and are listened on as long as somebody may use them.
func TestByRoutes(t *testing.T) {
	node := at(plan.IPv4, "node", 11)
	inNamespace(t, node, at(plan.IPv4, "node", 21))
	b, _ := kernelBackend(t, Options{Interception: ByRoutes})
	ctx := context.Background()
	p := webPlan(plan.TCP, 5)
	sp := *p.Services[webID(plan.TCP)]
	sp.Frontends = append(slices.Clone(sp.Frontends),
		plan.Frontend{Kind: plan.LoadBalancerIP, Addr: at(plan.IPv4, "external", 1), Port: 80},
		plan.Frontend{Kind: plan.ExternalIP, Addr: node, Port: 8443})
	p.Services[sp.ID] = &sp
	p.Node.NodePorts[plan.IPv4] = plan.NodePorts{Addrs: []netip.Addr{node}}
	mustRun := func(u plan.Update, vips []string, listening []string) {
		t.Helper()
		if err := b.Apply(ctx, u); err != nil {
			t.Fatal(err)
		}
		var want []route.Entry
		for _, v := range vips {
			want = append(want, vipRoute(netip.MustParseAddr(v)))
		}
		have, err := (route.Kernel{}).List(ctx)
		if err != nil || len(have) != len(want) {
			t.Errorf("routes %v, %v, want %v", have, err, want)
		}
		for _, e := range want {
			if !slices.Contains(have, e) {
				t.Errorf("no %s", e)
			}
		}
		var addrs []string
		for _, s := range b.routes.services {
			for a := range s.listeners {
				addrs = append(addrs, a.String())
			}
		}
		slices.Sort(addrs)
		if !slices.Equal(addrs, listening) {
			t.Errorf("listens on %v, want %v", addrs, listening)
		}
	}
	both := []string{"10.62.0.20", "203.0.113.1"}
	mustRun(plantest.Difference(nil, p), both, []string{"10.62.0.20:80", "192.0.2.11:31080", "192.0.2.11:8443", "203.0.113.1:80"})
	if lines, err := b.Diff(ctx, p); err != nil || len(lines) > 0 {
		t.Errorf("differences %q, %v", lines, err)
	}

	none := &plan.Plan{Node: p.Node, Services: maps.Clone(p.Services)}
	empty := sp
	empty.Pools = [2][]plan.Endpoint{}
	none.Services[sp.ID] = &empty
	mustRun(plantest.Difference(p, none), both, nil)

	moved := &plan.Plan{Node: p.Node, Services: map[plan.ID]*plan.ServicePort{}}
	heir := sp
	heir.ID.Name, heir.Frontends = "heir", sp.Frontends[:1]
	moved.Services[heir.ID] = &heir
	mustRun(plantest.Difference(none, moved), both[:1], []string{"10.62.0.20:80"})

	if err := (route.Kernel{}).Delete(ctx, vipRoute(at(plan.IPv4, "service", 20))); err != nil {
		t.Fatal(err)
	}
	b.Invalidate()
	mustRun(plan.Update{Plan: moved}, both[:1], []string{"10.62.0.20:80"})
	mustRun(plantest.Difference(moved, &plan.Plan{Node: p.Node, Services: map[plan.ID]*plan.ServicePort{}}), nil, nil)
	if s := b.Services(); len(s) > 0 {
		t.Errorf("still serves %v", s)
	}
}

// Without the kernel's help the source address says where a flow is from.
func TestOriginByAddress(t *testing.T) {
	n := &plan.Node{Addrs: []netip.Addr{at(plan.IPv4, "node", 11)}, Local: map[plan.Family]plan.LocalTraffic{
		plan.IPv4: {Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{prefix(at(plan.IPv4, "pod", 0), 24, 64)}},
	}}
	vip := netip.AddrPortFrom(at(plan.IPv4, "service", 20), 80)
	for client, want := range map[netip.Addr]plan.Origin{
		at(plan.IPv4, "pod", 5):              plan.FromPod,
		at(plan.IPv4, "remote", 5):           plan.FromOutside,
		at(plan.IPv4, "client", 7):           plan.FromOutside,
		at(plan.IPv4, "node", 11):            plan.FromNode,
		netip.MustParseAddr("127.0.0.1"):     plan.FromNode,
		vip.Addr():                           plan.FromNode,
		netip.MustParseAddr("169.254.1.200"): plan.FromOutside,
	} {
		f := relay.Flow{Client: netip.AddrPortFrom(client, 40000), Local: vip}
		if have := originOf(n, plan.IPv4, f); have != want {
			t.Errorf("%s is from %s, want %s", client, have, want)
		}
	}
}

// What the process decides about a flow is what the plan says, with the node's address.
func TestRouter(t *testing.T) {
	r := &routes{backend: &backend{}, node: &plan.Node{Local: map[plan.Family]plan.LocalTraffic{}}}
	s := relay.New(relay.Options{}).NewService("web")
	sp := webPlan(plan.TCP, 5).Services[webID(plan.TCP)]
	fe := &plan.Frontend{
		Kind: plan.LoadBalancerIP, Addr: at(plan.IPv4, "external", 1), Port: 80,
		Allow: []netip.Prefix{prefix(at(plan.IPv4, "client", 0), 25, 0)},
		Route: [3]plan.Route{{}, {}, {}},
	}
	route := r.router(s, sp, fe)
	local := netip.AddrPortFrom(fe.Addr, fe.Port)
	if _, rt := route(relay.Flow{Client: netip.AddrPortFrom(at(plan.IPv4, "client", 7), 1), Local: local}); rt != (plan.Route{SNAT: true}) {
		t.Errorf("an allowed client: %+v", rt)
	}
	if _, rt := route(relay.Flow{Client: netip.AddrPortFrom(at(plan.IPv4, "client", 200), 1), Local: local}); rt.Verdict != plan.Drop {
		t.Errorf("a client that is not allowed: %+v", rt)
	}
	fe.Route[plan.FromOutside] = plan.Route{Pool: plan.Local}
	if _, rt := route(relay.Flow{Client: netip.AddrPortFrom(at(plan.IPv4, "client", 7), 1), Local: local}); rt.Verdict != plan.Reject {
		t.Errorf("nobody is here: %+v", rt)
	}
}
