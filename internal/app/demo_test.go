package app

import (
	"bytes"
	"context"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// referencePlan is the plan of the demo's own example.
func referencePlan(t *testing.T) *plan.Plan {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "reference.yaml"), referenceManifests, 0o644); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	d := demo{env: Env{Stderr: &said, ReadFile: os.ReadFile}, mode: "iptables", manifests: dir}
	p, err := d.plan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if said.Len() > 0 {
		t.Errorf("warnings: %s", said.String())
	}
	return p
}

func TestDemoRequests(t *testing.T) {
	var have []string
	for _, r := range demoRequests(referencePlan(t)) {
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
		have demoAnswers
		good bool
	}{
		{"both answer", share(a, b), demoAnswers{"a": 3, "b": 4}, true},
		{"one is missing", share(a, b), demoAnswers{"a": 7}, false},
		{"affinity", sticky, demoAnswers{"a": 7}, true},
		{"somebody else", share(a), demoAnswers{"a": 3, "b": 4}, false},
		{"some are refused", share(a), demoAnswers{"a": 3, "(refused)": 1}, false},
		{"refused", plan.Result{Outcome: plan.Refused}, demoAnswers{"(refused)": 10}, true},
		{"dropped instead", plan.Result{Outcome: plan.Refused}, demoAnswers{"(dropped)": 10}, false},
		{"dropped", plan.Result{Outcome: plan.Dropped}, demoAnswers{"(dropped)": 1}, true},
		{"nothing was sent", share(a, b), demoAnswers{}, false},
		{"not served", plan.Result{}, demoAnswers{"a": 1}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			fault := demoRequest{want: tt.want, names: names}.judge(tt.have)
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

// The demo's network lets all hosts reach each other without any proxy.
func TestDemoNetwork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	p := referencePlan(t)
	l, err := buildDemo(p)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, e := range demoEndpoints(p) {
		for _, from := range []string{demoClient, demoNode, demoOutside} {
			for _, port := range e.ports {
				r := demoRequest{id: plan.ID{Protocol: port.proto}, to: netip.AddrPortFrom(e.addr, port.port)}
				a, err := r.sendOne(t.Context(), l.Host(from))
				if err != nil || a.Server != e.name {
					t.Errorf("%s to %s port %d: answer %v, error %v", from, e.name, port.port, a, err)
				}
			}
		}
	}
	r := demoRequest{id: plan.ID{Protocol: plan.TCP}, to: netip.MustParseAddrPort("10.99.129.90:8080")}
	if a, err := r.sendOne(t.Context(), l.Host(demoClient)); err == nil {
		t.Errorf("without a proxy a ClusterIP is answered by %v", a)
	}
}

// demo shows the whole program at work: real packets, and nothing left behind.
func TestDemo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	before := namedNamespaces(t)
	var out, errs bytes.Buffer
	env := demoEnv(&out, &errs)
	if status := Main(t.Context(), env); status != exitOK {
		t.Fatalf("status %d\n%s%s", status, out.String(), errs.String())
	}
	have := out.String()
	for _, want := range []string{
		"DEMO: PASS", "httpd-svc-1", "httpd-svc-2", "httpd-svc-3", "kube-dns-1", "172.16.65.181:30001/tcp", "10.96.0.10:53/udp",
		"KUBE-SVC-IYRDZZKXS5EOQ6Q6", "KUBE-SEP-RXZQI7N2WC2D3KSY", "The network and the proxy are gone again.",
	} {
		if !strings.Contains(have, want) {
			t.Errorf("output lacks %q:\n%s", want, have)
		}
	}
	if after := namedNamespaces(t); !slices.Equal(before, after) {
		t.Errorf("namespaces before %v, after %v", before, after)
	}
}

func TestDemoInterrupted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	ctx, cancel := context.WithCancel(t.Context())
	out := &cancelOn{word: "WHO ANSWERED", cancel: cancel}
	var errs bytes.Buffer
	if status := Main(ctx, demoEnv(out, &errs)); status != exitFailed {
		t.Errorf("status %d", status)
	}
	for _, want := range []string{"The network and the proxy are gone again.", "DEMO: interrupted"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s%s", want, out.String(), errs.String())
		}
	}
}

// demoEnv runs the demo; the proxy in it is this test program, see TestMain.
func demoEnv(out, errs io.Writer) Env {
	return Env{
		Args: []string{"demo"}, Stdout: out, Stderr: errs, Getenv: os.Getenv, Hostname: os.Hostname,
		Executable: func() (string, error) { return exec.LookPath("svcproxy") }, ReadFile: os.ReadFile,
	}
}

// cancelOn cancels once a word was written.
type cancelOn struct {
	bytes.Buffer
	word   string
	cancel func()
}

func (c *cancelOn) Write(p []byte) (int, error) {
	if strings.Contains(string(p), c.word) {
		c.cancel()
	}
	return c.Buffer.Write(p)
}

func namedNamespaces(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/run/netns")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "demo") {
			out = append(out, e.Name())
		}
	}
	return out
}
