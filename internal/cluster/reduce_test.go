package cluster

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

func mustDecode[T any](t *testing.T, text string) *T {
	t.Helper()
	o := new(T)
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return o
}

// mustHaveProblems checks the reasons in order, and that every message begins with
// a field and says what to do.
func mustHaveProblems(t *testing.T, have []Problem, want ...string) {
	t.Helper()
	var reasons []string
	for _, p := range have {
		reasons = append(reasons, p.Reason)
		if !strings.Contains(p.Message, ": ") && !strings.Contains(p.Message, "; ") {
			t.Errorf("the message says no remedy: %s", p.Message)
		}
	}
	if !slices.Equal(reasons, want) {
		t.Errorf("problems: have %+v, want %q", have, want)
	}
}

func addrs(in ...string) (out []netip.Addr) {
	for _, a := range in {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func prefixes(in ...string) (out []netip.Prefix) {
	for _, p := range in {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func TestReduceService(t *testing.T) {
	have := ReduceService(mustDecode[corev1.Service](t, `
metadata:
  name: edge
  namespace: shop
  uid: 0b7b0a4e-bf8a-4bb8-9fc0-6e2b4eaaab5c
  creationTimestamp: "2026-01-02T03:04:05Z"
  labels: {service.kubernetes.io/service-proxy-name: "", k8s-app: kube-dns}
  annotations: {svcproxy.io/scheduler: wrr, other.io/x: y}
spec:
  type: LoadBalancer
  clusterIP: 10.62.0.30
  clusterIPs: [10.62.0.30, "2001:db8:62::30"]
  ipFamilies: [IPv4, IPv6]
  externalIPs: [198.51.100.9, 0198.51.100.010, " ", 198.51.100.9, "2001:db8::9"]
  externalTrafficPolicy: Local
  internalTrafficPolicy: Local
  healthCheckNodePort: 32100
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}
  loadBalancerSourceRanges: [" 192.0.2.7/24 ", "2001:db8:5::/48", ""]
  ports:
  - {name: http, port: 80, nodePort: 31080, targetPort: web, protocol: TCP}
  - {name: dns, port: 53, protocol: UDP}
  - {name: sig, port: 2905, protocol: SCTP}
status:
  loadBalancer:
    ingress: [{ip: 203.0.113.20}, {hostname: lb.example}, {ip: 203.0.113.21, ipMode: Proxy}, {ip: "2001:db8::20", ipMode: VIP}]
`))
	want := &Service{
		Name: Name{Namespace: "shop", Name: "edge"}, UID: "0b7b0a4e-bf8a-4bb8-9fc0-6e2b4eaaab5c", Created: 1767323045,
		Type:        corev1.ServiceTypeLoadBalancer,
		ClusterIPs:  addrs("10.62.0.30", "2001:db8:62::30"),
		ExternalIPs: addrs("198.51.100.9", "198.51.100.10", "2001:db8::9"),
		Ingress: []Ingress{
			{Addr: netip.MustParseAddr("203.0.113.20")}, {Addr: netip.MustParseAddr("203.0.113.21"), Proxy: true}, {Addr: netip.MustParseAddr("2001:db8::20")},
		},
		SourceRanges: prefixes("192.0.2.0/24", "2001:db8:5::/48"),
		Ports: []ServicePort{
			{Intern("http"), "TCP", 80, 31080}, {Intern("dns"), "UDP", 53, 0}, {Intern("sig"), "SCTP", 2905, 0},
		},
		Affinity: time.Minute, HasProxyName: true, ExternalLocal: true, InternalLocal: true, DNS: true, HealthCheckNodePort: 32100,
		Annotations: map[string]string{"svcproxy.io/scheduler": "wrr"},
	}
	if !reflect.DeepEqual(have, want) {
		t.Errorf("have %+v\nwant %+v", have, want)
	}
}

func TestReduceServiceDefaults(t *testing.T) {
	have := ReduceService(mustDecode[corev1.Service](t, `
metadata: {name: web, namespace: kube-system}
spec: {clusterIP: 10.62.0.30, sessionAffinity: ClientIP, ports: [{port: 53}]}
`))
	want := &Service{
		Name: Name{Namespace: "kube-system", Name: "web"}, Type: corev1.ServiceTypeClusterIP, ClusterIPs: addrs("10.62.0.30"),
		Ports: []ServicePort{{Intern(""), "TCP", 53, 0}}, Affinity: 3 * time.Hour, DNS: true,
	}
	if !reflect.DeepEqual(have, want) {
		t.Errorf("have %+v\nwant %+v", have, want)
	}
}

func TestReduceServiceClusterIPs(t *testing.T) {
	for _, c := range []struct {
		spec     string
		want     []netip.Addr
		headless bool
		reasons  []string
	}{
		{spec: `{clusterIP: None}`, headless: true},
		{spec: `{clusterIP: None, clusterIPs: [None], ipFamilies: [IPv4]}`, headless: true},
		{spec: `{}`},
		{spec: `{clusterIP: ""}`},
		{spec: `{clusterIP: "2001:db8::1"}`, want: addrs("2001:db8::1")},
		{spec: `{clusterIPs: ["2001:db8::1", 10.0.0.1], ipFamilies: [IPv6, IPv4]}`, want: addrs("2001:db8::1", "10.0.0.1")},
		{spec: `{clusterIPs: ["2001:db8::1", 10.0.0.1], ipFamilies: [IPv4, IPv6]}`, reasons: []string{ReasonFamily, ReasonFamily}},
		{spec: `{clusterIPs: [10.0.0.1, "2001:db8::1"], ipFamilies: [IPv4]}`, want: addrs("10.0.0.1"), reasons: []string{ReasonFamily}},
		{spec: `{clusterIPs: [10.0.0.1, 10.0.0.2]}`, want: addrs("10.0.0.1"), reasons: []string{ReasonFamily}},
		{spec: `{clusterIPs: [10.0.0.300, "2001:db8::1"]}`, want: addrs("2001:db8::1"), reasons: []string{ReasonAddress}},
	} {
		have := ReduceService(mustDecode[corev1.Service](t, "spec: "+c.spec))
		if !slices.Equal(have.ClusterIPs, c.want) || have.Headless != c.headless {
			t.Errorf("%s: cluster IPs %v, headless %v; want %v, %v", c.spec, have.ClusterIPs, have.Headless, c.want, c.headless)
		}
		mustHaveProblems(t, have.Problems, c.reasons...)
	}
}

func TestReduceServiceProblems(t *testing.T) {
	have := ReduceService(mustDecode[corev1.Service](t, `
metadata: {annotations: {svcproxy.io/long: `+strings.Repeat("x", maxAnnotationLength+1)+`}}
spec:
  type: Balancer
  clusterIP: 10.62.0.300
  externalIPs: [198.51.100.999, 198.51.100.9]
  externalTrafficPolicy: Global
  healthCheckNodePort: 70000
  sessionAffinity: Cookie
  loadBalancerSourceRanges: [192.0.2.0]
  ports:
  - {name: a, port: 0}
  - {name: b, port: 65536}
  - {name: c, port: 80, protocol: ICMP}
  - {name: d, port: 80, nodePort: 70000}
  - {name: e, port: 81}
  - {name: e, port: 82}
status: {loadBalancer: {ingress: [{ip: 203.0.113}]}}
`))
	mustHaveProblems(t, have.Problems, ReasonValue, ReasonAddress, ReasonAddress, ReasonAddress, ReasonAddress,
		ReasonPort, ReasonPort, ReasonProtocol, ReasonPort, ReasonDuplicate, ReasonValue, ReasonAnnotation, ReasonPort)
	want := []ServicePort{{Intern("d"), "TCP", 80, 0}, {Intern("e"), "TCP", 81, 0}}
	if !slices.Equal(have.Ports, want) {
		t.Errorf("ports: have %v, want %v", have.Ports, want)
	}
	if !slices.Equal(have.ExternalIPs, addrs("198.51.100.9")) || have.Type != corev1.ServiceTypeClusterIP || have.Affinity != 0 {
		t.Errorf("the rest of the Service suffered: %+v", have)
	}
}

func TestProblemsAreBounded(t *testing.T) {
	o := &corev1.Service{}
	for range 1000 {
		o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, "no address")
	}
	have := ReduceService(o).Problems
	if len(have) != maxProblems+1 || have[maxProblems].Reason != ReasonMore || !strings.Contains(have[maxProblems].Message, "984 further") {
		t.Errorf("%d problems, the last is %v", len(have), have[len(have)-1])
	}
	o = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}}
	for i := range 100 {
		o.Annotations[fmt.Sprintf("svcproxy.io/%03d", i)] = "x"
	}
	if s := ReduceService(o); len(s.Annotations) != maxAnnotations || s.Annotations["svcproxy.io/000"] != "x" {
		t.Errorf("annotations: %v", s.Annotations)
	}
}

func TestReduceSlice(t *testing.T) {
	have := ReduceSlice(mustDecode[discoveryv1.EndpointSlice](t, `
metadata:
  name: web-1
  namespace: default
  labels: {kubernetes.io/service-name: web}
  annotations: {endpoints.kubernetes.io/last-change-trigger-time: "2026-01-02T03:04:05.5Z"}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}, {port: 53, protocol: UDP}, {name: plain, port: 1}]
endpoints:
- {addresses: [10.61.1.5, 10.61.1.99], nodeName: alder}
- addresses: ["010.61.1.6"]
  conditions: {ready: false, serving: true, terminating: true}
  zone: z9
  hints: {forZones: [{name: z2}, {name: z1}, {name: z2}], forNodes: [{name: birch}]}
- {addresses: [10.61.1.7], conditions: {ready: false, serving: false, terminating: false}}
`))
	none := internTopology(TopologySet{})
	want := &Slice{
		Name: name("web-1"), Service: "web", Trigger: time.Date(2026, 1, 2, 3, 4, 5, 5e8, time.UTC),
		Ports: []SlicePort{{Intern("http"), "TCP", 8080}, {Intern(""), "UDP", 53}, {Intern("plain"), "TCP", 1}},
		Endpoints: []Endpoint{
			{netip.MustParseAddr("10.61.1.5"), Intern("alder"), none, Ready | Serving},
			{netip.MustParseAddr("10.61.1.6"), Intern(""), internTopology(TopologySet{Zone: "z9", HintZones: "z1\nz2", HintNodes: "birch"}), Serving | Terminating},
			{netip.MustParseAddr("10.61.1.7"), Intern(""), none, 0},
		},
	}
	if !reflect.DeepEqual(have, want) {
		t.Errorf("have %+v\nwant %+v", have, want)
	}
}

func TestReduceSliceProblems(t *testing.T) {
	for _, c := range []struct {
		name, text string
		reasons    []string
		ports      int
		endpoints  int
	}{
		{
			name: "no label", text: `{addressType: IPv4, ports: [{port: 1}], endpoints: [{addresses: [10.0.0.1]}]}`,
			reasons: []string{ReasonNoService}, ports: 1, endpoints: 1,
		},
		{
			name: "FQDN", text: `{metadata: {labels: {kubernetes.io/service-name: a}}, addressType: FQDN, ports: [{port: 1}], endpoints: [{addresses: [a.example]}]}`,
			reasons: []string{ReasonAddressType},
		},
		{
			name: "headless", text: `{metadata: {labels: {kubernetes.io/service-name: a, service.kubernetes.io/headless: ""}}, addressType: IPv4, ports: [{port: 1}], endpoints: [{addresses: [10.0.0.1]}]}`,
		},
		{
			name: "ports", text: `{metadata: {labels: {kubernetes.io/service-name: a}}, addressType: IPv4, ports: [{name: a}, {name: b, port: 0}, {name: c, port: 70000}, {name: d, port: 1, protocol: ICMP}, {name: e, port: 2}]}`,
			reasons: []string{ReasonPortMissing, ReasonPortMissing, ReasonPort, ReasonProtocol}, ports: 1,
		},
		{
			name: "endpoints", text: `{metadata: {labels: {kubernetes.io/service-name: a}}, addressType: IPv6, ports: [{port: 1}], endpoints: [{addresses: []}, {addresses: [x]}, {addresses: [10.0.0.1]}, {addresses: ["2001:db8::1"]}]}`,
			reasons: []string{ReasonNoAddress, ReasonAddress, ReasonFamily}, ports: 1, endpoints: 1,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			have := ReduceSlice(mustDecode[discoveryv1.EndpointSlice](t, c.text))
			mustHaveProblems(t, have.Problems, c.reasons...)
			if len(have.Ports) != c.ports || len(have.Endpoints) != c.endpoints {
				t.Errorf("%d ports, %d endpoints; want %d, %d", len(have.Ports), len(have.Endpoints), c.ports, c.endpoints)
			}
		})
	}
}

