package world

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

const manifest = `apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: LoadBalancer, clusterIP: 10.62.0.20, externalIPs: [203.0.113.30], loadBalancerSourceRanges: [198.51.100.0/25], ports: [{port: 80}]}
status: {loadBalancer: {ingress: [{ip: 203.0.113.20}, {hostname: web.example}]}}
---
# a comment alone
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [10.61.1.5]}]
`

func mustDecode(t *testing.T, f Families) []Object {
	t.Helper()
	objs, err := Decode([]byte(manifest), f)
	if err != nil {
		t.Fatal(err)
	}
	return objs
}

func TestDecode(t *testing.T) {
	tests := []struct {
		families Families
		service  string
		slices   []string
	}{
		{AsWritten, "10.62.0.20;203.0.113.30;198.51.100.0/25;203.0.113.20,web.example", []string{"web-1 IPv4 10.61.1.5"}},
		{Only4, "10.62.0.20;203.0.113.30;198.51.100.0/25;203.0.113.20,web.example", []string{"web-1 IPv4 10.61.1.5"}},
		{Only6, "2001:db8:62::20;2001:db8:113::1e;2001:db8:51::/121;2001:db8:113::14,web.example", []string{"web-1 IPv6 2001:db8:61:1::5"}},
		{Dual, "10.62.0.20,2001:db8:62::20;203.0.113.30,2001:db8:113::1e;198.51.100.0/25,2001:db8:51::/121;203.0.113.20,web.example,2001:db8:113::14",
			[]string{"web-1 IPv4 10.61.1.5", "web-1-v6 IPv6 2001:db8:61:1::5"}},
	}
	for _, tt := range tests {
		objs := mustDecode(t, tt.families)
		if have := describe(objs[0].(*corev1.Service)); have != tt.service {
			t.Errorf("families %q: Service\nhave %s\nwant %s", tt.families, have, tt.service)
		}
		var slices []string
		for _, o := range objs[1:] {
			s := o.(*discoveryv1.EndpointSlice)
			slices = append(slices, s.Name+" "+string(s.AddressType)+" "+s.Endpoints[0].Addresses[0])
		}
		if d := cmp.Diff(tt.slices, slices); d != "" {
			t.Errorf("families %q: slices (-want +have)\n%s", tt.families, d)
		}
	}
}

func describe(s *corev1.Service) string {
	ips := s.Spec.ClusterIPs
	if len(ips) == 0 {
		ips = []string{s.Spec.ClusterIP}
	}
	var ingress []string
	for _, in := range s.Status.LoadBalancer.Ingress {
		ingress = append(ingress, in.IP+in.Hostname)
	}
	join := func(l []string) string { return strings.Join(l, ",") }
	return strings.Join([]string{join(ips), join(s.Spec.ExternalIPs), join(s.Spec.LoadBalancerSourceRanges), join(ingress)}, ";")
}

func TestDecodeNamesTheFault(t *testing.T) {
	tests := []struct{ text, want string }{
		{"kind: Pod\nmetadata: {name: web}\n", `kind "Pod"`},
		{"kind: Service\nmetadata: {}\n", "metadata.name"},
		{"kind: Service\nmetadata: {name: web}\nspec: {ports: [{port: http}]}\n", "port"},
		{"kind: Service\nmetadata: {name: web}\nspec: {portz: []}\n", "portz"},
		{"kind: Node\nmetadata: {name: a}\n---\n{{\n", "document 2"},
	}
	for _, tt := range tests {
		if _, err := Decode([]byte(tt.text), AsWritten); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error %v, want one that says %q", tt.text, err, tt.want)
		}
	}
}

func TestIdentities(t *testing.T) {
	var ids Identities
	stamp := func() Object {
		o := mustDecode(t, AsWritten)[0]
		ids.Stamp(o)
		return o
	}
	first, again := stamp(), stamp()
	if first.GetUID() != again.GetUID() || first.GetCreationTimestamp() != again.GetCreationTimestamp() {
		t.Error("an object that is applied again is another one")
	}
	ids.Forget(KeyOf(first))
	if later := stamp(); later.GetUID() == first.GetUID() || !later.GetCreationTimestamp().After(first.GetCreationTimestamp().Time) {
		t.Error("an object that was deleted and applied again is the same one, or not younger")
	}
}

// TestScenarioManifests decodes the manifests of every scenario, so that a typing
// error shows without a kernel.
func TestScenarioManifests(t *testing.T) {
	files, err := filepath.Glob("../../../testdata/scenarios/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		a := txtar.Parse(b)
		for _, m := range a.Files {
			if !strings.Contains(string(a.Comment), "apply "+m.Name) {
				continue
			}
			if _, err := Decode(m.Data, AsWritten); err != nil {
				t.Errorf("%s: %s: %v", filepath.Base(f), m.Name, err)
			}
		}
	}
}
