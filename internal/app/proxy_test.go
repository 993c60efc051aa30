package app

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
)

// recorder is a Backend that keeps the text of the last plan it was given.
type recordingBackend struct {
	mu   sync.Mutex
	plan string
}

func (b *recordingBackend) Apply(_ context.Context, u plan.Update) error {
	if u.Partial {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.plan = u.Plan.String()
	return nil
}

func (b *recordingBackend) Invalidate() {}

func (b *recordingBackend) text() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.plan
}

// fakeMode is called iptables and programs b.
func fakeMode(b dataplane.Backend) builtMode {
	return builtMode{
		Mode:     dataplane.Mode{Name: "iptables", New: func(dataplane.Env) (dataplane.Backend, error) { return b, nil }},
		supports: func(context.Context, plan.Family) error { return nil },
	}
}

// safeBuffer is a log that may be read while it is written.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// fixture is a proxy that runs in this process over a fake host and Backend.
type fixture struct {
	dir             string // holds config.yaml and the folder services
	backend         *recordingBackend
	log             *safeBuffer
	healthz, metric string // URLs
	stop            func() error
}

const (
	nodeManifest = `apiVersion: v1
kind: Node
metadata: {name: alder}
status: {addresses: [{type: InternalIP, address: 192.0.2.11}]}
`
	webManifest = `apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, clusterIP: 10.62.0.20, ports: [{port: 80, nodePort: 31080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080, name: ""}]
endpoints: [{addresses: [10.61.1.5]}]
`
)

// startFixture runs a proxy; body is the configuration file's, manifests its
// services folder by file; nil: there is none, and the API server counts.
func startFixture(t *testing.T, body string, manifests map[string]string) *fixture {
	t.Helper()
	f := &fixture{dir: t.TempDir(), backend: &recordingBackend{}, log: &safeBuffer{}}
	healthz, metric := freeAddress(t), freeAddress(t)
	f.healthz, f.metric = "http://"+healthz, "http://"+metric
	for name, content := range manifests {
		f.write(t, "services/"+name, content)
	}
	f.write(t, "config.yaml", fmt.Sprintf(configHead, healthz, metric)+body)

	flags := config.NewFlags()
	fs := pflag.NewFlagSet("svcproxy", pflag.ContinueOnError)
	flags.Register(fs)
	args := []string{"--config=" + f.dir + "/config.yaml"}
	if manifests != nil {
		args = append(args, "--manifests="+f.dir+"/services")
	}
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	c, _, err := flags.Load(os.ReadFile)
	if err != nil {
		t.Fatal(err)
	}
	fake := &host.Fake{CPUs: 2, Values: map[string]string{}}
	fake.SetAddrs(netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("10.9.9.9"))
	env := Env{Stderr: f.log, Host: fake, Version: "v1.2.3", Getenv: os.Getenv, Hostname: func() (string, error) { return "Alder", nil }}
	mode := fakeMode(f.backend)
	ctx, cancel := context.WithCancel(context.Background())
	p, err := newProxy(ctx, env, flags, chosen{config: c, mode: mode}, newLog(f.log, c.Log))
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(f.dir + "/config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- p.run(ctx, content) }()
	for _, url := range []string{f.healthz + "/livez", f.metric + "/healthz"} {
		eventually(t, url, func() bool { code, _ := get(url); return code == http.StatusOK })
	}
	f.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := f.stop(); err != nil {
			t.Errorf("run ended with %v", err)
		}
		if strings.Contains(f.log.String(), "metric was used wrongly") {
			t.Error("a metric was used wrongly")
		}
		if t.Failed() {
			t.Log(f.log.String())
		}
	})
	return f
}

