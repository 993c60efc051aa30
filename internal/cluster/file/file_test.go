package file

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// patience is how long a test waits for what must come; it decides nothing else.
const patience = 30 * time.Second

// world is a directory, the Source of it and the State behind.
type world struct {
	t      *testing.T
	dir    string
	state  *cluster.State
	sink   cluster.Sink
	source *Source
	log    *lines

	mu  sync.Mutex
	now time.Time
}

// lines is a log that can be read while it is written.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// take returns the lines since the last call.
func (l *lines) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := strings.Split(strings.TrimSuffix(l.buf.String(), "\n"), "\n")
	l.buf.Reset()
	if len(out) == 1 && out[0] == "" {
		return nil
	}
	return out
}

func newWorld(t *testing.T) *world { return newWorldAt(t, t.TempDir()) }

func newWorldAt(t *testing.T, dir string) *world {
	w := &world{t: t, dir: dir, log: &lines{}, now: time.Unix(1_700_000_000, 0)}
	w.state = cluster.NewState(w.clock)
	w.sink = w.state.Sink("manifests", Delivers()...)
	w.source = New(dir, Options{
		Node: "alder", Log: slog.New(slog.NewTextHandler(w.log, nil)), Now: w.clock, Quiet: time.Millisecond, Poll: time.Hour,
	})
	return w
}

func (w *world) clock() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

func (w *world) advance(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now = w.now.Add(d)
}

func (w *world) write(name, text string) {
	w.t.Helper()
	mustWrite(w.t, filepath.Join(w.dir, name), text)
}

func mustWrite(t testing.TB, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o644))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) load() {
	w.t.Helper()
	must(w.t, w.source.Load(w.sink))
}

// facts returns the State as lines: Services with their address and ports, slices
// with their endpoints.
func (w *world) facts() []string {
	var out []string
	for _, n := range w.state.Names() {
		svc, sls := w.state.Service(n)
		if svc != nil {
			line := "service " + n.String()
			for _, a := range svc.ClusterIPs {
				line += " " + a.String()
			}
			for _, p := range svc.Ports {
				line += fmt.Sprintf(" %s:%d/%s", p.Name.Value(), p.Port, p.Protocol)
			}
			out = append(out, line)
		}
		for _, sl := range sls {
			line := "slice " + sl.Name.String() + " of " + sl.Service
			for _, e := range sl.Endpoints {
				line += " " + e.Addr.String()
			}
			out = append(out, line)
		}
	}
	if n := w.state.Node(); n != nil {
		out = append(out, fmt.Sprint("node ", n.Name, " ", n.Addrs))
	}
	for _, p := range w.state.ServiceCIDRs() {
		out = append(out, "cidr "+p.String())
	}
	return out
}

func (w *world) mustHave(want ...string) {
	w.t.Helper()
	if have := w.facts(); !slices.Equal(have, want) {
		w.t.Errorf("have\n  %s\nwant\n  %s", strings.Join(have, "\n  "), strings.Join(want, "\n  "))
	}
}

// mustReport checks that exactly these problems are there: each is a list of parts
// that its text has.
func (w *world) mustReport(want ...[]string) {
	w.t.Helper()
	have := w.source.Problems()
	if len(have) != len(want) {
		w.t.Errorf("%d problems, want %d: %v", len(have), len(want), have)
		return
	}
	for i, parts := range want {
		for _, part := range parts {
			if !strings.Contains(have[i].String(), part) {
				w.t.Errorf("problem %d is %q, which lacks %q", i, have[i], part)
			}
		}
	}
}

// warnings returns the new warnings in the log.
func (w *world) warnings() (out []string) {
	for _, l := range w.log.take() {
		if strings.Contains(l, "level=WARN") {
			out = append(out, l)
		}
	}
	return out
}

// run runs the Source until the test ends.
func (w *world) run() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.source.Run(ctx, w.sink) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
}

// await waits until the facts are these.
func (w *world) await(want ...string) {
	w.t.Helper()
	late := time.After(patience)
	for {
		if slices.Equal(w.facts(), want) {
			return
		}
		select {
		case <-w.state.Changed():
			w.state.Drain()
		case <-late:
			w.mustHave(want...)
			w.t.Fatalf("the facts do not come; problems: %v", w.source.Problems())
		}
	}
}

func service(name, addr string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {clusterIP: %s, ports: [{port: 80}]}\n", name, addr)
}

func slice(name, service string, addrs ...string) string {
	s := fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: %s, labels: {kubernetes.io/service-name: %s}}\n", name, service)
	s += "addressType: IPv4\nports: [{port: 8080}]\nendpoints:\n"
	for _, a := range addrs {
		s += "- addresses: [" + a + "]\n"
	}
	return s
}

