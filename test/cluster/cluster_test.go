//go:build cluster

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
)

const (
	planeIP = "172.16.65.180"
	nodeIP  = "172.16.65.181"
)

// topology is the reference example: the node under test, a host that is the
// control plane and the way to all others, pods here and elsewhere, and a client
// outside.
func topology() lab.Topology {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	leaf := func(behind, name, ip string, from string) lab.LeafSpec {
		return lab.LeafSpec{Name: name, Behind: behind, Addrs: []netip.Addr{addr(ip)}, From: []netip.Addr{addr(from)}}
	}
	return lab.Topology{
		Hosts: []lab.HostSpec{
			{Name: "node1", Forwards: true, OwnRun: true},
			{Name: "plane", Forwards: true},
		},
		Links: []lab.LinkSpec{{
			A: lab.EndSpec{Host: "node1", Interface: "eth0", Addrs: []netip.Prefix{prefix(nodeIP + "/24")}},
			B: lab.EndSpec{Host: "plane", Interface: "eth0", Addrs: []netip.Prefix{prefix(planeIP + "/24")}},
		}},
		Routes: []lab.RouteSpec{
			{Host: "node1", To: prefix("0.0.0.0/0"), Dev: "eth0", Via: addr(planeIP)},
			{Host: "plane", To: prefix("10.244.0.0/24"), Dev: "eth0", Via: addr(nodeIP)},
			{Host: "plane", To: prefix("203.0.113.0/24"), Dev: "eth0", Via: addr(nodeIP)},
		},
		Leaves: []lab.LeafSpec{
			leaf("node1", "probe", "10.244.0.250", nodeIP),
			leaf("node1", "dns-1", "10.244.0.2", nodeIP),
			leaf("node1", "dns-2", "10.244.0.3", nodeIP),
			leaf("node1", "httpd-1", "10.244.0.4", nodeIP),
			leaf("plane", "httpd-2", "10.244.1.2", planeIP),
			leaf("plane", "httpd-3", "10.244.2.2", planeIP),
			leaf("plane", "httpd-4", "10.244.2.9", planeIP),
			leaf("plane", "client", "198.51.100.7", planeIP),
		},
	}
}

// servers are the ports that the pods listen on.
var servers = []struct {
	host  string
	proto lab.Proto
	port  uint16
}{
	{"dns-1", lab.UDP, 53}, {"dns-1", lab.TCP, 53}, {"dns-2", lab.UDP, 53}, {"dns-2", lab.TCP, 53},
	{"httpd-1", lab.TCP, 80}, {"httpd-2", lab.TCP, 80}, {"httpd-3", lab.TCP, 80}, {"httpd-4", lab.TCP, 80},
}

// world is everything that a step of the test may need.
type world struct {
	lab   *lab.Lab
	plane *plane
	admin *admin
	proxy *program
}

func TestReferenceExampleBehindRealAPIServer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	binary := mustBuild(t)
	for _, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) { mustServe(t, mustWorld(t, binary, mode)) })
	}
}

// mustServe takes the steps; each goes on where the one before has ended.
func mustServe(t *testing.T, w *world) {
	t.Helper()
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"the reference example is served", w.servesReference},
		{"the API server is reached through its own Service", w.servesAPI},
		{"defaults and allocations of the API server count", w.takesDefaults},
		{"a conflict between two Services becomes an event", w.tellsConflict},
		{"the proxy only does what its role allows, by watch-list", w.keepsToItsRole},
		{"packets flow while the API server is away", w.survivesAPIServer},
		{"the proxy ends in order and leaves its rules", w.endsInOrder},
	} {
		if !t.Run(step.name, step.run) {
			return
		}
	}
}

// mustWorld builds the lab and starts the control plane and the proxy.
func mustWorld(t *testing.T, binary, mode string) *world {
	t.Helper()
	w := mustPlane(t)
	w.startProxy(t, binary, mode)
	return w
}

// mustPlane builds the lab and starts the control plane with the reference example.
func mustPlane(t *testing.T) *world {
	t.Helper()
	l, err := lab.Build(topology())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	for _, s := range servers {
		if _, err := l.Host(s.host).Serve(s.host, s.proto, s.port); err != nil {
			t.Fatal(err)
		}
	}
	w := &world{lab: l, plane: mustStartPlane(t, l.Host("plane"), planeIP)}
	w.admin = mustAdmin(t, w.plane)
	manifest, err := os.ReadFile("testdata/reference.yaml")
	if err != nil {
		t.Fatal(err)
	}
	w.admin.mustApply(t, string(manifest))
	return w
}

func mustBuild(t *testing.T) (binary string) {
	t.Helper()
	binary = filepath.Join(t.TempDir(), "svcproxy")
	build := exec.Command("go", "build", "-o", binary, "github.com/svcproxy/svcproxy/cmd/svcproxy")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	return binary
}