func TestReduceEndpoints(t *testing.T) {
	have := ReduceEndpoints(mustDecode[corev1.Endpoints](t, `
metadata: {name: db, namespace: default}
subsets:
- addresses: [{ip: 10.0.0.1, nodeName: alder}, {ip: "2001:db8::1"}]
  notReadyAddresses: [{ip: 10.0.0.2}]
  ports: [{name: sql, port: 5432, protocol: TCP}]
- addresses: [{ip: 10.0.0.1}, {ip: nonsense}]
  ports: [{name: admin, port: 80}, {name: none}]
- ports: [{port: 1}]
`))
	none := internTopology(TopologySet{})
	sql := []SlicePort{{Intern("sql"), "TCP", 5432}}
	if len(have) != 3 {
		t.Fatalf("have %d slices", len(have))
	}
	mustHaveProblems(t, have[2].Problems, ReasonAddress, ReasonPortMissing)
	have[2].Problems = nil
	want := []*Slice{
		{Name: name("db/IPv4/0"), Service: "db", Ports: sql, Endpoints: []Endpoint{
			{netip.MustParseAddr("10.0.0.1"), Intern("alder"), none, Ready | Serving}, {netip.MustParseAddr("10.0.0.2"), Intern(""), none, Serving},
		}},
		{Name: name("db/IPv6/0"), Service: "db", IPv6: true, Ports: sql, Endpoints: []Endpoint{{netip.MustParseAddr("2001:db8::1"), Intern(""), none, Ready | Serving}}},
		{Name: name("db/IPv4/1"), Service: "db", Ports: []SlicePort{{Intern("admin"), "TCP", 80}}, Endpoints: []Endpoint{
			{netip.MustParseAddr("10.0.0.1"), Intern(""), none, Ready | Serving},
		}},
	}
	if !reflect.DeepEqual(have, want) {
		t.Errorf("have %+v\nwant %+v", have, want)
	}
	for _, meta := range []string{`{labels: {endpointslice.kubernetes.io/skip-mirror: "true"}}`, `{labels: {service.kubernetes.io/headless: ""}}`, `{annotations: {control-plane.alpha.kubernetes.io/leader: x}}`} {
		if have := ReduceEndpoints(mustDecode[corev1.Endpoints](t, "{metadata: "+meta+", subsets: [{addresses: [{ip: 10.0.0.1}], ports: [{port: 1}]}]}")); have != nil {
			t.Errorf("%s is mirrored: %+v", meta, have)
		}
	}
}