func documents(d ...string) string { return strings.Join(d, "---\n") }

const (
	webFact = "service default/web 10.62.0.1 :80/TCP"
	apiFact = "service default/api 10.62.0.2 :80/TCP"
	dbFact  = "service default/db 10.62.0.3 :80/TCP"
)

var (
	web = service("web", "10.62.0.1")
	api = service("api", "10.62.0.2")
	db  = service("db", "10.62.0.3")
)

func TestKindsAndForms(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", "%YAML 1.1\n---\n# a comment\n"+documents(web, slice("web-1", "web", "10.61.1.5", "10.61.1.6")))
	w.write("b.yml", `
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Service
  metadata: {name: dual, namespace: shop, creationTimestamp: null}
  spec: {clusterIPs: [10.62.0.9, "2001:db8:62::9"], ports: [{name: a, port: 1}, {name: b, port: 2, protocol: UDP}]}
- apiVersion: v1
  kind: Endpoints
  metadata: {name: dual, namespace: shop}
  subsets: [{addresses: [{ip: 10.61.2.1}], ports: [{name: a, port: 1}]}]
...
---
apiVersion: v1
kind: ServiceList
items:
- {metadata: {name: api}, spec: {clusterIP: 10.62.0.2, ports: [{port: 80}]}}
--- # nodes
apiVersion: v1
kind: NodeList
items:
- {metadata: {name: birch}, status: {addresses: [{type: InternalIP, address: bad}]}}
- {metadata: {name: alder}, status: {addresses: [{type: InternalIP, address: 192.0.2.11}]}}
`)
	w.write("c.json", `{"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.62.0.0/16"]}}
{"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDRList", "items": [{"metadata": {"name": "more"}, "spec": {"cidrs": ["2001:db8:62::/112"]}}]}`)
	w.write("d.txt", db)
	w.write(".e.yaml", db)
	w.write("f.yaml~", db)
	w.write("g.yaml", "")
	w.write("h.yaml", "---\n# nothing but a comment\n---\n\n")
	must(t, os.Mkdir(filepath.Join(w.dir, "sub.yaml"), 0o755))
	mustWrite(t, filepath.Join(w.dir, "sub.yaml", "i.yaml"), db)
	w.write("j.yaml", "\xef\xbb\xbf"+strings.ReplaceAll(db, "\n", "\r\n"))
	w.load()
	w.mustHave(
		apiFact, dbFact, webFact,
		"slice default/web-1 of web 10.61.1.5 10.61.1.6",
		"service shop/dual 10.62.0.9 2001:db8:62::9 a:1/TCP b:2/UDP",
		"slice shop/dual/IPv4/0 of dual 10.61.2.1",
		"node alder [192.0.2.11]",
		"cidr 10.62.0.0/16", "cidr 2001:db8:62::/112",
	)
	w.mustReport()
	if ok, missing := w.state.Complete(); !ok {
		t.Errorf("not complete after a read: %q", missing)
	}
	if l := w.log.take(); l != nil {
		t.Errorf("logged %q", l)
	}
}

// The example of the operators' page works as it stands.
func TestExampleOfTheManual(t *testing.T) {
	manual, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "manifests.md"))
	must(t, err)
	_, rest, ok := strings.Cut(string(manual), "```yaml\n")
	example, _, closed := strings.Cut(rest, "```")
	if !ok || !closed {
		t.Fatal("docs/manifests.md has no example")
	}
	w := newWorld(t)
	w.write("a.yaml", example)
	w.load()
	w.mustReport()
	w.mustHave("service default/web 10.96.0.20 :80/TCP", "slice default/web-1 of web 192.0.2.21 192.0.2.22")
}

