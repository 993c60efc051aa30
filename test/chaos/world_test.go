//go:build chaos

package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
	load "github.com/svcproxy/svcproxy/internal/scenario/flow"
)

const (
	nodeIP  = "192.0.2.11"
	apiAddr = "127.0.0.1:6443"
	steady  = "10.62.0.10:80" // the Service that nothing concerns
	pods    = 8               // on the node, and as many elsewhere
)

// world is a node with its proxy, an API server, and pods.
type world struct {
	t      *testing.T
	mode   string
	binary string
	dir    string
	random *rand.Rand
	lab    *lab.Lab
	api    *apiserver.Server
	proxy  *process

	load    *load.Load
	lost    time.Time     // since when rules may be missing; zero: they are in place
	missing []load.Span   // when they were, since the load began
	counted int           // requests of all loads while they were in place
	gone    time.Duration // for how long they were not, in all

	addrs map[string]bool // further addresses that the node has now
	alive map[int]bool    // Services that exist
}

func podIP(i int) string {
	if i < pods {
		return fmt.Sprintf("10.61.1.%d", i+1)
	}
	return fmt.Sprintf("10.61.2.%d", i-pods+1)
}

func podName(i int) string { return fmt.Sprintf("pod-%d", i) }

func topology() lab.Topology {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	t := lab.Topology{
		Hosts: []lab.HostSpec{{Name: "node", Forwards: true, OwnRun: true}, {Name: "other", Forwards: true}},
		Links: []lab.LinkSpec{{
			A: lab.EndSpec{Host: "node", Interface: "eth0", Addrs: []netip.Prefix{prefix(nodeIP + "/24")}},
			B: lab.EndSpec{Host: "other", Interface: "eth0", Addrs: []netip.Prefix{prefix("192.0.2.12/24")}},
		}},
		Routes: []lab.RouteSpec{
			{Host: "node", To: prefix("0.0.0.0/0"), Dev: "eth0", Via: addr("192.0.2.12")},
			{Host: "other", To: prefix("10.61.1.0/24"), Dev: "eth0", Via: addr(nodeIP)},
		},
	}
	leaf := func(name, behind, ip, from string) {
		t.Leaves = append(t.Leaves, lab.LeafSpec{Name: name, Behind: behind, Interface: "veth-" + name, Addrs: []netip.Addr{addr(ip)}, From: []netip.Addr{addr(from)}})
	}
	leaf("probe", "node", "10.61.1.250", nodeIP)
	for i := range 2 * pods {
		if i < pods {
			leaf(podName(i), "node", podIP(i), nodeIP)
		} else {
			leaf(podName(i), "other", podIP(i), "192.0.2.12")
		}
	}
	return t
}

// mustBuild builds a program whose kernel calls can be made to fail.
func mustBuild(t *testing.T) string {
	t.Helper()
	if *program != "" {
		return *program
	}
	binary := filepath.Join(t.TempDir(), "svcproxy")
	build := exec.Command("go", "build", "-tags", "faults", "-o", binary, "github.com/svcproxy/svcproxy/cmd/svcproxy")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	return binary
}

// mustWorld makes a world in which the proxy runs.
func mustWorld(t *testing.T, binary, mode string, random *rand.Rand) *world {
	t.Helper()
	w := mustNode(t, binary, mode, random)
	w.start()
	return w
}

