package kube

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
)

// sink records what a source delivers, as one line per object.
type sink struct {
	mu       sync.Mutex
	changed  chan struct{} // closed and replaced with every call
	services map[string]string
	slices   map[string]string
	node     *cluster.Node
	nodes    int // calls of SetNode
	cidrs    []netip.Prefix
	synced   map[cluster.Kind]int
	seen     map[cluster.Kind]int
	deleted  []string
	early    int // objects there at the first Synced(Services)
}

func newSink() *sink {
	return &sink{
		changed: make(chan struct{}), services: map[string]string{}, slices: map[string]string{},
		synced: map[cluster.Kind]int{}, seen: map[cluster.Kind]int{},
	}
}

func (s *sink) do(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *sink) SetService(o *cluster.Service) {
	s.do(func() { s.services[o.Name.String()] = fmt.Sprint(o.ClusterIPs) })
}
func (s *sink) DeleteService(n cluster.Name) {
	s.do(func() {
		delete(s.services, n.String())
		s.deleted = append(s.deleted, n.String())
	})
}
func (s *sink) SetSlice(o *cluster.Slice) {
	s.do(func() {
		var addrs []string
		for _, e := range o.Endpoints {
			addrs = append(addrs, e.Addr.String())
		}
		s.slices[o.Name.String()] = o.Service + " " + strings.Join(addrs, ",")
	})
}
func (s *sink) DeleteSlice(n cluster.Name)       { s.do(func() { delete(s.slices, n.String()) }) }
func (s *sink) SetNode(n *cluster.Node)          { s.do(func() { s.node = n; s.nodes++ }) }
func (s *sink) SetServiceCIDRs(p []netip.Prefix) { s.do(func() { s.cidrs = slices.Clone(p) }) }
func (s *sink) Seen(k cluster.Kind)              { s.do(func() { s.seen[k]++ }) }
func (s *sink) Synced(k cluster.Kind) {
	s.do(func() {
		if k == cluster.Services && s.synced[k] == 0 {
			s.early = len(s.services)
		}
		s.synced[k]++
	})
}

// mustReach waits until ok holds, under the sink's lock.
func (s *sink) mustReach(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		s.mu.Lock()
		done, changed := ok(), s.changed
		s.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			s.mu.Lock()
			defer s.mu.Unlock()
			t.Fatalf("not reached: %s; services %v, slices %v, node %v, CIDRs %v, synced %v", what, s.services, s.slices, s.node, s.cidrs, s.synced)
		}
	}
}

// mustHold waits until the Services are exactly these, by name.
func (s *sink) mustHold(t *testing.T, names ...string) {
	t.Helper()
	slices.Sort(names)
	s.mustReach(t, "services "+strings.Join(names, " "), func() bool {
		return slices.Equal(slices.Sorted(maps.Keys(s.services)), names)
	})
}

func (s *sink) mustSync(t *testing.T) {
	t.Helper()
	s.mustReach(t, "everything synced", func() bool { return len(s.synced) == 4 })
}

// world is a server, a source that follows it, and where its facts end up.
type world struct {
	t      *testing.T
	server *apiserver.Server
	addr   string
	tls    *tls.Config // nil: plain HTTP
	client *Client
	sink   *sink
	log    *logLines
}

type variant struct {
	contentType string
	noWatchList bool
	http2       bool // over TLS, all requests on one connection
}

// variants are the ways in which facts can come; all must end the same.
func variants(t *testing.T, f func(t *testing.T, v variant)) {
	for _, v := range []variant{
		{contentType: runtime.ContentTypeProtobuf}, {contentType: runtime.ContentTypeProtobuf, noWatchList: true},
		{contentType: runtime.ContentTypeJSON}, {contentType: runtime.ContentTypeJSON, noWatchList: true},
		{contentType: runtime.ContentTypeProtobuf, http2: true},
	} {
		name := strings.TrimPrefix(strings.TrimPrefix(v.contentType, "application/"), "vnd.kubernetes.")
		if v.noWatchList {
			name += ",lists"
		}
		if v.http2 {
			name += ",http2"
		}
		t.Run(name, func(t *testing.T) { f(t, v) })
	}
}

