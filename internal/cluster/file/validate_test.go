package file

import (
	"fmt"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// TestValidation lists what is refused: each object has one fault, and the problem
// names its field.
func TestValidation(t *testing.T) {
	svc := func(spec string) string {
		return "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: " + spec
	}
	sl := func(rest string) string {
		return "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: web-1, labels: {kubernetes.io/service-name: web}}\n" + rest
	}
	ep := func(subset string) string {
		return "apiVersion: v1\nkind: Endpoints\nmetadata: {name: web}\nsubsets: [" + subset + "]"
	}
	for _, c := range []struct{ text, field, reason string }{
		{"apiVersion: v1\nkind: Service\nmetadata: {name: Web}\nspec: {clusterIP: None}", "metadata.name", "lower case"},
		{"apiVersion: v1\nkind: Service\nmetadata: {name: \"w\\nx\"}\nspec: {clusterIP: None}", "metadata.name", "lower case"},
		{"apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: a.b}\nspec: {clusterIP: None}", "metadata.namespace", "dots"},
		{svc(`{type: Balancer, ports: [{port: 80}]}`), "spec.type", "ClusterIP"},
		{svc(`{clusterIP: 10.62.0.1}`), "spec.ports", "Required"},
		{svc(`{ports: [{port: 0}]}`), "spec.ports[0].port", "between 1 and 65535"},
		{svc(`{ports: [{port: 65536}]}`), "spec.ports[0].port", "65536"},
		{svc(`{ports: [{port: 80, protocol: ICMP}]}`), "spec.ports[0].protocol", "TCP"},
		{svc(`{ports: [{port: 80, name: Http}]}`), "spec.ports[0].name", "Http"},
		{svc(`{ports: [{port: 80}, {port: 81, name: a}]}`), "spec.ports[0].name", "Required"},
		{svc(`{ports: [{port: 80, name: a}, {port: 81, name: a}]}`), "spec.ports[1].name", "Duplicate"},
		{svc(`{ports: [{port: 80, name: a}, {port: 80, name: b}]}`), "spec.ports[1].port", "Duplicate"},
		{svc(`{ports: [{port: 80, nodePort: 30000}]}`), "spec.ports[0].nodePort", "NodePort"},
		{svc(`{type: NodePort, ports: [{port: 80, nodePort: -1}]}`), "spec.ports[0].nodePort", "-1"},
		{svc(`{type: NodePort, ports: [{port: 80, nodePort: 3, name: a}, {port: 81, nodePort: 3, name: b}]}`), "spec.ports[1].nodePort", "Duplicate"},
		{svc(`{ports: [{port: 80}], sessionAffinity: Cookie}`), "spec.sessionAffinity", "ClientIP"},
		{svc(`{ports: [{port: 80}], sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}}`), "spec.sessionAffinityConfig.clientIP.timeoutSeconds", "86400"},
		{svc(`{ports: [{port: 80}], sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}}`), "spec.sessionAffinityConfig.clientIP.timeoutSeconds", "86401"},
		{svc(`{ports: [{port: 80}], clusterIP: ten}`), "spec.clusterIPs[0]", "ten"},
		{svc(`{ports: [{port: 80}], clusterIP: 10.0.0.1, clusterIPs: [10.0.0.2]}`), "spec.clusterIPs[0]", "10.0.0.1"},
		{svc(`{ports: [{port: 80}], clusterIPs: [10.0.0.1, 10.0.0.2]}`), "spec.clusterIPs[1]", "IPv4"},
		{svc(`{ports: [{port: 80}], clusterIPs: [10.0.0.1], ipFamilies: [IPv6]}`), "spec.ipFamilies[0]", "IPv4"},
		{svc(`{ports: [{port: 80}], clusterIPs: [None, 10.0.0.1]}`), "spec.clusterIPs", "None"},
		{svc(`{type: NodePort, ports: [{port: 80}], clusterIP: None}`), "spec.clusterIPs[0]", "NodePort"},
		{svc(`{ports: [{port: 80}], externalIPs: [x]}`), "spec.externalIPs[0]", "x"},
		{svc(`{ports: [{port: 80}], externalIPs: [127.0.0.1]}`), "spec.externalIPs[0]", "loopback"},
		{svc(`{ports: [{port: 80}], externalIPs: ["::"]}`), "spec.externalIPs[0]", "unspecified"},
		{svc(`{ports: [{port: 80}], externalIPs: [169.254.1.1]}`), "spec.externalIPs[0]", "link-local"},
		{svc(`{ports: [{port: 80}], externalTrafficPolicy: Local}`), "spec.externalTrafficPolicy", "externally"},
		{svc(`{type: NodePort, ports: [{port: 80}], externalTrafficPolicy: Global}`), "spec.externalTrafficPolicy", "Cluster"},
		{svc(`{ports: [{port: 80}], internalTrafficPolicy: Node}`), "spec.internalTrafficPolicy", "Local"},
		{svc(`{type: LoadBalancer, ports: [{port: 80}], healthCheckNodePort: 32000}`), "spec.healthCheckNodePort", "Local"},
		{svc(`{type: LoadBalancer, externalTrafficPolicy: Local, ports: [{port: 80}], healthCheckNodePort: 70000}`), "spec.healthCheckNodePort", "70000"},
		{svc(`{ports: [{port: 80}], loadBalancerSourceRanges: [10.0.0.0/8]}`), "spec.loadBalancerSourceRanges", "LoadBalancer"},
		{svc(`{type: LoadBalancer, ports: [{port: 80}], loadBalancerSourceRanges: [10.0.0.0]}`), "spec.loadBalancerSourceRanges[0]", "CIDR"},
		{svc("{type: LoadBalancer, ports: [{port: 80}]}\nstatus: {loadBalancer: {ingress: [{ip: x}]}}"), "status.loadBalancer.ingress[0].ip", "IP"},
		{svc("{type: LoadBalancer, ports: [{port: 80}]}\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.1, ipMode: X}]}}"), "status.loadBalancer.ingress[0].ipMode", "VIP"},
		{sl(`ports: [{port: 80}]`), "addressType", "Required"},
		{sl(`addressType: IPX`), "addressType", "IPv4"},
		{sl(`{addressType: IPv4}`), "", "not YAML"},
		{sl("addressType: IPv4\nports: [{port: 70000}]"), "ports[0].port", "70000"},
		{sl("addressType: IPv4\nports: [{port: 80, protocol: tcp}]"), "ports[0].protocol", "TCP"},
		{sl("addressType: IPv4\nports: [{port: 80}, {port: 81}]"), "ports[1].name", "Duplicate"},
		{sl("addressType: IPv4\nports: [{port: 80, name: A}]"), "ports[0].name", "A"},
		{sl("addressType: IPv4\nendpoints: [{addresses: []}]"), "endpoints[0].addresses", "Required"},
		{sl("addressType: IPv4\nendpoints: [{addresses: [a.example]}]"), "endpoints[0].addresses[0]", "valid IP"},
		{sl("addressType: IPv4\nendpoints: [{addresses: [\"2001:db8::1\"]}]"), "endpoints[0].addresses[0]", "addressType"},
		{sl("addressType: IPv6\nendpoints: [{addresses: [\"::1\"]}]"), "endpoints[0].addresses[0]", "loopback"},
		{sl("addressType: IPv4\nendpoints: [{addresses: [10.0.0.1], nodeName: A}]"), "endpoints[0].nodeName", "A"},
		{sl("addressType: IPv4\nendpoints: [{addresses: [10.0.0.1], hints: {forZones: [{name: \"a\\nb\"}]}}]"), "endpoints[0].hints.forZones[0].name", "alphanumeric"},
		{sl("addressType: IPv4\nendpoints: [{addresses: [10.0.0.1], hints: {forNodes: [{name: \"a b\"}]}}]"), "endpoints[0].hints.forNodes[0].name", "a b"},
		{strings.Replace(sl("addressType: IPv4"), "service-name: web", "service-name: \"\"", 1), "metadata.labels[kubernetes.io/service-name]", "Invalid"},
		{ep(`{addresses: [{ip: x}], ports: [{port: 1}]}`), "subsets[0].addresses[0].ip", "valid IP"},
		{ep(`{notReadyAddresses: [{ip: 127.0.0.1}], ports: [{port: 1}]}`), "subsets[0].notReadyAddresses[0].ip", "loopback"},
		{ep(`{addresses: [{ip: 10.0.0.1, nodeName: A}]}`), "subsets[0].addresses[0].nodeName", "A"},
		{ep(`{addresses: [{ip: 10.0.0.1}], ports: [{port: 0}]}`), "subsets[0].ports[0].port", "65535"},
		{ep(`{addresses: [{ip: 10.0.0.1}], ports: [{port: 1}, {port: 2, name: b}]}`), "subsets[0].ports[0].name", "Required"},
		{ep(`{addresses: [{ip: 10.0.0.1}], ports: [{port: 1, protocol: X}]}`), "subsets[0].ports[0].protocol", "UDP"},
		{"apiVersion: v1\nkind: Node\nmetadata: {name: alder}\nstatus: {addresses: [{type: InternalIP, address: x}]}", "status.addresses[0].address", "x"},
		{"apiVersion: v1\nkind: Node\nmetadata: {name: alder}\nspec: {podCIDRs: [x]}", "spec.podCIDRs[0]", "CIDR"},
		{"apiVersion: v1\nkind: Node\nmetadata: {name: alder}\nspec: {podCIDR: x}", "spec.podCIDR", "CIDR"},
		{"apiVersion: v1\nkind: Node\nmetadata: {name: alder, labels: {topology.kubernetes.io/zone: a b}}", "metadata.labels[topology.kubernetes.io/zone]", "a b"},
		{"apiVersion: v1\nkind: Node\nmetadata: {name: alder}\nstatus: {capacity: {cpu: much}}", "", "quantities"},
		{"apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}", "spec.cidrs", "Required"},
		{"apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}\nspec: {cidrs: [x]}", "spec.cidrs[0]", "CIDR"},
		{"kind: Service\nmetadata: {name: web}", "apiVersion", "missing"},
		{"apiVersion: 1\nkind: Service\nmetadata: {name: web}", "apiVersion", "number"},
		{"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: x, ports: [{port: 80}]}}]}]", "items[0].items[0].spec.clusterIPs[0]", "x"},
		{"apiVersion: v1\nkind: List\nitems: [{metadata: {name: web}}]", "items[0].kind", "missing"},
	} {
		w := newWorld(t)
		w.write("a.yaml", c.text)
		w.load()
		w.mustHave()
		have := w.source.Problems()
		if len(have) != 1 || have[0].Field != c.field || !strings.Contains(have[0].Reason, c.reason) || have[0].Effect != effectUnused {
			t.Errorf("%s\nhave %+v\nwant field %q, reason with %q", c.text, have, c.field, c.reason)
		}
	}
}

// TestAccepted lists what must not be refused.
func TestAccepted(t *testing.T) {
	for _, spec := range []string{
		`{clusterIP: None}`,
		`{type: ExternalName, externalName: a.example}`,
		`{ports: [{port: 80}]}`,
		`{clusterIP: 010.062.000.001, ports: [{port: 80}]}`,
		`{clusterIPs: [10.0.0.1, "2001:db8::1"], ipFamilies: [IPv4], ipFamilyPolicy: PreferDualStack, ports: [{port: 80}]}`,
		`{externalIPs: [198.51.100.1], externalTrafficPolicy: Local, ports: [{port: 80}]}`,
		`{type: LoadBalancer, loadBalancerSourceRanges: [" 10.0.0.0/8 "], ports: [{port: 80, nodePort: 30000, name: a}, {port: 80, nodePort: 30000, name: b, protocol: UDP}]}`,
		`{type: LoadBalancer, externalTrafficPolicy: Local, internalTrafficPolicy: Local, healthCheckNodePort: 32000, ports: [{port: 80, targetPort: http}]}`,
		`{externalIPs: ["", " ", 198.51.100.1], ports: [{port: 80}]}`,
		`{sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {}}, ports: [{port: 80}]}`,
	} {
		w := newWorld(t)
		w.write("a.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: web, creationTimestamp: 2026-01-02T03:04:05Z}\nspec: "+spec)
		w.load()
		w.mustReport()
		if services, _ := w.state.Counts(); services != 1 {
			t.Errorf("%s is not taken", spec)
		}
	}
}

// A port without a number costs that port alone, and says why.
func TestSlicePortWithoutNumber(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", strings.Replace(slice("web-1", "web", "10.0.0.1"), "[{port: 8080}]", "[{name: a, port: 0}, {name: b}, {name: c, port: 1}]", 1))
	w.load()
	w.mustReport()
	_, sls := w.state.Service(cluster.Name{Namespace: "default", Name: "web"})
	if len(sls) != 1 || len(sls[0].Ports) != 1 || len(sls[0].Problems) != 2 || sls[0].Problems[0].Reason != cluster.ReasonPortMissing {
		t.Errorf("have %+v", sls)
	}
}

// One object's faults are listed up to a bound.
func TestProblemsOfOneObjectAreBounded(t *testing.T) {
	w := newWorld(t)
	var b strings.Builder
	for i := range 100 {
		fmt.Fprintf(&b, "x%d, ", i)
	}
	w.write("a.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {ports: [{port: 80}], externalIPs: ["+b.String()+"]}")
	w.load()
	if have := w.source.Problems(); len(have) != maxFailures+1 {
		t.Errorf("%d problems, want %d", len(have), maxFailures+1)
	}
}