// mustNode makes one in which it does not run yet.
func mustNode(t *testing.T, binary, mode string, random *rand.Rand) *world {
	t.Helper()
	w := &world{t: t, mode: mode, binary: binary, dir: t.TempDir(), random: random, addrs: map[string]bool{}, alive: map[int]bool{}}
	var err error
	if w.lab, err = lab.Build(topology()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.lab.Close() })
	for i := range 2 * pods {
		if _, err := w.lab.Host(podName(i)).Serve(podName(i), lab.TCP, 8080); err != nil {
			t.Fatal(err)
		}
	}
	w.api = apiserver.New(apiserver.Options{BookmarkEvery: time.Second})
	w.listen()
	t.Cleanup(func() { _ = w.api.Stop() })
	w.put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "alder"}, Spec: corev1.NodeSpec{PodCIDR: "10.61.1.0/24", PodCIDRs: []string{"10.61.1.0/24"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeIP}}}})
	w.service(0, 10, 0, pods)
	for i := 1; i < 20; i++ {
		w.churnOne(i)
	}
	if err := apiserver.WriteKubeconfig(w.path("kubeconfig"), apiAddr); err != nil {
		t.Fatal(err)
	}
	w.write("config.yaml", fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: alder
enableProfiling: true
clusterCIDR: 10.61.0.0/16
clientConnection: {kubeconfig: %q}
iptables: {minSyncPeriod: 100ms, syncPeriod: 2s}
ipvs: {minSyncPeriod: 100ms, syncPeriod: 2s}
nftables: {minSyncPeriod: 100ms, syncPeriod: 2s}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
---
apiVersion: svcproxy.io/v1alpha1
kind: SvcproxyConfiguration
stalenessLimit: 3s
`, mode, w.path("kubeconfig")))
	w.replacePrograms()
	if *legacy {
		const hint = "-t mangle -N KUBE-IPTABLES-HINT" // kubelet's word on where rules go
		w.run("iptables-legacy " + hint + " && ip6tables-legacy " + hint)
	}
	t.Cleanup(func() {
		if w.proxy != nil {
			w.end(w.proxy, syscall.SIGKILL)
		}
		if t.Failed() {
			t.Logf("the proxy said last:\n%s", w.tail())
		}
	})
	return w
}

func (w *world) path(name string) string { return filepath.Join(w.dir, name) }

func (w *world) write(name, content string) {
	if err := os.WriteFile(w.path(name), []byte(content), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) tail() string {
	b, _ := os.ReadFile(w.path("log"))
	return string(b[max(0, len(b)-6000):])
}

func (w *world) listen() {
	l, err := w.lab.Host("node").Listen(apiAddr)
	if err != nil {
		w.t.Fatal(err)
	}
	w.api.Start(l)
}

func (w *world) put(o apiserver.Object) {
	if err := w.api.Put(o); err != nil {
		w.t.Fatal(err)
	}
}

// replacePrograms puts programs in front of the iptables ones that fail as often as the
// file of faults says, and else do the same.
func (w *world) replacePrograms() {
	if err := os.Mkdir(w.path("bin"), 0o755); err != nil {
		w.t.Fatal(err)
	}
	for _, name := range []string{"iptables-restore", "iptables-nft-restore", "iptables-legacy-restore",
		"ip6tables-restore", "ip6tables-nft-restore", "ip6tables-legacy-restore"} {
		script := fmt.Sprintf(`#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin
if share=$(cat %q 2>/dev/null) && awk -v share="$share" -v seed="$(od -An -N3 -tu4 /dev/urandom)" 'BEGIN { srand(seed); exit rand() >= share }'; then
	echo "injected fault" >&2
	exit 4
fi
exec %s "$@"
`, w.path("faults"), name)
		if err := os.WriteFile(filepath.Join(w.path("bin"), name), []byte(script), 0o755); err != nil {
			w.t.Fatal(err)
		}
	}
}

// service writes Service number n with its slice; endpoints are pods.
func (w *world) service(n, address int, endpoints ...int) {
	name := fmt.Sprintf("svc-%d", n)
	w.put(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: fmt.Sprintf("10.62.0.%d", address), ClusterIPs: []string{fmt.Sprintf("10.62.0.%d", address)},
			Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080), NodePort: int32(30000 + n), Protocol: corev1.ProtocolTCP}},
		},
	})
	port, tcp := int32(8080), corev1.ProtocolTCP
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &tcp}},
	}
	for _, e := range endpoints {
		node := "alder"
		if e >= pods {
			node = "birch"
		}
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{podIP(e)}, NodeName: &node})
	}
	w.put(slice)
	w.alive[n] = true
}

// process is one run of the proxy.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed at its end
}

func (p *process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// start starts a proxy, which from now on is the one.
func (w *world) start() { w.proxy = w.launch("log", w.binary, "--config="+w.path("config.yaml")) }

// launch starts a program on the node; what it prints goes to a file of that name.
func (w *world) launch(log, program string, args ...string) *process {
	out, err := os.OpenFile(w.path(log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		w.t.Fatal(err)
	}
	defer out.Close()
	p := &process{cmd: exec.Command(program, args...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Env = append(os.Environ(), "SVCPROXY_FAULTS="+w.path("faults"), "PATH="+w.path("bin")+":"+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if err := w.lab.Host("node").Start(p.cmd); err != nil {
		w.t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.ended) }()
	return p
}

// end ends a proxy by a signal and waits.
func (w *world) end(p *process, signal syscall.Signal) {
	const limit = 30 * time.Second
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	_ = p.cmd.Process.Signal(signal)
	select {
	case <-p.ended:
	case <-time.After(load.Patient(limit)):
		p.cmd.Process.Kill()
		<-p.ended
		w.t.Errorf("the proxy did not end within %v of %v", load.Patient(limit), signal)
	}
}

// startLoad sends requests to the steady Service; endLoad wants none to have failed
// while rules were in place.
func (w *world) startLoad() {
	w.missing = nil
	var err error
	w.load, err = load.StartLoad("steady", w.lab.Host("probe"), lab.Dialing{Proto: lab.TCP, To: netip.MustParseAddrPort(steady)}, 50)
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) endLoad(what string) {
	counted, failed := w.load.Count(w.missing...)
	w.counted += counted
	for _, m := range w.missing {
		w.gone += m.To.Sub(m.From)
	}
	if len(failed) > 0 {
		w.t.Errorf("until %s: %d of %d requests failed while rules were in place, the first %s", what, len(failed), counted, failed[0])
		w.run("date +%T.%N; conntrack -L -p tcp -d " + strings.Split(steady, ":")[0] + " | grep -v ESTABLISHED; nft list ruleset | grep -c .; ip route; false")
	}
}

// mustBeRight waits until the kernel equals the plan.
func (w *world) mustBeRight(what string) {
	w.t.Helper()
	var last string
	for deadline := time.Now().Add(load.Patient(*patience)); ; {
		if w.proxy.hasEnded() {
			w.t.Fatalf("after %s: the proxy has ended\n%s", what, w.tail())
		}
		var err error
		if last, err = w.diff(); err == nil && w.current() == nil {
			if !w.lost.IsZero() {
				w.missing = append(w.missing, load.Span{From: w.lost, To: time.Now()})
				w.lost = time.Time{}
			}
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("after %s: the kernel differs from the plan still (%v, %v):\n%s", what, err, w.current(), last)
		}
	}
}

// diff runs "svcproxy diff".
func (w *world) diff() (string, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), load.Patient(20*time.Second))
	defer cancel()
	return w.lab.Host("node").Run(exec.CommandContext(ctx, w.binary, "diff", "--config="+w.path("config.yaml")))
}

// current returns an error while the proxy has something to write, or is not there.
func (w *world) current() error {
	out, err := w.lab.Host("node").Run(exec.Command(w.binary, "status", "-o", "json"))
	if err != nil {
		return fmt.Errorf("svcproxy status: %w: %s", err, out)
	}
	var s struct {
		Loop struct {
			Synced       bool
			LastError    string
			PendingSince time.Time
			Quarantined  []any
		}
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		return err
	}
	if !s.Loop.Synced || s.Loop.LastError != "" || !s.Loop.PendingSince.IsZero() || len(s.Loop.Quarantined) > 0 {
		return errors.New(strings.TrimSpace(out))
	}
	return nil
}