func TestDefaults(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: LoadBalancer, clusterIPs: [10.62.0.1], sessionAffinity: ClientIP, ports: [{port: 80}]}
status: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}
`)
	w.load()
	w.mustReport()
	svc, _ := w.state.Service(cluster.Name{Namespace: "default", Name: "web"})
	if svc == nil {
		t.Fatal("the Service is not there")
	}
	if svc.Affinity != 3*time.Hour || svc.ExternalLocal || svc.InternalLocal || svc.Created != 0 ||
		svc.Ports[0].Protocol != "TCP" || svc.Ports[0].NodePort != 0 || svc.Ingress[0].Proxy || svc.HealthCheckNodePort != 0 {
		t.Errorf("defaults: %+v", svc)
	}
}

func TestOtherKindsAreNotedOnce(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", documents("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\n", "apiVersion: apps/v1\nkind: Deployment\n", web,
		"apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: a}\n"))
	w.load()
	w.write("b.yaml", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: b}\n")
	w.load()
	w.mustHave(webFact)
	w.mustReport()
	have := w.log.take()
	if len(have) != 2 || !strings.Contains(have[0], "Deployment") || !strings.Contains(have[1], "knative") || !strings.Contains(have[1], "document 4") {
		t.Errorf("log: %q", have)
	}
}

// An object in a version that is gone would be missed in silence.
func TestOtherVersionsAreProblems(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", documents(web, "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: a}\n",
		"apiVersion: networking.k8s.io/v1alpha1\nkind: ServiceCIDR\n"))
	w.load()
	w.mustHave(webFact)
	w.mustReport(
		[]string{"document 2", "EndpointSlice default/a", "apiVersion: discovery.k8s.io/v1beta1 is not read", "discovery.k8s.io/v1;"},
		[]string{"document 3", "apiVersion: networking.k8s.io/v1alpha1 is not read", "networking.k8s.io/v1;"})
}

// A value of the wrong type is explained in the words of a manifest.
func TestWrongTypes(t *testing.T) {
	for spec, want := range map[string]string{
		`ports: [{port: "80"}]`:                   "spec.ports.port: is a string, want a number",
		"ports: 80":                               "spec.ports: is a number, want a list",
		"clusterIP: 7":                            "spec.clusterIP: is a number, want text",
		"publishNotReadyAddresses: 'yes'":         "spec.publishNotReadyAddresses: is a string, want true or false",
		"sessionAffinityConfig: {clientIP: [10]}": "want fields with values",
	} {
		w := newWorld(t)
		w.write("a.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {"+spec+"}\n")
		w.load()
		w.mustReport([]string{want})
	}
}

func TestOtherNodes(t *testing.T) {
	w := newWorld(t)
	node := func(name string) string { return "apiVersion: v1\nkind: Node\nmetadata: {name: " + name + "}\n" }
	for _, c := range []struct {
		text  string
		want  bool
		facts []string
	}{
		{node("alder"), false, []string{"node alder []"}},
		{documents(node("alder"), node("birch")), true, []string{"node alder []"}},
		{documents(web, node("birch")), true, []string{webFact}},
		{web, false, []string{webFact}},
	} {
		w.write("a.yaml", c.text)
		w.load()
		w.mustHave(c.facts...)
		if have := w.source.OtherNodes(); have != c.want {
			t.Errorf("other nodes: %v, want %v with\n%s", have, c.want, c.text)
		}
	}
}

func TestSeenOnEveryRead(t *testing.T) {
	w := newWorld(t)
	w.load()
	w.advance(time.Minute)
	if have := w.state.Age(); have != time.Minute {
		t.Fatalf("age %v, want 1m", have)
	}
	w.load()
	if have := w.state.Age(); have != 0 {
		t.Errorf("age %v after a read, want 0", have)
	}
	w.advance(time.Second)
	must(t, os.Remove(w.dir))
	if err := w.source.Load(w.sink); err == nil {
		t.Error("no error for a missing directory")
	}
	if have := w.state.Age(); have != time.Second {
		t.Errorf("age %v after a read that failed, want 1s", have)
	}
}

func TestMissingDirectory(t *testing.T) {
	w := newWorldAt(t, filepath.Join(t.TempDir(), "none"))
	if err := w.source.Load(w.sink); err == nil || !strings.Contains(err.Error(), w.dir) {
		t.Errorf("error %v, want one that names %s", err, w.dir)
	}
	if ok, _ := w.state.Complete(); ok {
		t.Error("complete without a read")
	}
	w.mustReport([]string{w.dir, "no such file"})
	if err := w.source.Load(w.sink); err == nil {
		t.Error("no error the second time")
	}
	if have := w.warnings(); len(have) != 1 {
		t.Errorf("warnings %q, want one", have)
	}
	must(t, os.Mkdir(w.dir, 0o755))
	w.write("a.yaml", web)
	w.load()
	w.mustHave(webFact)
	w.mustReport()
	must(t, os.RemoveAll(w.dir))
	if err := w.source.Load(w.sink); err == nil {
		t.Error("no error for a directory that went away")
	}
	w.mustHave(webFact)
	w.mustReport([]string{w.dir, effectDirectory})
	must(t, os.Mkdir(w.dir, 0o755))
	w.load()
	w.mustHave()
	w.mustReport()
}
