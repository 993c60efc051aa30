package ipvs

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func ep(s string, onNode bool) plan.Endpoint {
	return plan.Endpoint{Addr: netip.MustParseAddrPort(s), Weight: 1, OnNode: onNode, Elsewhere: !onNode}
}

// reference is the reference example: a node with three Services.
func reference() *plan.Plan {
	addr := netip.MustParseAddr
	cluster := [3]plan.Route{{}, {SNAT: true}, {SNAT: true}}
	nodeAddrs := []netip.Addr{addr("10.244.0.0"), addr("10.244.0.1"), addr("172.16.65.181"), addr("172.17.0.1")}
	p := &plan.Plan{
		Services: map[plan.ID]*plan.ServicePort{},
		Node: &plan.Node{
			Name: "node", Addrs: nodeAddrs, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
			NodePorts: map[plan.Family]plan.NodePorts{plan.IPv4: {All: true, Addrs: nodeAddrs}},
			Local:     map[plan.Family]plan.LocalTraffic{plan.IPv4: {Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}},
		},
	}
	add := func(sp plan.ServicePort) { p.Services[sp.ID] = &sp }
	add(plan.ServicePort{
		ID:        plan.ID{Namespace: "default", Name: "kubernetes", Port: "https", Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: addr("10.96.0.1"), Port: 443, Route: cluster}},
		Pools:     [2][]plan.Endpoint{{ep("172.16.65.180:6443", false)}, nil},
		Affinity:  10800 * time.Second,
	})
	for port, proto := range map[string]plan.Protocol{"dns": plan.UDP, "dns-tcp": plan.TCP} {
		add(plan.ServicePort{
			ID:        plan.ID{Namespace: "kube-system", Name: "kube-dns", Port: port, Protocol: proto, Family: plan.IPv4},
			Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: addr("10.96.0.10"), Port: 53, Route: cluster}},
			Pools:     [2][]plan.Endpoint{{ep("10.244.0.2:53", true), ep("10.244.0.3:53", true)}, nil},
		})
	}
	add(plan.ServicePort{
		ID: plan.ID{Namespace: "default", Name: "httpd-svc", Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: addr("10.99.129.90"), Port: 8080, Route: cluster},
			{Kind: plan.NodePort, Port: 30001, Route: [3]plan.Route{{SNAT: true}, {SNAT: true}, {SNAT: true}}},
		},
		Pools: [2][]plan.Endpoint{{ep("10.244.0.4:80", true), ep("10.244.1.2:80", false), ep("10.244.2.2:80", false)}, nil},
	})
	return p
}

// policies has a frontend of every kind with Local policy, source ranges, and a Service
// without endpoints.
func policies() *plan.Plan {
	p := reference()
	clear(p.Services)
	addr := netip.MustParseAddr
	here, elsewhere := ep("10.244.0.4:80", true), ep("10.244.1.2:80", false)
	local := [3]plan.Route{{}, {SNAT: true}, {Pool: plan.Local}}
	reject := plan.Route{Verdict: plan.Reject}
	for _, sp := range []plan.ServicePort{{
		ID: plan.ID{Namespace: "default", Name: "edge", Port: "http", Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: addr("10.99.0.1"), Port: 80, Route: [3]plan.Route{{Pool: plan.Local}, {Pool: plan.Local, SNAT: true}, {Pool: plan.Local, SNAT: true}}},
			{Kind: plan.ExternalIP, Addr: addr("172.16.65.180"), Port: 80, Route: local},
			{Kind: plan.LoadBalancerIP, Addr: addr("203.0.113.20"), Port: 80, Route: local, Allow: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/25")}},
			{Kind: plan.NodePort, Port: 31080, Route: local},
		},
		Pools: [2][]plan.Endpoint{{here, elsewhere}, {here}},
	}, {
		ID:        plan.ID{Namespace: "default", Name: "quiet", Protocol: plan.SCTP, Family: plan.IPv4},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: addr("10.99.0.2"), Port: 9, Route: [3]plan.Route{reject, reject, reject}}},
	}} {
		p.Services[sp.ID] = &sp
	}
	p.Health = map[plan.HealthID]plan.HealthPort{{Service: plan.Name{Namespace: "default", Name: "edge"}, Family: plan.IPv4}: {Port: 32100, Local: 1}}
	return p
}

func TestGolden(t *testing.T) {
	for name, p := range map[string]*plan.Plan{"reference": reference(), "policies": policies()} {
		r := newRig()
		mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
		file := filepath.Join("testdata", name+".txt")
		have := r.state(t)
		if *update {
			if err := os.WriteFile(file, []byte(have), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if have != string(want) {
			t.Errorf("%s: %s\n(-update rewrites it)", file, plantest.FirstDifference(have, string(want)))
		}
	}
}

// The reference example gives the virtual servers that people know.
func TestReferenceServers(t *testing.T) {
	r := newRig()
	mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: reference()})
	const httpd = "  -> 10.244.0.4:80 Masq 1\n  -> 10.244.1.2:80 Masq 1\n  -> 10.244.2.2:80 Masq 1\n"
	const dns = "  -> 10.244.0.2:53 Masq 1\n  -> 10.244.0.3:53 Masq 1\n"
	want := "TCP 10.96.0.1:443 rr persistent 10800\n  -> 172.16.65.180:6443 Masq 1\n" +
		"TCP 10.96.0.10:53 rr\n" + dns + "UDP 10.96.0.10:53 rr\n" + dns + "TCP 10.99.129.90:8080 rr\n" + httpd +
		"TCP 10.244.0.0:30001 rr\n" + httpd + "TCP 10.244.0.1:30001 rr\n" + httpd +
		"TCP 172.16.65.181:30001 rr\n" + httpd + "TCP 172.17.0.1:30001 rr\n" + httpd
	if have := r.servers.String(); have != want {
		t.Errorf("have\n%s\nwant\n%s", have, want)
	}
	addrs, err := r.device.Addrs()
	if have := fmtAddrs(addrs); err != nil || have != "10.96.0.1 10.96.0.10 10.99.129.90" {
		t.Errorf("addresses: %s, %v", have, err)
	}
}

func fmtAddrs(addrs []netip.Addr) string {
	out := make([]string, len(addrs))
	for i, a := range addrs {
		out[i] = a.String()
	}
	return strings.Join(out, " ")
}
