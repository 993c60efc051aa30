package health

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// sockets is a host's set of listening sockets.
type sockets struct {
	mu   sync.Mutex // guards all below
	open map[string]*socket
	busy map[string]bool
}

// socket is a listener to which nobody connects.
type socket struct {
	s      *sockets
	name   string
	closed chan struct{}
}

func (s *sockets) listen(network, addr string) (net.Listener, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := network + " " + addr
	if s.busy[name] || s.open[name] != nil {
		return nil, errors.New("address already in use")
	}
	if s.open == nil {
		s.open = map[string]*socket{}
	}
	l := &socket{s: s, name: name, closed: make(chan struct{})}
	s.open[name] = l
	return l, nil
}

func (s *sockets) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for n := range s.open {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

func (s *sockets) setBusy(name string, busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy = map[string]bool{name: busy}
}

func (l *socket) Accept() (net.Conn, error) {
	<-l.closed
	return nil, net.ErrClosed
}

func (l *socket) Close() error {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.s.open[l.name] == l {
		delete(l.s.open, l.name)
		close(l.closed)
	}
	return nil
}

func (l *socket) Addr() net.Addr { return &net.TCPAddr{} }

func id(name string, f plan.Family) plan.HealthID {
	return plan.HealthID{Service: plan.Name{Namespace: "default", Name: name}, Family: f}
}

func node(v4 plan.NodePorts) *plan.Node {
	return &plan.Node{Name: "alder", NodePorts: map[plan.Family]plan.NodePorts{plan.IPv4: v4, plan.IPv6: {All: true}}}
}

// running is a Health whose ports are served on sockets.
func running(t *testing.T, s *sockets, f func(h *Health, notes *[]plan.Note)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var notes []plan.Note
		h := New(Config{Families: plan.Families[:], Listen: s.listen, Notes: func(n []plan.Note) {
			mu.Lock()
			defer mu.Unlock()
			notes = append(notes, n...)
		}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { h.Run(ctx); close(done) }()
		f(h, &notes)
		cancel()
		<-done
		synctest.Wait()
		if n := s.names(); len(n) != 0 {
			t.Errorf("left open: %q", n)
		}
	})
}

func TestPortsFollowTheServices(t *testing.T) {
	s := &sockets{}
	all := node(plan.NodePorts{All: true})
	running(t, s, func(h *Health, _ *[]plan.Note) {
		for _, step := range []struct {
			ports map[plan.HealthID]plan.HealthPort
			node  *plan.Node
			want  []string
		}{
			{map[plan.HealthID]plan.HealthPort{id("edge", plan.IPv4): {Port: 32100, Local: 1}}, all, []string{"tcp4 0.0.0.0:32100"}},
			{map[plan.HealthID]plan.HealthPort{id("edge", plan.IPv4): {Port: 32100}, id("edge", plan.IPv6): {Port: 32100}}, all,
				[]string{"tcp4 0.0.0.0:32100", "tcp6 [::]:32100"}},
			{map[plan.HealthID]plan.HealthPort{id("edge", plan.IPv4): {Port: 32101}}, all, []string{"tcp4 0.0.0.0:32101"}},
			// Only the selected addresses, again after they changed.
			{map[plan.HealthID]plan.HealthPort{id("edge", plan.IPv4): {Port: 32101}},
				node(plan.NodePorts{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.11")}}), []string{"tcp4 192.0.2.11:32101"}},
			{map[plan.HealthID]plan.HealthPort{id("edge", plan.IPv4): {Port: 32101}},
				node(plan.NodePorts{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("192.0.2.99")}, Loopback: true}),
				[]string{"tcp4 127.0.0.1:32101", "tcp4 192.0.2.11:32101", "tcp4 192.0.2.99:32101"}},
			{map[plan.HealthID]plan.HealthPort{id("edge", plan.IPv4): {Port: 32101}}, node(plan.NodePorts{}), nil},
			// A port that moves to another Service.
			{map[plan.HealthID]plan.HealthPort{id("a", plan.IPv4): {Port: 32101}}, all, []string{"tcp4 0.0.0.0:32101"}},
			{nil, all, nil},
		} {
			h.SetPorts(step.ports, step.node)
			synctest.Wait()
			if have := s.names(); !slices.Equal(have, step.want) {
				t.Errorf("open %q, want %q", have, step.want)
			}
		}
	})
}

// A port that is taken gets a note, once, holds up no other, and is opened when it
// is free. Of several addresses it is all or none.
func TestPortInUse(t *testing.T) {
	s := &sockets{}
	s.setBusy("tcp4 192.0.2.12:32100", true)
	n := node(plan.NodePorts{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("192.0.2.12")}})
	running(t, s, func(h *Health, notes *[]plan.Note) {
		h.SetPorts(map[plan.HealthID]plan.HealthPort{id("edge", plan.IPv4): {Port: 32100}, id("other", plan.IPv4): {Port: 32200}}, n)
		<-time.After(time.Minute)
		synctest.Wait()
		if have, want := s.names(), []string{"tcp4 192.0.2.11:32200", "tcp4 192.0.2.12:32200"}; !slices.Equal(have, want) {
			t.Errorf("open %q, want %q", have, want)
		}
		if len(*notes) != 1 || (*notes)[0].Reason != ReasonPortFailed || (*notes)[0].Name != "edge" {
			t.Errorf("notes %+v", *notes)
		}
		s.setBusy("", false)
		<-time.After(retryEvery)
		synctest.Wait()
		if have := s.names(); len(have) != 4 {
			t.Errorf("open %q, want all four", have)
		}
	})
}

func TestPortAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Config{Families: plan.Families[:]})
		edge := id("edge", plan.IPv4)
		answer := h.ports.handler(edge)
		set := func(local int) {
			h.SetPorts(map[plan.HealthID]plan.HealthPort{edge: {Port: 32100, Local: local}}, nil)
		}
		for _, method := range []string{"GET", "HEAD", "POST"} {
			set(2)
			w := get(answer, method, "/any/path")
			if w.Code != 200 {
				t.Errorf("%s answers %d", method, w.Code)
			}
			for name, want := range map[string]string{
				"Content-Type": "application/json", "X-Content-Type-Options": "nosniff", "X-Load-Balancing-Endpoint-Weight": "2",
			} {
				if have := w.Header().Get(name); have != want {
					t.Errorf("%s: %q, want %q", name, have, want)
				}
			}
		}
		const want = "{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"edge\"\n\t},\n\t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}"
		if have := get(answer, "GET", "/").Body.String(); have != want {
			t.Errorf("have %s, want %s", have, want)
		}
		set(0)
		if w := get(answer, "GET", "/"); w.Code != 503 {
			t.Errorf("answers %d without local endpoints", w.Code)
		}
		set(1)
		h.Updated(time.Now())
		h.Queued(time.Now())
		<-time.After(time.Minute)
		if w := get(answer, "GET", "/"); w.Code != 503 || w.Header().Get("X-Load-Balancing-Endpoint-Weight") != "1" {
			t.Errorf("answers %d while the proxy is unhealthy", w.Code)
		}
	})
}

