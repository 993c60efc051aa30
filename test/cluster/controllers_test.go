//go:build cluster

package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	load "github.com/svcproxy/svcproxy/internal/scenario/flow"
)

// twoNodes is a control plane in the middle of two nodes with pods, and a client.
func twoNodes() lab.Topology {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	t := lab.Topology{Hosts: []lab.HostSpec{{Name: "plane", Forwards: true}}}
	for _, n := range clusterNodes {
		toPlane, fromPlane := "eth0", "to-"+n.name
		t.Hosts = append(t.Hosts, lab.HostSpec{Name: n.name, Forwards: true, OwnRun: true})
		t.Links = append(t.Links, lab.LinkSpec{
			A: lab.EndSpec{Host: n.name, Interface: toPlane, Addrs: []netip.Prefix{prefix(n.ip + "/32")}},
			B: lab.EndSpec{Host: "plane", Interface: fromPlane, Addrs: []netip.Prefix{prefix(planeIP + "/32")}},
		})
		t.Routes = append(t.Routes,
			lab.RouteSpec{Host: n.name, To: prefix(planeIP + "/32"), Dev: toPlane},
			lab.RouteSpec{Host: n.name, To: prefix("0.0.0.0/0"), Dev: toPlane, Via: addr(planeIP)},
			lab.RouteSpec{Host: "plane", To: prefix(n.ip + "/32"), Dev: fromPlane},
			lab.RouteSpec{Host: "plane", To: prefix(n.pods), Dev: fromPlane, Via: addr(n.ip)})
		for _, pod := range append(slices.Clone(n.workers), n.prober) {
			t.Leaves = append(t.Leaves, lab.LeafSpec{Name: pod.name, Behind: n.name, Addrs: []netip.Addr{addr(pod.ip)}, From: []netip.Addr{addr(n.ip)}})
		}
	}
	t.Routes = append(t.Routes, lab.RouteSpec{Host: "plane", To: prefix("203.0.113.0/24"), Dev: "to-" + clusterNodes[0].name, Via: addr(clusterNodes[0].ip)})
	t.Leaves = append(t.Leaves, lab.LeafSpec{Name: "client", Behind: "plane", Addrs: []netip.Addr{addr("198.51.100.7")}, From: []netip.Addr{addr(planeIP)}})
	return t
}

type labPod struct{ name, ip string }

type clusterNode struct {
	name, ip, pods string
	workers        []labPod
	prober         labPod
}

var clusterNodes = []clusterNode{
	{"node1", "172.16.65.181", "10.244.0.0/24", []labPod{{"w1", "10.244.0.11"}, {"w2", "10.244.0.12"}, {"w3", "10.244.0.13"}}, labPod{"probe1", "10.244.0.250"}},
	{"node2", "172.16.65.182", "10.244.1.0/24", []labPod{{"w4", "10.244.1.14"}, {"w5", "10.244.1.15"}, {"w6", "10.244.1.16"}}, labPod{"probe2", "10.244.1.250"}},
}

// workload is a Deployment's pods, stood in for by Pod objects whose addresses are
// hosts of the lab.
type workload struct {
	*world
	proxies map[string]*program
}

// TestControllers has the real controllers make EndpointSlices of Pods, with a proxy on
// each of two nodes. SVCPROXY_KUBE_PROXIES lets upstream's go the same way, but not with
// -short.
func TestControllers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	binary := mustBuild(t)
	subjects := map[string][]string{}
	ours := []string{"iptables", "nftables", "userspace"}
	if testing.Short() {
		ours = ours[:2]
	}
	for _, mode := range ours {
		subjects["svcproxy "+mode] = []string{binary, mode}
	}
	for _, entry := range strings.Fields(os.Getenv("SVCPROXY_KUBE_PROXIES")) {
		if version, path, ok := strings.Cut(entry, "="); ok && version == "1.37" && !testing.Short() {
			subjects["kube-proxy nftables"] = []string{path, "nftables"}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(subjects)) {
		t.Run(name, func(t *testing.T) { mustWorkload(t, subjects[name][0], subjects[name][1]).lives(t) })
	}
}

