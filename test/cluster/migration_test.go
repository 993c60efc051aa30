//go:build cluster

package cluster

import (
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	load "github.com/svcproxy/svcproxy/internal/scenario/flow"
)

// migration is one way from a kube-proxy to svcproxy.
type migration struct {
	from, to string // modes
	running  bool   // kube-proxy still runs when svcproxy starts
}

// migrations cover each pair of modes, with kube-proxy running and stopped; -short takes
// the first four.
var migrations = []migration{
	{"iptables", "nftables", true},
	{"nftables", "iptables", false},
	{"iptables", "iptables", false},
	{"nftables", "nftables", true},
	{"nftables", "iptables", true},
	{"iptables", "iptables", true},
	{"iptables", "nftables", false},
	{"nftables", "nftables", false},
	{"iptables", "userspace", true},
	{"nftables", "userspace", false},
}

// leftovers are chains of kube-proxy's early years, as they lie on nodes that were
// upgraded again and again.
const leftovers = `*nat
:KUBE-PORTALS-CONTAINER - [0:0]
:KUBE-PORTALS-HOST - [0:0]
:KUBE-NODEPORT-CONTAINER - [0:0]
:KUBE-NODEPORT-HOST - [0:0]
-A PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-CONTAINER
-A PREROUTING -m addrtype --dst-type LOCAL -j KUBE-NODEPORT-CONTAINER
-A OUTPUT -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-HOST
-A OUTPUT -m addrtype --dst-type LOCAL -j KUBE-NODEPORT-HOST
-A KUBE-PORTALS-CONTAINER -d 10.96.77.77/32 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 41000
COMMIT
`

// TestMigration takes Services over from real kube-proxies, while requests go on: none
// fails, and nothing of kube-proxy is left. SVCPROXY_KUBE_PROXIES names the kube-proxies
// as VERSION=PATH, with a space between two.
func TestMigration(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	binary := mustBuild(t)
	w := mustPlane(t)
	for _, entry := range strings.Fields(mustGetenv(t, "SVCPROXY_KUBE_PROXIES")) {
		version, path, ok := strings.Cut(entry, "=")
		if !ok {
			t.Fatalf("SVCPROXY_KUBE_PROXIES: %q is not VERSION=PATH", entry)
		}
		ways := migrations
		if testing.Short() {
			ways = ways[:4]
		}
		for _, m := range ways {
			name := fmt.Sprintf("%s/%s to %s/stopped before", version, m.from, m.to)
			if m.running {
				name = fmt.Sprintf("%s/%s to %s/still running", version, m.from, m.to)
			}
			t.Run(name, func(t *testing.T) { w.migrates(t, binary, kubeProxy{path, version}, m) })
		}
	}
}

// migrates goes the whole way once and leaves the node as it was.
func (w *world) migrates(t *testing.T, binary string, k kubeProxy, m migration) {
	w.mustRun(t, "node1", leftovers, "iptables-restore", "--noflush")
	old := w.startKubeProxy(t, k, m.from)
	w.proxy = old
	want := []string{"httpd-1", "httpd-2", "httpd-3"}
	w.mustFlow(t, reference(want...)...)

	loads := w.startLoads(t)
	if !m.running {
		end(t, old)
	}
	w.startProxy(t, binary, m.to)
	w.mustSay(t, "first sync done")
	if m.running {
		w.mustSay(t, "reason=KubeProxyRunning")
		w.mustFlow(t, reference(want...)...)
		end(t, old)
		w.mustSay(t, "reason=KubeProxyEnded")
	}
	w.mustBeReady(t)
	w.mustHaveNothingOf(t, m)
	const repaired = "was changed by somebody else"
	before := strings.Count(w.proxy.said(), repaired)
	w.mustRun(t, "node1", "", binary, "cleanup", "--kube-proxy")
	w.mustFlow(t, reference(want...)...)
	if n := strings.Count(w.proxy.said(), repaired); n != before {
		t.Errorf("cleaning up after kube-proxy alone took something of svcproxy's")
	}

	// It is svcproxy that carries the changes out.
	w.admin.mustApply(t, httpdSlice("10.244.0.4", "10.244.2.9"))
	w.mustFlow(t, reference("httpd-1", "httpd-4")...)
	w.admin.mustApply(t, httpdSlice("10.244.0.4", "10.244.1.2", "10.244.2.2"))
	w.mustFlow(t, reference(want...)...)
	expectNoErrors(t, "to svcproxy", loads)
	w.goesBack(t, binary, k, m)
	w.mustRun(t, "node1", "", binary, "cleanup")
	if left := w.rules(t); strings.Contains(left, "KUBE-") || strings.Contains(left, "svcproxy") {
		t.Errorf("after the clean-up there is\n%s", left)
	}
}

func expectNoErrors(t *testing.T, way string, loads []*load.Load) {
	t.Helper()
	for _, l := range loads {
		if err := l.Expect(0); err != nil {
			t.Errorf("%s: %v", way, err)
		}
	}
}