// Over a real socket, and again after a restart on the same port.
func TestPortOverTheNetwork(t *testing.T) {
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(free.Addr().(*net.TCPAddr).Port)
	free.Close()
	n := node(plan.NodePorts{Loopback: true})
	h := New(Config{Families: plan.Families[:], Log: slog.New(slog.DiscardHandler)})
	go h.Run(t.Context())
	for local := range 3 {
		h.SetPorts(map[plan.HealthID]plan.HealthPort{id("edge", plan.IPv4): {Port: port, Local: local}}, n)
		want := http.StatusOK
		if local == 0 {
			want = http.StatusServiceUnavailable
		}
		eventually(t, fmt.Sprintf("%d for %d endpoints", want, local), func() (bool, string) {
			resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/", port))
			if err != nil {
				return false, err.Error()
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			return resp.StatusCode == want && resp.Header.Get("X-Load-Balancing-Endpoint-Weight") == fmt.Sprint(local), string(b)
		})
	}
}

// eventually waits until f is true, and fails with what it said last.
func eventually(t *testing.T, what string, f func() (bool, string)) {
	t.Helper()
	last := ""
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); <-time.After(5 * time.Millisecond) {
		var ok bool
		if ok, last = f(); ok {
			return
		}
	}
	t.Fatalf("%s did not come: %s", what, last)
}