// mustWorkload starts everything: the plane with its controllers, and the proxies.
func mustWorkload(t *testing.T, proxy, mode string) *workload {
	t.Helper()
	l, err := lab.Build(twoNodes())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	w := &workload{&world{lab: l, plane: mustStartPlane(t, l.Host("plane"), planeIP)}, map[string]*program{}}
	w.admin = mustAdmin(t, w.plane)
	for _, n := range clusterNodes {
		w.admin.mustApply(t, fmt.Sprintf(`apiVersion: v1
kind: Node
metadata: {name: %[1]s, labels: {kubernetes.io/hostname: %[1]s}}
spec: {podCIDR: %[2]s, podCIDRs: [%[2]s]}
status: {addresses: [{type: InternalIP, address: %[3]s}], conditions: [{type: Ready, status: "True"}]}`, n.name, n.pods, n.ip))
		for _, pod := range n.workers {
			for _, p := range []lab.Proto{lab.TCP, lab.UDP} {
				if _, err := l.Host(pod.name).Serve(pod.name, p, 8080); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	kubeconfig := w.plane.path("admin.conf")
	mustWrite(t, kubeconfig, strings.Replace(mustRead(t, w.plane.kubeconfig(t)), proxyToken, adminToken, 1))
	mustStart(t, l.Host("plane"), w.plane.path("controllers.log"), mustGetenv(t, "SVCPROXY_CONTROLLER_MANAGER"),
		"--kubeconfig="+kubeconfig, "--leader-elect=false", "--bind-address=127.0.0.1",
		"--controllers=endpointslice-controller,endpointslice-mirroring-controller,endpoints-controller,serviceaccount-controller,service-cidr-controller",
		"--concurrent-service-endpoint-syncs=5")
	for _, n := range clusterNodes {
		config := w.plane.path(n.name + ".yaml")
		mustWrite(t, config, fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: %s
clusterCIDR: 10.244.0.0/16
clientConnection: {kubeconfig: %q}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, mode, n.name, w.plane.kubeconfig(t)))
		w.proxies[n.name] = mustStart(t, l.Host(n.name), w.plane.path(n.name+".log"), proxy, "--config="+config)
		w.proxy = w.proxies[n.name]
	}
	return w
}

// podOf returns where a worker runs.
func podOf(name string) (node clusterNode, pod labPod) {
	for _, n := range clusterNodes {
		for _, p := range n.workers {
			if p.name == name {
				return n, p
			}
		}
	}
	panic("no pod " + name)
}

// mustPod creates a pod of the workload with a version, ready at once.
func (w *workload) mustPod(t *testing.T, name, version string) {
	t.Helper()
	n, p := podOf(name)
	w.admin.mustApply(t, fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: web, version: %[2]s}}
spec: {nodeName: %[3]s, automountServiceAccountToken: false, containers: [{name: c, image: none, ports: [{containerPort: 8080}]}]}
status: {phase: Running, podIP: %[4]s, podIPs: [{ip: %[4]s}], conditions: [{type: Ready, status: "True"}, {type: ContainersReady, status: "True"}]}`,
		name, version, n.name, p.ip))
}

// mustReady sets a pod's readiness.
func (w *workload) mustReady(t *testing.T, name string, ready bool) {
	t.Helper()
	status := "False"
	if ready {
		status = "True"
	}
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{
		map[string]any{"type": "Ready", "status": status},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	w.admin.mustDo(t, http.MethodPatch, "/api/v1/namespaces/default/pods/"+name+"/status", "application/strategic-merge-patch+json", body, nil)
}

// mustKill deletes a pod at once, as when its node has found it dead.
func (w *workload) mustKill(t *testing.T, name string) {
	t.Helper()
	w.admin.mustDo(t, http.MethodDelete, "/api/v1/namespaces/default/pods/"+name+"?gracePeriodSeconds=0", "", nil, nil)
}

// services are of all types, over the same pods.
const services = `apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.1.1, selector: {app: web}, ports: [{name: tcp, port: 80, targetPort: 8080}, {name: udp, protocol: UDP, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: web-node}
spec: {type: NodePort, clusterIP: 10.96.1.2, selector: {app: web}, ports: [{port: 80, targetPort: 8080, nodePort: 30080}]}
---
apiVersion: v1
kind: Service
metadata: {name: web-lb}
spec: {type: LoadBalancer, externalTrafficPolicy: Local, clusterIP: 10.96.1.3, selector: {app: web}, ports: [{port: 80, targetPort: 8080, nodePort: 30081}]}
status: {loadBalancer: {ingress: [{ip: 203.0.113.9}]}}
---
apiVersion: v1
kind: Service
metadata: {name: web-local}
spec: {internalTrafficPolicy: Local, clusterIP: 10.96.1.4, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: web-external}
spec: {clusterIP: 10.96.1.5, externalIPs: [203.0.113.10], selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: web-headless}
spec: {clusterIP: None, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: web-name}
spec: {type: ExternalName, externalName: example.org}
---
apiVersion: v1
kind: Service
metadata: {name: other}
spec: {clusterIP: 10.96.1.9, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: other-1, labels: {kubernetes.io/service-name: other}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.0.13], nodeName: node1}, {addresses: [10.244.1.16], nodeName: node2}]`

// lives scales, rolls and kills, and looks after each step at who answers where.
func (w *workload) lives(t *testing.T) {
	w.admin.mustApply(t, services)
	eventually(t, 20*time.Second, func() error { // pods need an account, which a controller makes
		return w.admin.do(t, http.MethodGet, "/api/v1/namespaces/default/serviceaccounts/default", "", nil, nil)
	})
	w.mustRefuse(t, flow{"probe1", lab.TCP, "10.96.1.1:80", nil})
	w.mustPod(t, "w1", "one")
	w.mustPod(t, "w4", "one")
	w.mustServeBy(t, "w1", "w4")

	// Requests to a Service that none of this concerns, and to the workload itself.
	quiet, err := load.StartLoad("other", w.lab.Host("probe1"), lab.Dialing{Proto: lab.TCP, To: netip.MustParseAddrPort("10.96.1.9:80")}, 50)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(quiet.Close)
	rolling, err := load.StartLoad("web", w.lab.Host("probe2"), lab.Dialing{Proto: lab.TCP, To: netip.MustParseAddrPort("10.96.1.1:80")}, 50)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(rolling.Close)

	for _, pod := range []string{"w2", "w3", "w5", "w6"} { // scale up
		w.mustPod(t, pod, "one")
	}
	w.mustServeBy(t, "w1", "w2", "w3", "w4", "w5", "w6")
	for _, pod := range []string{"w1", "w4"} { // roll: one goes not ready, is deleted, comes back as another
		w.mustReady(t, pod, false)
		w.mustServeBy(t, without(pod, "w1", "w2", "w3", "w4", "w5", "w6")...)
		w.mustKill(t, pod)
		w.mustPod(t, pod, "two")
		w.mustServeBy(t, "w1", "w2", "w3", "w4", "w5", "w6")
	}
	for _, pod := range []string{"w2", "w3", "w5"} { // scale down
		w.mustKill(t, pod)
	}
	w.mustServeBy(t, "w1", "w4", "w6")
	if err := rolling.Expect(0); err != nil {
		t.Error(err)
	}
	w.mustKill(t, "w1") // the last on its node: Local policy drops there
	w.mustKill(t, "w4")
	w.mustServeBy(t, "w6")
	w.mustKill(t, "w6")
	w.mustRefuse(t, flow{"probe1", lab.TCP, "10.96.1.1:80", nil})
	w.mustRefuse(t, flow{"client", lab.TCP, clusterNodes[0].ip + ":30080", nil})
	if err := quiet.Expect(0); err != nil {
		t.Error(err)
	}
}

func without(gone string, all ...string) []string {
	return slices.DeleteFunc(all, func(s string) bool { return s == gone })
}

// mustServeBy waits until each Service is served by exactly these pods, of those that
// its policies allow.
func (w *workload) mustServeBy(t *testing.T, pods ...string) {
	t.Helper()
	here := map[string][]string{}
	for _, name := range pods {
		n, _ := podOf(name)
		here[n.name] = append(here[n.name], name)
	}
	flows := []flow{
		{"probe1", lab.TCP, "10.96.1.1:80", pods},
		{"probe2", lab.UDP, "10.96.1.1:80", pods},
		{"node1", lab.TCP, "10.96.1.2:80", pods},
		{"client", lab.TCP, clusterNodes[0].ip + ":30080", pods},
		{"client", lab.TCP, clusterNodes[1].ip + ":30080", pods},
		{"client", lab.TCP, "203.0.113.10:80", pods},
		{"probe2", lab.TCP, "203.0.113.9:80", pods}, // short-circuits the Local policy
	}
	for i, n := range clusterNodes {
		if len(here[n.name]) > 0 {
			flows = append(flows,
				flow{fmt.Sprintf("probe%d", i+1), lab.TCP, "10.96.1.4:80", here[n.name]},
				flow{"client", lab.TCP, n.ip + ":30081", here[n.name]})
		}
	}
	for _, n := range clusterNodes {
		w.proxy = w.proxies[n.name]
		if err := w.proxy.running(); err != nil {
			t.Fatal(err)
		}
	}
	w.mustFlow(t, flows...)
	w.mustBeHealthy(t, here, 20*time.Second)
}

// mustBeHealthy asks the health-check node port that the API server allocated.
func (w *workload) mustBeHealthy(t *testing.T, here map[string][]string, within time.Duration) {
	t.Helper()
	var svc struct {
		Spec struct{ HealthCheckNodePort int }
	}
	w.admin.mustDo(t, http.MethodGet, "/api/v1/namespaces/default/services/web-lb", "", nil, &svc)
	for _, n := range clusterNodes {
		want := http.StatusServiceUnavailable
		if len(here[n.name]) > 0 {
			want = http.StatusOK
		}
		client := w.lab.Host(n.name).HTTPClient(time.Second)
		eventually(t, within, func() error {
			res, err := client.Get(fmt.Sprintf("http://%s:%d/", n.ip, svc.Spec.HealthCheckNodePort))
			if err != nil {
				return err
			}
			defer res.Body.Close()
			if res.StatusCode != want {
				return fmt.Errorf("health check of %s: %s, want %d", n.name, res.Status, want)
			}
			return nil
		})
	}
}