// startProxy starts the proxy with a configuration that accepts nothing but
// protobuf from the API server.
func (w *world) startProxy(t *testing.T, binary, mode string) {
	t.Helper()
	config := w.plane.path("config.yaml")
	mustWrite(t, config, fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: node1
clusterCIDR: 10.244.0.0/16
clientConnection:
  kubeconfig: %q
  contentType: application/vnd.kubernetes.protobuf
  acceptContentTypes: application/vnd.kubernetes.protobuf
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, mode, w.plane.kubeconfig(t)))
	w.proxy = mustStart(t, w.lab.Host("node1"), w.plane.path("svcproxy.log"), binary, "--config="+config)
}

// flow is a way to a Service and who must answer on it.
type flow struct {
	from  string
	proto lab.Proto
	to    string
	want  []string
}

func reference(httpd ...string) []flow {
	return []flow{
		{"probe", lab.UDP, "10.96.0.10:53", []string{"dns-1", "dns-2"}},
		{"probe", lab.TCP, "10.96.0.10:53", []string{"dns-1", "dns-2"}},
		{"probe", lab.TCP, "10.99.129.90:8080", httpd},
		{"node1", lab.TCP, "10.99.129.90:8080", httpd},
		{"client", lab.TCP, nodeIP + ":30001", httpd},
	}
}

// mustFlow waits until exactly the wanted servers answer on each flow.
func (w *world) mustFlow(t *testing.T, flows ...flow) {
	t.Helper()
	for _, f := range flows {
		eventually(t, 20*time.Second, func() error {
			if err := w.proxy.running(); err != nil {
				t.Fatal(err)
			}
			return w.check(f)
		})
	}
}

// check asks often enough that a wanted server is missed with a probability
// under one in a million.
func (w *world) check(f flow) error {
	seen := map[string]int{}
	for range 16 * len(f.want) {
		server, err := w.ask(f)
		if err != nil {
			return fmt.Errorf("%s to %s %s: %w", f.from, f.proto, f.to, err)
		}
		seen[server]++
	}
	if have := slices.Sorted(maps.Keys(seen)); !slices.Equal(have, f.want) {
		return fmt.Errorf("%s to %s %s: want answers of %v, have %v", f.from, f.proto, f.to, f.want, seen)
	}
	return nil
}

func (w *world) ask(f flow) (server string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := w.lab.Host(f.from).Dial(ctx, lab.Dialing{Proto: f.proto, To: netip.MustParseAddrPort(f.to)})
	if err != nil {
		return "", err
	}
	defer c.Close()
	a, err := c.Ask(time.Second)
	return a.Server, err
}

func (w *world) mustRefuse(t *testing.T, f flow) {
	t.Helper()
	eventually(t, 20*time.Second, func() error {
		server, err := w.ask(f)
		if lab.OutcomeOf(err) != lab.Refused {
			return fmt.Errorf("%s to %s %s: want it refused, have %v by %q (%w)", f.from, f.proto, f.to, lab.OutcomeOf(err), server, err)
		}
		return nil
	})
}

func (w *world) servesReference(t *testing.T) {
	w.mustFlow(t, reference("httpd-1", "httpd-2", "httpd-3")...)
	w.mustRefuse(t, flow{"probe", lab.TCP, "10.99.129.90:8081", nil})
}

// servesAPI asks the API server for its version from a pod, by the ClusterIP of
// default/kubernetes, which the API server made itself.
func (w *world) servesAPI(t *testing.T) {
	client, err := w.plane.client(w.lab.Host("probe"))
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	res, err := client.Get("https://10.96.0.1/version")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	// Without a token it is refused or answered, as the API server likes; either
	// way it was the API server that spoke.
	if !strings.Contains(string(body), `"major"`) && !strings.Contains(string(body), `"kind"`) {
		t.Errorf("GET https://10.96.0.1/version: %s: %s", res.Status, body)
	}
}

// takesDefaults creates a Service that names a port and nothing else, and gives
// it a load balancer's address in its status.
func (w *world) takesDefaults(t *testing.T) {
	var made struct {
		Spec struct {
			ClusterIP string
			Ports     []struct{ NodePort int }
		}
	}
	w.admin.mustDo(t, http.MethodPost, "/api/v1/namespaces/default/services", "application/json",
		[]byte(`{"metadata":{"name":"plain"},"spec":{"type":"LoadBalancer","ports":[{"port":7000}]}}`), &made)
	w.admin.mustApply(t, `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: plain-1
  labels: {kubernetes.io/service-name: plain}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [10.244.0.4]}, {addresses: [10.244.2.9]}]`)
	w.admin.mustDo(t, http.MethodPatch, "/api/v1/namespaces/default/services/plain/status", "application/merge-patch+json",
		[]byte(`{"status":{"loadBalancer":{"ingress":[{"ip":"203.0.113.9"}]}}}`), nil)
	if len(made.Spec.Ports) != 1 {
		t.Fatalf("the API server made %+v of a Service with one port", made)
	}
	want := []string{"httpd-1", "httpd-4"}
	w.mustFlow(t,
		flow{"probe", lab.TCP, made.Spec.ClusterIP + ":7000", want},
		flow{"client", lab.TCP, fmt.Sprintf("%s:%d", nodeIP, made.Spec.Ports[0].NodePort), want},
		flow{"client", lab.TCP, "203.0.113.9:7000", want},
	)
}