func TestReduceNode(t *testing.T) {
	have := ReduceNode(mustDecode[corev1.Node](t, `
metadata: {name: alder, uid: u1, labels: {topology.kubernetes.io/zone: z1}}
spec: {podCIDR: 10.61.1.0/24, podCIDRs: [10.61.1.0/24, "2001:db8:61:1::/64"], taints: [{key: other, effect: NoSchedule}]}
status:
  addresses: [{type: Hostname, address: alder}, {type: ExternalIP, address: 203.0.113.1}, {type: InternalIP, address: 0192.0.2.11}, {type: InternalIP, address: "2001:db8:1::11"}, {type: ExternalIP, address: x}]
`))
	mustHaveProblems(t, have.Problems, ReasonAddress)
	have.Problems = nil
	want := &Node{
		Name: "alder", UID: "u1", Zone: "z1", Addrs: addrs("192.0.2.11", "2001:db8:1::11", "203.0.113.1"), PodCIDRs: prefixes("10.61.1.0/24", "2001:db8:61:1::/64"),
	}
	if !reflect.DeepEqual(have, want) {
		t.Errorf("have %+v\nwant %+v", have, want)
	}
	for _, text := range []string{
		`{metadata: {deletionTimestamp: "2026-01-02T03:04:05Z"}}`,
		`{spec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: PreferNoSchedule}]}}`,
	} {
		if !ReduceNode(mustDecode[corev1.Node](t, text)).Deleting {
			t.Errorf("%s does not count as going away", text)
		}
	}
	if n := ReduceNode(mustDecode[corev1.Node](t, `{spec: {podCIDR: 10.61.1.0/24}}`)); n.Deleting || !slices.Equal(n.PodCIDRs, prefixes("10.61.1.0/24")) {
		t.Errorf("podCIDR alone: %+v", n)
	}
}

