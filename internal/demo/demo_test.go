package demo

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/cluster/file"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

// referencePlan is the plan of the reference example.
func referencePlan(t *testing.T) *plan.Plan {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "reference.yaml"), Reference(), 0o644); err != nil {
		t.Fatal(err)
	}
	state := cluster.NewState(time.Now)
	state.SetHost(NodeAddrs())
	src := file.New(dir, file.Options{Node: NodeName})
	if err := src.Load(state.Sink("manifests", file.Delivers()...)); err != nil {
		t.Fatal(err)
	}
	if p := src.Problems(); len(p) > 0 {
		t.Fatal(p)
	}
	u := planner.New(state, planner.Options{
		NodeName: NodeName, Families: plan.Families[:],
		Local: planner.LocalDetector{Kind: planner.ClusterCIDR, CIDRs: []netip.Prefix{podRange()}},
	}).Update()
	return u.Plan
}

func TestRequests(t *testing.T) {
	var have []string
	for _, r := range requestsOf(referencePlan(t)) {
		have = append(have, r.id.String()+" "+r.to.String()+" "+r.from+" "+r.want.String())
	}
	want := []string{
		"default/httpd-svc 10.99.129.90:8080 client forwarded 10.244.0.4:80 10.244.1.2:80 10.244.2.2:80",
		"default/httpd-svc 10.99.129.90:8080 node forwarded 10.244.0.4:80+snat 10.244.1.2:80+snat 10.244.2.2:80+snat",
		"default/httpd-svc 172.16.65.181:30001 client forwarded 10.244.0.4:80+snat 10.244.1.2:80+snat 10.244.2.2:80+snat",
		"default/httpd-svc 172.16.65.181:30001 node forwarded 10.244.0.4:80+snat 10.244.1.2:80+snat 10.244.2.2:80+snat",
		"default/httpd-svc 172.16.65.181:30001 outside forwarded 10.244.0.4:80+snat 10.244.1.2:80+snat 10.244.2.2:80+snat",
		"default/kubernetes:https 10.96.0.1:443 client forwarded 172.16.65.180:6443",
		"default/kubernetes:https 10.96.0.1:443 node forwarded 172.16.65.180:6443+snat",
		"kube-system/kube-dns:dns 10.96.0.10:53 client forwarded 10.244.0.2:53 10.244.0.3:53",
		"kube-system/kube-dns:dns 10.96.0.10:53 node forwarded 10.244.0.2:53+snat 10.244.0.3:53+snat",
		"kube-system/kube-dns:dns-tcp 10.96.0.10:53 client forwarded 10.244.0.2:53 10.244.0.3:53",
		"kube-system/kube-dns:dns-tcp 10.96.0.10:53 node forwarded 10.244.0.2:53+snat 10.244.0.3:53+snat",
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
}

func TestJudge(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80")
	share := func(addrs ...netip.AddrPort) plan.Result {
		r := plan.Result{Outcome: plan.Forwarded}
		for _, x := range addrs {
			r.Endpoints = append(r.Endpoints, plan.Share{Endpoint: plan.Endpoint{Addr: x}})
		}
		return r
	}
	sticky := share(a, b)
	sticky.Affinity = time.Hour
	names := map[netip.Addr]string{a.Addr(): "a", b.Addr(): "b"}
	tests := []struct {
		name string
		want plan.Result
		have answers
		good bool
	}{
		{"both answer", share(a, b), answers{"a": 3, "b": 4}, true},
		{"one is missing", share(a, b), answers{"a": 7}, false},
		{"affinity", sticky, answers{"a": 7}, true},
		{"somebody else", share(a), answers{"a": 3, "b": 4}, false},
		{"some are refused", share(a), answers{"a": 3, "(refused)": 1}, false},
		{"refused", plan.Result{Outcome: plan.Refused}, answers{"(refused)": 10}, true},
		{"dropped instead", plan.Result{Outcome: plan.Refused}, answers{"(dropped)": 10}, false},
		{"dropped", plan.Result{Outcome: plan.Dropped}, answers{"(dropped)": 1}, true},
		{"nothing was sent", share(a, b), answers{}, false},
		{"not served", plan.Result{}, answers{"a": 1}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			fault := request{want: tt.want, names: names}.judge(tt.have)
			if (fault == "") != tt.good {
				t.Errorf("fault %q", fault)
			}
		})
	}
}

func TestChainLines(t *testing.T) {
	listing := `*nat
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A KUBE-NODEPORTS -p tcp -m comment --comment default/web -m tcp --dport 30001 -j KUBE-EXT-W
-A KUBE-SERVICES -d 10.0.0.1/32 -p tcp -m comment --comment "default/web cluster IP" -m tcp --dport 80 -j KUBE-SVC-W
-A KUBE-SERVICES -d 10.0.0.2/32 -p tcp -m comment --comment "default/web2 cluster IP" -m tcp --dport 80 -j KUBE-SVC-X
-A KUBE-EXT-W -j KUBE-SVC-W
-A KUBE-SVC-W -j KUBE-SEP-A
-A KUBE-SVC-X -j KUBE-SEP-B
-A KUBE-SEP-A -s 10.1.0.1/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-A -p tcp -m tcp -j DNAT --to-destination 10.1.0.1:80
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
COMMIT
`
	var chains []string
	for _, l := range chainLines(listing, "default/web") {
		chains = append(chains, strings.Fields(l)[1])
	}
	want := []string{"KUBE-NODEPORTS", "KUBE-SERVICES", "KUBE-EXT-W", "KUBE-SVC-W", "KUBE-SEP-A", "KUBE-SEP-A"}
	if diff := cmp.Diff(want, chains); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
}

// The network lets all hosts reach each other without any proxy.
func TestNetwork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	p := referencePlan(t)
	l, err := build(p)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, e := range endpointsOf(p) {
		for _, from := range []string{clientHost, nodeHost, outsideHost} {
			for _, port := range e.ports {
				r := request{id: plan.ID{Protocol: port.proto}, to: netip.AddrPortFrom(e.addr, port.port)}
				a, err := r.sendOne(t.Context(), l.Host(from))
				if err != nil || a.Server != e.name {
					t.Errorf("%s to %s port %d: answer %v, error %v", from, e.name, port.port, a, err)
				}
			}
		}
	}
	r := request{id: plan.ID{Protocol: plan.TCP}, to: netip.MustParseAddrPort("10.99.129.90:8080")}
	if a, err := r.sendOne(t.Context(), l.Host(clientHost)); err == nil {
		t.Errorf("without a proxy a ClusterIP is answered by %v", a)
	}
}

func TestElementLines(t *testing.T) {
	listing := `table ip svcproxy-userspace {
	map listeners {
		elements = { 10.62.0.20 . tcp . 80 . 0x00000001 comment "default/web" : 169.254.247.0 . 40000,
			     10.62.0.21 . tcp . 80 . 0x00000001 comment "default/web-2" : 169.254.247.0 . 40001,
			     10.62.0.20 . tcp . 80 . 0x00000002 comment "default/web" : 169.254.247.1 . 40000 }
	}
}`
	want := []string{
		`10.62.0.20 . tcp . 80 . 0x00000001 comment "default/web" : 169.254.247.0 . 40000`,
		`10.62.0.20 . tcp . 80 . 0x00000002 comment "default/web" : 169.254.247.1 . 40000`,
	}
	if have := elementLines(listing, "default/web"); !slices.Equal(have, want) {
		t.Errorf("have %q, want %q", have, want)
	}
}
