package listeners

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// newRelay starts a relay in a network namespace of the test's own, in which the block's
// addresses are the host's.
func newRelay(t *testing.T) *relay.Relay {
	t.Helper()
	nstest.Enter(t)
	ctx := context.Background()
	if err := (route.Kernel{}).Add(ctx, route.Entry{Local: DefaultBlocks().V4, Table: route.LocalTable}); err != nil {
		t.Fatal(err)
	}
	r := relay.New(relay.Options{})
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Shutdown(ctx) })
	return r
}

// Ports come from the range, around those that others have; one that is too small is
// named, and a port that is given back is used again.
func TestPortRange(t *testing.T) {
	r := newRelay(t)
	other, err := net.Listen("tcp4", "0.0.0.0:40001")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	p := New(r, DefaultBlocks(), PortRange{40000, 40002}, 100)
	sp := func(n int) *plan.ServicePort {
		return &plan.ServicePort{ID: plan.ID{Name: fmt.Sprint(n), Protocol: plan.TCP, Family: plan.IPv4}}
	}
	both := Set{true, true}
	var got []uint16
	for n := range 2 {
		port, err := p.Serve(sp(n), both, 0)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, port)
	}
	if got[0] == got[1] || got[0] == 40001 || got[1] == 40001 {
		t.Errorf("ports %v, want 40000 and 40002", got)
	}
	if _, err := p.Serve(sp(2), both, 0); err == nil || !strings.Contains(err.Error(), "portRange") {
		t.Errorf("a range that is used up gives %v", err)
	}
	if port, err := p.Serve(sp(0), Set{true, true, true, true}, 0); err != nil || port != got[0] {
		t.Errorf("more addresses: port %d, %v, want %d", port, err, got[0])
	}
	p.Drop(sp(0).ID)
	if port, err := p.Serve(sp(2), both, 0); err != nil || port != got[0] {
		t.Errorf("after one was given back: %d, %v, want %d", port, err, got[0])
	}
	// The port of an earlier run is kept if it is free, and left if it is not.
	p = New(r, DefaultBlocks(), PortRange{}, 5)
	if port, err := p.Serve(sp(5), both, 41234); err != nil || port != 41234 {
		t.Errorf("port %d, %v, want 41234", port, err)
	}
	if port, err := p.Serve(sp(6), both, 41234); err != nil || port == 41234 || port == 0 {
		t.Errorf("port %d, %v, want another than 41234", port, err)
	}
	// There is an end to it, which costs what is there nothing.
	if _, err := p.Serve(sp(7), both, 0); err == nil || !strings.Contains(err.Error(), "LimitNOFILE") || p.open != 4 {
		t.Errorf("beyond the limit of sockets: %v, with %d open", err, p.open)
	}
	for n := range 8 {
		p.Drop(sp(n).ID)
	}
	if p.open != 0 {
		t.Errorf("%d sockets are left", p.open)
	}
}

// Connections that come to the address of a policy that was in force a moment ago are
// served, by endpoints that the Service still has.
func TestPolicyChange(t *testing.T) {
	var addrs []netip.AddrPort // reached by the relay's own threads, from outside of the namespace
	for n := range 2 {
		ln, err := net.Listen("tcp4", fmt.Sprintf("127.0.1.%d:0", n+1))
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		go func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				fmt.Fprint(conn, n)
				conn.Close()
			}
		}()
		addrs = append(addrs, ln.Addr().(*net.TCPAddr).AddrPort())
	}
	r := newRelay(t)
	sp := func(p plan.Protocol, pool plan.Pool, local, all []int) *plan.ServicePort {
		sp := &plan.ServicePort{ID: plan.ID{Name: "web", Protocol: p, Family: plan.IPv4}}
		rt := plan.Route{Verdict: plan.Forward, Pool: pool, SNAT: true}
		sp.Frontends = []plan.Frontend{{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("10.62.0.20"), Port: 80, Route: [3]plan.Route{rt, rt, rt}}}
		for i, in := range [][]int{all, local} {
			for _, n := range in {
				sp.Pools[i] = append(sp.Pools[i], plan.Endpoint{Addr: addrs[n], Weight: 1})
			}
		}
		return sp
	}
	p := New(r, DefaultBlocks(), PortRange{}, 100)
	serve := func(sp *plan.ServicePort) (at [2]netip.AddrPort) {
		t.Helper()
		on := Set{}
		on[ClassOf(sp.Frontends[0].Route[0])] = true
		port, err := p.Serve(sp, on, 0)
		if err != nil {
			t.Fatal(err)
		}
		p.Trim(sp.ID, on)
		for i := range at {
			at[i] = netip.AddrPortFrom(ClassOf(plan.Route{Pool: plan.Pool(i), SNAT: true}).Addr(DefaultBlocks().V4), port)
		}
		return at
	}
	answers := func(at netip.AddrPort) string {
		conn, err := net.DialTimeout("tcp4", at.String(), 5*time.Second)
		if err != nil {
			return ""
		}
		defer conn.Close()
		got, _ := io.ReadAll(conn)
		return string(got)
	}
	serve(sp(plan.TCP, plan.Local, []int{1}, []int{0, 1}))
	at := serve(sp(plan.TCP, plan.Cluster, nil, []int{0, 1}))
	if got := answers(at[plan.Local]); got != "1" {
		t.Errorf("after the policy was Local: %q, want 1", got)
	}
	serve(sp(plan.TCP, plan.Cluster, nil, []int{0}))
	if got := answers(at[plan.Local]); got != "" {
		t.Errorf("where a policy led that was Local, an endpoint answers that is gone, or one that was not local: %q", got)
	}
	if got := answers(at[plan.Cluster]); got != "0" {
		t.Errorf("policy Cluster: %q, want 0", got)
	}
	// A pool that is empty for lack of endpoints stays so.
	serve(sp(plan.TCP, plan.Local, []int{0}, []int{0, 1}))
	serve(sp(plan.TCP, plan.Local, nil, []int{0, 1}))
	if got := answers(at[plan.Local]); got != "" {
		t.Errorf("policy Local without an endpoint here: %q", got)
	}
	// UDP has no such moment: a datagram that comes late is translated anew.
	serve(sp(plan.UDP, plan.Local, []int{1}, []int{0, 1}))
	serve(sp(plan.UDP, plan.Cluster, nil, []int{0, 1}))
	if s := p.served[sp(plan.UDP, 0, nil, nil).ID]; s.listeners[ClassOf(plan.Route{Pool: plan.Local, SNAT: true})] != nil {
		t.Error("a UDP listener stays where nothing leads any more")
	}
}

// As long as there are others, no port is taken that another Service port has, also
// where the addresses differ: a change of policy could not keep it.
func TestPortsAreNotShared(t *testing.T) {
	r := newRelay(t)
	p := New(r, DefaultBlocks(), PortRange{}, 1000)
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40399"), 0); err != nil {
		t.Fatal(err)
	}
	seen := map[uint16]bool{}
	for n := range 40 { // the kernel chooses among a quarter of the range
		on := Set{}
		on[n%Classes] = true
		port, err := p.Serve(&plan.ServicePort{ID: plan.ID{Name: fmt.Sprint(n), Protocol: plan.TCP, Family: plan.IPv4}}, on, 0)
		if err != nil {
			t.Fatal(err)
		}
		if seen[port] {
			t.Errorf("port %d is given twice", port)
		}
		seen[port] = true
	}
}