// goesBack puts kube-proxy in svcproxy's place again, as docs/operations.md says: one in
// nftables mode begins by removing what it knows of iptables rules, before it has any of
// its own, so svcproxy goes into that mode first. In userspace mode svcproxy's process is
// what serves: it ends last.
func (w *world) goesBack(t *testing.T, binary string, k kubeProxy, m migration) {
	t.Helper()
	mode := m.from
	loads := w.startLoads(t)
	if m.to == "userspace" || mode == "nftables" && m.to != "nftables" {
		end(t, w.proxy)
		if m.to == "userspace" { // connections end with the process: between two there is nobody
			for _, l := range loads {
				l.Close()
			}
			loads = nil
		}
		w.startProxy(t, binary, mode)
		w.mustSay(t, "reason=ModeVerified")
		if loads == nil {
			loads = w.startLoads(t)
		}
	}
	end(t, w.proxy)
	w.proxy = w.startKubeProxy(t, k, mode)
	w.mustRun(t, "node1", "", binary, "cleanup", "--keep-kube-proxy="+mode)
	if left := w.rules(t); strings.Contains(left, "table ip svcproxy") || mode != "iptables" && strings.Contains(left, "KUBE-SVC") {
		t.Errorf("with kube-proxy back in mode %s there is\n%s", mode, left)
	}
	w.mustFlow(t, reference("httpd-1", "httpd-2", "httpd-3")...)
	expectNoErrors(t, "back to kube-proxy", loads)
	w.admin.mustApply(t, httpdSlice("10.244.0.4", "10.244.2.9"))
	w.mustFlow(t, reference("httpd-1", "httpd-4")...)
	w.admin.mustApply(t, httpdSlice("10.244.0.4", "10.244.1.2", "10.244.2.2"))
	w.mustFlow(t, reference("httpd-1", "httpd-2", "httpd-3")...)
	end(t, w.proxy)
}

func httpdSlice(addrs ...string) string {
	text := `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: httpd-svc-1
  labels: {kubernetes.io/service-name: httpd-svc}
addressType: IPv4
ports: [{port: 80}]
endpoints:
`
	for _, a := range addrs {
		node := "node2"
		if strings.HasPrefix(a, "10.244.0.") {
			node = "node1"
		}
		text += fmt.Sprintf("- {addresses: [%s], nodeName: %s}\n", a, node)
	}
	return text
}

// kubeProxy is a real one.
type kubeProxy struct{ path, version string }

// startKubeProxy starts it on the node.
func (w *world) startKubeProxy(t *testing.T, k kubeProxy, mode string) *program {
	t.Helper()
	gates := "{}"
	if mode == "nftables" && (k.version == "1.29" || k.version == "1.30") {
		gates = "{NFTablesProxyMode: true}" // alpha there
	}
	config := w.plane.path("kube-proxy.yaml")
	mustWrite(t, config, fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
featureGates: %s
hostnameOverride: node1
clusterCIDR: 10.244.0.0/16
clientConnection: {kubeconfig: %q}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, mode, gates, w.plane.kubeconfig(t)))
	return mustStart(t, w.lab.Host("node1"), w.plane.path("kube-proxy.log"), k.path, "--config="+config)
}

// startLoads sends requests from a pod, the node and outside until they are ended.
func (w *world) startLoads(t *testing.T) []*load.Load {
	t.Helper()
	// What asked before anybody served has left entries that say so, for two minutes; ports
	// of clients are used again within one.
	w.mustRun(t, "node1", "", "conntrack", "-F")
	var out []*load.Load
	for _, f := range []target{
		{"probe", lab.TCP, "10.99.129.90:8080"},
		{"probe", lab.UDP, "10.96.0.10:53"},
		{"node1", lab.TCP, "10.99.129.90:8080"},
		{"client", lab.TCP, nodeIP + ":30001"},
	} {
		l, err := load.StartLoad(f.from+" to "+f.to, w.lab.Host(f.from), lab.Dialing{Proto: f.proto, To: netip.MustParseAddrPort(f.to)}, 50)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		out = append(out, l)
	}
	return out
}

// target is where a load goes.
type target struct {
	from  string
	proto lab.Proto
	to    string
}

// end tells a program to end and waits.
func end(t *testing.T, p *program) {
	t.Helper()
	_ = p.mustEnd(t, syscall.SIGTERM) // kube-proxy dies of it
}

// mustSay waits for a line of the running proxy's log.
func (w *world) mustSay(t *testing.T, text string) {
	t.Helper()
	eventually(t, time.Minute, func() error {
		if err := w.proxy.running(); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(w.proxy.said(), text) {
			return fmt.Errorf("svcproxy does not say %q", text)
		}
		return nil
	})
}

// mustBeReady waits until svcproxy itself answers that it is ready.
func (w *world) mustBeReady(t *testing.T) {
	t.Helper()
	eventually(t, time.Minute, func() error { return w.asksHealth("/readyz") })
}

// asksHealth asks the node's health server.
func (w *world) asksHealth(path string) error {
	res, err := w.lab.Host("node1").HTTPClient(time.Second).Get("http://" + nodeIP + ":10256" + path)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, res.Status)
	}
	return nil
}

// mustHaveNothingOf waits until nothing of kube-proxy is left but what svcproxy has
// taken over.
func (w *world) mustHaveNothingOf(t *testing.T, m migration) {
	t.Helper()
	gone := []string{"KUBE-PORTALS", "KUBE-NODEPORT-", "table ip kube-proxy", "table ip6 kube-proxy"}
	if m.to != "iptables" {
		gone = append(gone, "KUBE-SVC", "KUBE-SERVICES", "KUBE-POSTROUTING")
	}
	eventually(t, time.Minute, func() error {
		have := w.rules(t)
		for _, text := range gone {
			if strings.Contains(have, text) {
				return fmt.Errorf("there still is %s", text)
			}
		}
		return nil
	})
}

// rules is everything that filters and translates on the node.
func (w *world) rules(t *testing.T) string {
	t.Helper()
	return w.mustRun(t, "node1", "", "sh", "-c",
		"iptables-nft-save; ip6tables-nft-save; iptables-legacy-save; ip6tables-legacy-save; nft list tables")
}

// mustRun runs a program on a host.
func (w *world) mustRun(t *testing.T, host, stdin string, command ...string) string {
	t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := w.lab.Host(host).Run(cmd)
	if err != nil {
		t.Fatalf("%v: %v\n%s", command, err, out)
	}
	return out
}