// tellsConflict gives a second Service the external address and port of the
// first: the older one keeps it, and the younger one gets an event.
func (w *world) tellsConflict(t *testing.T) {
	claim := func(name, endpoint string) string {
		return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec: {externalIPs: [203.0.113.20], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-1, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [%[2]s]}]`, name, endpoint)
	}
	first := flow{"client", lab.TCP, "203.0.113.20:80", []string{"httpd-1"}}
	w.admin.mustApply(t, claim("first", "10.244.0.4"))
	w.mustFlow(t, first)
	w.admin.mustApply(t, claim("second", "10.244.2.9"))
	eventually(t, 20*time.Second, func() error { return w.hasEvent(t, "Service", "second", "AddressConflict") })
	w.mustFlow(t, first)
	w.admin.mustDo(t, http.MethodDelete, "/api/v1/namespaces/default/services/first", "", nil, nil)
	w.mustFlow(t, flow{"client", lab.TCP, "203.0.113.20:80", []string{"httpd-4"}})
	eventually(t, 10*time.Second, func() error { return w.hasEvent(t, "Node", "node1", "Starting") })
}

// hasEvent returns nil if the API server has an event of ours on the object; an
// empty reason stands for any.
func (w *world) hasEvent(t *testing.T, kind, name, reason string) error {
	t.Helper()
	var list struct {
		Items []struct {
			Reason              string
			Regarding           struct{ Kind, Name string }
			ReportingController string
			DeprecatedSource    struct{ Component string }
		}
	}
	if err := w.admin.do(t, http.MethodGet, "/apis/events.k8s.io/v1/events", "", nil, &list); err != nil {
		return err
	}
	for _, e := range list.Items {
		ours := e.ReportingController == "kube-proxy" || e.DeprecatedSource.Component == "kube-proxy"
		if ours && e.Regarding.Kind == kind && e.Regarding.Name == name && (reason == "" || e.Reason == reason) {
			return nil
		}
	}
	return fmt.Errorf("no event %s on %s %s among %+v", reason, kind, name, list.Items)
}

// survivesAPIServer crashes the API server (asked to end, it would wait a minute
// for its watchers), starts it again and changes endpoints.
func (w *world) survivesAPIServer(t *testing.T) {
	_ = w.plane.server.mustEnd(t, os.Kill) // the kill is all that Wait has to say
	w.mustFlow(t, reference("httpd-1", "httpd-2", "httpd-3")...)
	w.plane.startServer(t, planeIP)
	w.admin.mustApply(t, `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: httpd-svc-1
  labels: {kubernetes.io/service-name: httpd-svc}
addressType: IPv4
ports: [{port: 80}]
endpoints:
- {addresses: [10.244.0.4], nodeName: node1}
- {addresses: [10.244.2.9], nodeName: node3}`)
	w.mustFlow(t, reference("httpd-1", "httpd-4")...)
	w.admin.mustDo(t, http.MethodDelete, "/api/v1/namespaces/default/services/httpd-svc", "", nil, nil)
	w.mustRefuse(t, flow{"client", lab.TCP, nodeIP + ":30001", nil})
}

// keepsToItsRole reads the API server's audit log. It comes before the crash: an
// API server that has just started refuses everybody until it has read its roles.
func (w *world) keepsToItsRole(t *testing.T) {
	log, err := os.ReadFile(w.plane.path("audit.log"))
	if err != nil {
		t.Fatal(err)
	}
	watchLists := map[string]bool{}
	for line := range strings.Lines(string(log)) {
		var e struct {
			Verb, RequestURI, UserAgent string
			ResponseStatus              struct{ Code int }
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("audit log: %v: %s", err, line)
		}
		if code := e.ResponseStatus.Code; code == http.StatusUnauthorized || code == http.StatusForbidden {
			t.Errorf("%s %s: refused with %d", e.Verb, e.RequestURI, code)
		}
		if !strings.HasPrefix(e.UserAgent, "svcproxy/") {
			t.Errorf("%s %s: the user agent is %q", e.Verb, e.RequestURI, e.UserAgent)
		}
		if path, query, _ := strings.Cut(e.RequestURI, "?"); e.Verb == "watch" && strings.Contains(query, "sendInitialEvents=true") {
			watchLists[path] = true
		}
	}
	for _, path := range []string{"/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"} {
		if !watchLists[path] {
			t.Errorf("%s was not read by watch-list; what was: %v", path, watchLists)
		}
	}
}

func (w *world) endsInOrder(t *testing.T) {
	if err := w.proxy.mustEnd(t, syscall.SIGTERM); err != nil {
		var exit *exec.ExitError
		killed := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled()
		t.Errorf("svcproxy ended with %v (by the signal itself: %v), want status 0", err, killed)
	}
	if err := w.check(flow{"probe", lab.TCP, "10.96.0.10:53", []string{"dns-1", "dns-2"}}); err != nil {
		t.Errorf("after the proxy's end: %v", err)
	}
}
