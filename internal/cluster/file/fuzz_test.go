package file

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// FuzzDocuments puts arbitrary text into one file, after a good version and before
// another. Nothing may panic, the neighbouring file must not suffer, whatever is
// delivered must be usable, and in the end nothing of the text may be left.
func FuzzDocuments(f *testing.F) {
	for _, seed := range []string{
		web, documents(web, api), slice("a", "web", "10.0.0.1"), "{", "---", "...\n--- x", "a: &a [*a]", "\xef\xbb\xbf%YAML 1.1\n---\n",
		"apiVersion: v1\nkind: List\nitems: [{kind: List, apiVersion: v1, items: [null, 1, {}]}]",
		"apiVersion: v1\nkind: Endpoints\nmetadata: {name: a}\nsubsets: [{addresses: [{ip: 10.0.0.1}], ports: [{port: 1}]}, null]",
		"apiVersion: v1\nkind: Node\nmetadata: {name: alder}\nspec: {podCIDRs: [10.0.0.0/8]}\nstatus: {addresses: [{type: InternalIP, address: ::1}]}",
		"apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}\nspec: {cidrs: [10.0.0.0/8]}",
		"apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIPs: [None, None], ports: [{port: 1, nodePort: 70000}, null]}",
		`{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"ports":[{"port":1e3}]}}{"x":`,
		"apiVersion: v1\nkind: Service\nmetadata: null\nspec: null\nstatus: {loadBalancer: {ingress: [{ip: 1.2.3.4, ipMode: null}]}}",
	} {
		f.Add([]byte(seed), false)
		f.Add([]byte(seed), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, json bool) {
		w := newWorld(t)
		name := "b.yaml"
		if json {
			name = "b.json"
		}
		path := filepath.Join(w.dir, name)
		w.write("a.yaml", db)
		w.write("b.yaml", documents(web, slice("web-1", "web", "10.61.1.5")))
		w.load()
		for range 2 {
			must(t, os.WriteFile(path, data, 0o644))
			must(t, os.Chtimes(path, time.Now(), time.Now()))
			w.load()
			if !slices.Contains(w.facts(), dbFact) {
				t.Error("the other file's Service is gone")
			}
			mustBeUsable(t, w.state)
		}
		_ = os.Remove(filepath.Join(w.dir, "b.yaml"))
		must(t, os.WriteFile(path, []byte("\n"), 0o644))
		w.load()
		w.mustHave(dbFact)
		w.mustReport()
	})
}

func mustBeUsable(t *testing.T, s *cluster.State) {
	t.Helper()
	for _, n := range s.Names() {
		svc, sls := s.Service(n)
		if svc != nil && svc.Type != corev1.ServiceTypeExternalName {
			for _, p := range svc.Problems {
				if p.Reason != cluster.ReasonAnnotation {
					t.Errorf("Service %v passed with a problem: %v", n, p)
				}
			}
		}
		for _, sl := range sls {
			for _, e := range sl.Endpoints {
				if !e.Addr.IsValid() || e.Addr.Is6() != sl.IPv6 || e.Addr.Zone() != "" {
					t.Errorf("slice %v has endpoint %v", sl.Name, e.Addr)
				}
			}
		}
	}
}