func newWorld(t *testing.T, so apiserver.Options, v variant) *world {
	t.Helper()
	so.NoWatchList = v.noWatchList
	w := &world{t: t, server: apiserver.New(so), sink: newSink(), log: &logLines{}, addr: "127.0.0.1:0"}
	if v.http2 {
		w.tls = mustCertificate(t)
	}
	w.restart()
	t.Cleanup(func() { _ = w.server.Stop() })
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := apiserver.WriteKubeconfig(path, w.addr); err != nil {
		t.Fatal(err)
	}
	if v.http2 {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		insecure := strings.Replace(string(text), "server: http:", "insecure-skip-tls-verify: true\n    server: https:", 1)
		if err := os.WriteFile(path, []byte(insecure), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	w.client, err = NewClient(Connection{Kubeconfig: path, ContentType: v.contentType, QPS: -1, UserAgent: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// mustCertificate returns a server's TLS configuration that offers HTTP/2.
func mustCertificate(t *testing.T) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		NextProtos:   []string{"h2"}, MinVersion: tls.VersionTLS13,
	}
}

// options are those of a source that does not make tests wait.
func (w *world) options() Options {
	return Options{Node: "n1", RetryMin: time.Millisecond, RetryMax: 20 * time.Millisecond, Log: slog.New(slog.NewTextHandler(w.log, nil))}
}

// run follows the server until the test ends, and checks that Run ends then.
func (w *world) run(o Options) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- NewSource(w.client, o).Run(ctx, w.sink) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
}

// restart serves again at the same address.
func (w *world) restart() {
	w.t.Helper()
	l, err := net.Listen("tcp", w.addr)
	if err != nil {
		w.t.Fatal(err)
	}
	w.addr = l.Addr().String()
	if w.tls != nil {
		l = tls.NewListener(l, w.tls)
	}
	w.server.Start(l)
}

func (w *world) stop() {
	w.t.Helper()
	if err := w.server.Stop(); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) put(objs ...apiserver.Object) {
	w.t.Helper()
	for _, o := range objs {
		if err := w.server.Put(o); err != nil {
			w.t.Fatal(err)
		}
	}
}

// requests returns the requests for a kind that were watches (or lists).
func (w *world) requests(kind, verb string) []apiserver.Request {
	var out []apiserver.Request
	for _, r := range w.server.Requests() {
		if r.Kind == kind && r.Verb == verb {
			out = append(out, r)
		}
	}
	return out
}

// mustWatch waits until every kind is watched.
func (w *world) mustWatch() {
	w.t.Helper()
	mustBecome(w.t, "all watches are open", func() bool {
		live := 0
		for _, x := range w.server.Watches() {
			if x.Live {
				live++
			}
		}
		return live == 4
	})
}

// logLines collects what is logged.
type logLines struct {
	mu    sync.Mutex
	lines []string
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, string(p))
	return len(p), nil
}

// count returns the number of lines that contain all parts.
func (l *logLines) count(parts ...string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, line := range l.lines {
		if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
			n++
		}
	}
	return n
}

func service(name, ip string, labels ...string) *corev1.Service {
	o := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: ip, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	for i := 0; i < len(labels); i += 2 {
		metav1.SetMetaDataLabel(&o.ObjectMeta, labels[i], labels[i+1])
	}
	return o
}

func slice(name, svc string, addrs ...string) *discoveryv1.EndpointSlice {
	port := int32(8080)
	o := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "d", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: svc}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port}},
	}
	for _, a := range addrs {
		o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return o
}

func node(name, addr string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr}}},
	}
}

func cidr(name string, prefixes ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: prefixes}}
}