const configHead = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
healthzBindAddress: %s
metricsBindAddress: %s
iptables: {minSyncPeriod: 1ms}
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
oomScoreAdj: 0
`

// freeAddress is one that nobody listens on now.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (f *fixture) write(t *testing.T, name, content string) {
	t.Helper()
	path := filepath.Join(f.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".new", []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// rewriteConfig changes the configuration file's body and keeps its head.
func (f *fixture) rewriteConfig(t *testing.T, body string) {
	t.Helper()
	f.write(t, "config.yaml", fmt.Sprintf(configHead, strings.TrimPrefix(f.healthz, "http://"), strings.TrimPrefix(f.metric, "http://"))+body)
}

// eventually waits until ok holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		if ok() {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	t.Fatalf("in vain waited for: %s", what)
}

// get returns code and body of an HTTP answer, 0 if there is none.
func get(url string) (int, string) {
	r, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return 0, err.Error()
	}
	return r.StatusCode, string(b)
}

func (f *fixture) status(t *testing.T) status {
	t.Helper()
	_, body := get(f.metric + "/status")
	var s status
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return s
}

func (f *fixture) awaitReady(t *testing.T) {
	t.Helper()
	eventually(t, "/readyz", func() bool { code, _ := get(f.healthz + "/readyz"); return code == http.StatusOK })
}

func TestProxy(t *testing.T) {
	f := startFixture(t, "", map[string]string{"node.yaml": nodeManifest, "web.yaml": webManifest})
	f.awaitReady(t)
	if have := f.backend.text(); !strings.Contains(have, "service default/web TCP IPv4") || !strings.Contains(have, "endpoint 10.61.1.5:8080") {
		t.Errorf("plan:\n%s", have)
	}
	for _, tt := range []struct{ url, want string }{
		{f.healthz + "/healthz", `"nodeEligible":true`},
		{f.healthz + "/livez", `"healthy":true`},
		{f.metric + "/proxyMode", "iptables"},
		{f.metric + "/healthz", "ok"},
		{f.metric + "/configz", `"kubeproxy.config.k8s.io":{`},
		{f.metric + "/metrics", "svcproxy_services 1"},
		{f.metric + "/metrics", "svcproxy_endpoints 1"},
		{f.metric + "/metrics", "svcproxy_synced 1"},
		{f.metric + "/metrics", `kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"}`},
		{f.metric + "/flagz", "config=" + f.dir},
	} {
		code, body := get(tt.url)
		if code != http.StatusOK || !strings.Contains(body, tt.want) {
			t.Errorf("%s: %d, want 200 and %s:\n%s", tt.url, code, tt.want, body)
		}
	}
	s := f.status(t)
	if s.Node != "alder" || s.Services != 1 || s.Endpoints != 1 || !s.Loop.Synced || !slices.Equal(s.Sources, []string{f.dir + "/services"}) {
		t.Errorf("status %+v", s)
	}
	if !strings.Contains(f.log.String(), "msg=event reason=Starting kind=Node name=alder type=Normal") {
		t.Errorf("no event Starting in the log:\n%s", f.log.String())
	}

	f.write(t, "services/web.yaml", strings.ReplaceAll(webManifest, "10.61.1.5", "10.61.1.6"))
	eventually(t, "the changed endpoint", func() bool { return strings.Contains(f.backend.text(), "10.61.1.6:8080") })
	service, _, _ := strings.Cut(webManifest, "---\n")
	f.write(t, "services/web.yaml", service+"---\nkind: [")
	eventually(t, "the problem in the status", func() bool { return strings.Contains(strings.Join(f.status(t).Problems, " "), "web.yaml") })
	if !strings.Contains(f.backend.text(), "10.61.1.6:8080") {
		t.Error("a bad manifest removed what was in force")
	}
	if err := f.stop(); err != nil {
		t.Errorf("run: %v", err)
	}
	if !strings.Contains(f.backend.text(), "10.61.1.6:8080") {
		t.Error("the end of the process changed the plan")
	}
}