func TestServerRetriesAndEnds(t *testing.T) {
	s := &sockets{}
	synctest.Test(t, func(t *testing.T) {
		s.setBusy("tcp 0.0.0.0:10256", true)
		ctx, cancel := context.WithCancel(t.Context())
		failures := 0
		var log bytes.Buffer
		done := make(chan error)
		go func() {
			done <- Server{
				Name: "health", Addr: "0.0.0.0:10256", Handler: http.NotFoundHandler(), Listen: s.listen,
				Failed: func(error) { failures++ }, Log: slog.New(slog.NewTextHandler(&log, nil)),
			}.Run(ctx)
		}()
		<-time.After(time.Minute)
		synctest.Wait()
		if log.Len() > 0 {
			t.Errorf("what was told is logged too:\n%s", &log)
		}
		if failures != 1 || len(s.names()) != 0 {
			t.Errorf("%d failures told, open %q", failures, s.names())
		}
		s.setBusy("", false)
		<-time.After(retryEvery)
		synctest.Wait()
		if have := s.names(); !slices.Equal(have, []string{"tcp 0.0.0.0:10256"}) {
			t.Errorf("open %q", have)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if len(s.names()) != 0 {
			t.Error("still open")
		}
	})
}

func TestServerHardFail(t *testing.T) {
	s := &sockets{}
	s.setBusy("tcp 0.0.0.0:10256", true)
	err := Server{Name: "health", Addr: "0.0.0.0:10256", HardFail: true, Listen: s.listen}.Run(t.Context())
	if err == nil {
		t.Error("no error")
	}
}

func TestServerWithoutAddress(t *testing.T) {
	if err := (Server{Name: "health", Listen: (&sockets{}).listen}).Run(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestServerOverTheNetwork(t *testing.T) {
	started := make(chan string, 1)
	listen := func(network, addr string) (net.Listener, error) {
		l, err := net.Listen(network, addr)
		if err == nil {
			started <- l.Addr().String()
		}
		return l, err
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- Server{Name: "metrics", Addr: "127.0.0.1:0", Handler: Diagnostics{Mode: "iptables"}.Handler(), Listen: listen}.Run(ctx)
	}()
	resp, err := http.Get("http://" + <-started + "/proxyMode")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); string(b) != "iptables" || err != nil {
		t.Errorf("have %q, %v", b, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestDiagnostics(t *testing.T) {
	verbosity := "2"
	d := Diagnostics{
		Program: "svcproxy", Version: "v1.2.3", Mode: "iptables", Started: time.Now(),
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { text(w, "figures") }),
		Config:  func() (any, error) { return map[string]string{"mode": "iptables"}, nil },
		Status:  func() any { return map[string]bool{"synced": true} },
		Flags:   func() map[string]string { return map[string]string{"v": "2", "config": ""} },
		SetVerbosity: func(v string) error {
			if v == "x" {
				return errors.New("not a number")
			}
			verbosity = v
			return nil
		},
		Profiling: true,
	}
	h := d.Handler()
	for _, c := range []struct{ method, path, want string }{
		{"GET", "/proxyMode", "iptables"},
		{"GET", "/healthz", "ok"},
		{"GET", "/healthz/ping", "ok"},
		{"GET", "/healthz?verbose", "[+]ping ok\nhealthz check passed\n"},
		{"GET", "/metrics", "figures"},
		{"DELETE", "/metrics/slis", "metrics reset\n"},
		{"GET", "/metrics/slis", ""},
		{"GET", "/configz", `{"kubeproxy.config.k8s.io":{"mode":"iptables"}}`},
		{"GET", "/status", "{\n  \"synced\": true\n}\n"},
		{"GET", "/flagz", "\nsvcproxy flagz\n" + forPeople + "\nconfig=\nv=2\n"},
	} {
		if w := get(h, c.method, c.path); w.Code != 200 || w.Body.String() != c.want {
			t.Errorf("%s %s answers %d %q, want %q", c.method, c.path, w.Code, w.Body, c.want)
		}
	}
	get(h, "GET", "/healthz")
	for range 2 {
		w := get(h, "GET", "/metrics/slis")
		for _, want := range []string{
			`kubernetes_healthcheck{name="ping",type="healthz"} 1`,
			`kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 1`,
		} {
			if !strings.Contains(w.Body.String(), want+"\n") {
				t.Errorf("/metrics/slis lacks %s:\n%s", want, w.Body)
			}
		}
	}
	if w := get(h, "GET", "/proxyMode"); w.Header().Get("Content-Type") != "text/plain; charset=utf-8" || w.Header().Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("headers of /proxyMode: %v", w.Header())
	}
	for body, want := range map[string]int{"4\n": 200, "x": 400} {
		w := put(h, "/debug/flags/v", body)
		if w.Code != want {
			t.Errorf("verbosity %q: %d %s", body, w.Code, w.Body)
		}
	}
	if verbosity != "4" {
		t.Errorf("verbosity is %q", verbosity)
	}
	if w := get(h, "GET", "/debug/pprof/goroutine?debug=1"); w.Code != 200 {
		t.Errorf("pprof answers %d", w.Code)
	}
	d.Profiling, d.Config, d.Status, d.Flags, d.Metrics = false, nil, nil, nil, nil
	for _, path := range []string{"/debug/pprof/", "/debug/flags/v", "/configz", "/status", "/flagz", "/metrics", "/metrics/slis"} {
		if w := get(d.Handler(), "GET", path); w.Code != 404 {
			t.Errorf("%s answers %d", path, w.Code)
		}
	}
}

func put(h http.Handler, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPut, path, strings.NewReader(body)))
	return w
}
