package app

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// node is a small network with a node on which the program runs for real.
type node struct {
	t    *testing.T
	lab  *lab.Lab
	host *lab.Host
	dir  string
}

func newNode(t *testing.T) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	addr := netip.MustParseAddr
	l, err := lab.Build(lab.Topology{
		Hosts: []lab.HostSpec{{Name: "router", Addrs: []netip.Addr{addr("192.0.2.1")}}, {Name: "alder", Forwards: true, OwnRun: true}},
		Links: []lab.LinkSpec{{
			A: lab.EndSpec{Host: "alder", Interface: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("192.0.2.11/32")}},
			B: lab.EndSpec{Host: "router", Interface: "to-alder"},
		}},
		Routes: []lab.RouteSpec{{Host: "alder", To: netip.MustParsePrefix("0.0.0.0/0"), Dev: "eth0", Via: addr("192.0.2.1"), Src: addr("192.0.2.11")}},
		Leaves: []lab.LeafSpec{
			{Name: "web", Behind: "alder", Addrs: []netip.Addr{addr("10.61.1.5")}, From: []netip.Addr{addr("192.0.2.11")}},
			{Name: "probe", Behind: "alder", Addrs: []netip.Addr{addr("10.61.1.250")}, From: []netip.Addr{addr("192.0.2.11")}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if _, err := l.Host("web").Serve("web", lab.TCP, 8080); err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, lab: l, host: l.Host("alder"), dir: t.TempDir()}
	n.write("services/node.yaml", nodeManifest)
	n.write("services/web.yaml", webManifest)
	return n
}

func (n *node) write(name, content string) {
	n.t.Helper()
	path := filepath.Join(n.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

// start starts the program on the node.
func (n *node) start(out io.Writer, args ...string) *exec.Cmd {
	n.t.Helper()
	path, err := exec.LookPath("svcproxy")
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := n.host.Start(cmd); err != nil {
		n.t.Fatal(err)
	}
	return cmd
}

// do runs the program on the node and returns its exit status and output.
func (n *node) do(args ...string) (int, string) {
	n.t.Helper()
	var out bytes.Buffer
	err := n.start(&out, args...).Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		n.t.Fatal(err)
	}
	if exit != nil {
		return exit.ExitCode(), out.String()
	}
	return 0, out.String()
}

// flags are those of the proxy on the node.
func (n *node) flags() []string {
	return []string{"--manifests=" + n.dir + "/services", "--hostname-override=alder", "--cluster-cidr=10.61.0.0/16",
		"--iptables-min-sync-period=0", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0",
		"--conntrack-tcp-timeout-close-wait=0", "--oom-score-adj=0"}
}

// ask sends a request from a host to the Service's ClusterIP.
func (n *node) ask(from string) (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Second)
	defer cancel()
	flow, err := n.lab.Host(from).Dial(ctx, lab.Dialing{Proto: lab.TCP, To: netip.MustParseAddrPort("10.62.0.20:80")})
	if err != nil {
		return lab.Answer{}, err
	}
	defer flow.Close()
	return flow.Ask(time.Second)
}

// awaitReady waits until the proxy on the node has programmed everything.
func (n *node) awaitReady(said *safeBuffer) {
	n.t.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: n.host.DialContext, DisableKeepAlives: true}}
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		if r, err := client.Get("http://127.0.0.1:10256/readyz"); err == nil {
			r.Body.Close()
			if r.StatusCode == http.StatusOK {
				return
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	n.t.Fatalf("the proxy did not get ready:\n%s", said.String())
}

// rules are the kernel's rules in both stores.
func (n *node) rules() string {
	n.t.Helper()
	var out bytes.Buffer
	for _, program := range []string{"iptables-nft-save", "iptables-legacy-save", "ip6tables-nft-save", "ip6tables-legacy-save"} {
		cmd := exec.Command(program)
		cmd.Stdout = &out
		if err := n.host.Start(cmd); err != nil {
			n.t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			n.t.Fatalf("%s: %v", program, err)
		}
	}
	return out.String()
}

// The program as a process: it serves, reports, compares, leaves its rules in
// place when it ends, and removes them when asked, twice.
func TestProcess(t *testing.T) {
	n := newNode(t)
	var out safeBuffer
	cmd := n.start(&out, n.flags()...)
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	n.awaitReady(&out)

	for _, from := range []string{"alder", "probe"} {
		if a, err := n.ask(from); err != nil || a.Server != "web" {
			t.Errorf("from %s: answer %v, error %v", from, a, err)
		}
	}
	if code, said := n.do("status"); code != 0 || !strings.Contains(said, "up to date since") || !strings.Contains(said, "alder") {
		t.Errorf("status: %d\n%s", code, said)
	}
	if code, said := n.do("status", "-o", "json"); code != 0 || !strings.Contains(said, `"synced": true`) {
		t.Errorf("status -o json: %d\n%s", code, said)
	}
	if code, said := n.do(append([]string{"diff"}, n.flags()...)...); code != 0 || said != "" {
		t.Errorf("diff beside the running proxy: %d\n%s", code, said)
	}

	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("after SIGTERM: %v\n%s", err, out.String())
	}
	if a, err := n.ask("probe"); err != nil || a.Server != "web" {
		t.Errorf("after the proxy's end: answer %v, error %v", a, err)
	}
	n.write("services/web.yaml", strings.ReplaceAll(webManifest, "10.61.1.5", "10.61.1.6"))
	if code, said := n.do(append([]string{"diff"}, n.flags()...)...); code != exitDifferent || !strings.Contains(said, "10.61.1.6") || !strings.Contains(said, "10.61.1.5") {
		t.Errorf("diff after a change: %d\n%s", code, said)
	}

	for _, again := range []string{"first", "second"} {
		if code, said := n.do("cleanup"); code != 0 {
			t.Errorf("%s cleanup: %d\n%s", again, code, said)
		}
		if rules := n.rules(); strings.Contains(rules, "KUBE-") {
			t.Errorf("%s cleanup left\n%s", again, rules)
		}
	}
	if code, said := n.do("--cleanup"); code != 0 {
		t.Errorf("--cleanup: %d\n%s", code, said)
	}
	if a, err := n.ask("probe"); err == nil {
		t.Errorf("after the clean-up %v still answers", a)
	}
}

// --init-only makes kernel settings, asks nobody and programs nothing.
func TestInitOnly(t *testing.T) {
	n := newNode(t)
	if code, said := n.do("--init-only", "--conntrack-max-per-core=0", "--conntrack-udp-timeout=77s", "--oom-score-adj=0"); code != 0 {
		t.Fatalf("%d\n%s", code, said)
	}
	var have []byte
	err := n.host.Do(func() (err error) {
		have, err = os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_udp_timeout")
		return err
	})
	if err != nil || strings.TrimSpace(string(have)) != "77" {
		t.Errorf("udp timeout %q, error %v", have, err)
	}
	if rules := n.rules(); strings.Contains(rules, "KUBE-") {
		t.Errorf("rules:\n%s", rules)
	}
}