// a valid change of the configuration file is applied in place, an invalid
// one leaves the old in force and shows in the status, what needs a restart is
// named.
func TestConfigReload(t *testing.T) {
	f := startFixture(t, "", map[string]string{"node.yaml": nodeManifest, "web.yaml": webManifest})
	f.awaitReady(t)
	if have := f.backend.text(); !strings.Contains(have, "node-port-address 10.9.9.9") {
		t.Fatalf("before the change:\n%s", have)
	}

	f.rewriteConfig(t, "nodePortAddresses: [192.0.2.0/24]\n")
	eventually(t, "the narrower node-port addresses", func() bool { return !strings.Contains(f.backend.text(), "node-port-address 10.9.9.9") })
	if have := f.backend.text(); !strings.Contains(have, "node-port-address 192.0.2.11") {
		t.Errorf("after the change:\n%s", have)
	}

	f.rewriteConfig(t, "nodePortAddresses: [192.0.2.0/33]\n")
	eventually(t, "the error in the status", func() bool { return strings.Contains(f.status(t).Config.Error, "192.0.2.0/33") })
	if have := f.backend.text(); !strings.Contains(have, "node-port-address 192.0.2.11") || strings.Contains(have, "node-port-address 10.9.9.9") {
		t.Errorf("an invalid file changed the plan:\n%s", have)
	}
	if !strings.Contains(f.log.String(), "reason=InvalidConfiguration") {
		t.Error("no event InvalidConfiguration")
	}

	f.rewriteConfig(t, "mode: nftables\nnodePortAddresses: [10.9.9.0/24]\nlogging: {verbosity: 4}\n")
	eventually(t, "the node-port addresses of the valid file", func() bool { return strings.Contains(f.backend.text(), "node-port-address 10.9.9.9") })
	eventually(t, "the error to go", func() bool { return f.status(t).Config.Error == "" })
	if have := f.status(t).Config.Restart; !slices.Contains(have, "mode") {
		t.Errorf("fields that need a restart: %v", have)
	}
	if _, body := get(f.metric + "/proxyMode"); body != "iptables" {
		t.Errorf("mode %s", body)
	}
}

// where manifests or an API server have Nodes, a name that none of them has
// must not make every endpoint remote.
func TestUnknownNode(t *testing.T) {
	birch := strings.ReplaceAll(nodeManifest, "alder", "birch")
	f := startFixture(t, "", map[string]string{"node.yaml": birch, "web.yaml": webManifest})
	eventually(t, "the reason in the status", func() bool { return strings.Contains(strings.Join(f.status(t).Loop.Waiting, " "), `"alder"`) })
	if code, body := get(f.healthz + "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "alder") {
		t.Errorf("/readyz %d: %s", code, body)
	}
	if f.backend.text() != "" {
		t.Error("something was programmed")
	}
	f.write(t, "services/alder.yaml", nodeManifest)
	f.awaitReady(t)
}

// Without any Node object manifests alone make a proxy.
func TestNoNodeAtAll(t *testing.T) {
	f := startFixture(t, "", map[string]string{"web.yaml": webManifest})
	f.awaitReady(t)
	if code, body := get(f.healthz + "/healthz"); code != http.StatusOK {
		t.Errorf("/healthz %d: %s", code, body)
	}
}

func TestHardFail(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dir := t.TempDir()
	flags := config.NewFlags()
	fs := pflag.NewFlagSet("svcproxy", pflag.ContinueOnError)
	fs.SetOutput(io.Discard)
	flags.Register(fs)
	if err := fs.Parse([]string{"--manifests=" + dir, "--metrics-port=0", "--bind-address-hard-fail", "--healthz-bind-address=" + l.Addr().String()}); err != nil {
		t.Fatal(err)
	}
	c, _, err := flags.Load(os.ReadFile)
	if err != nil {
		t.Fatal(err)
	}
	mode := fakeMode(&recordingBackend{})
	env := Env{Host: &host.Fake{}, Getenv: os.Getenv, Hostname: func() (string, error) { return "alder", nil }}
	p, err := newProxy(t.Context(), env, flags, chosen{config: c, mode: mode}, newLog(io.Discard, c.Log))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.run(t.Context(), nil); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("have %v, want an error about %s", err, l.Addr())
	}
}