func TestReduceServiceCIDR(t *testing.T) {
	have := ReduceServiceCIDR(mustDecode[networkingv1.ServiceCIDR](t, `{spec: {cidrs: [10.62.0.0/16, x, "2001:db8:62::/112"]}}`))
	if want := prefixes("10.62.0.0/16", "2001:db8:62::/112"); !slices.Equal(have, want) {
		t.Errorf("have %v, want %v", have, want)
	}
}

// TestStringsAreCloned checks that no reduced string lies in the decoder's memory.
func TestStringsAreCloned(t *testing.T) {
	buffer := []byte(strings.Repeat("abcdefgh", 1000))
	part := func(from, to int) string { return string(buffer[from:to]) }
	o := manyService(1)
	o.Name, o.Labels = part(0, 8), map[string]string{labelProxyName: part(8, 16)}
	s := ReduceService(o)
	for field, pair := range map[string][2]string{"name": {o.Name, s.Name.Name}, "proxy name": {o.Labels[labelProxyName], s.ProxyName}, "uid": {string(o.UID), string(s.UID)}} {
		if pair[0] != pair[1] || reflect.ValueOf(pair[0]).UnsafePointer() == reflect.ValueOf(pair[1]).UnsafePointer() {
			t.Errorf("%s is not a clone", field)
		}
	}
}
