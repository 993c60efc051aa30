package probe

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// TestCheck probes real servers.
func TestCheck(t *testing.T) {
	var last atomic.Pointer[http.Request]
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		last.Store(r)
		switch r.URL.Path {
		case "/ready":
			w.WriteHeader(http.StatusNoContent)
		case "/moved":
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
		case "/broken":
			w.WriteHeader(http.StatusServiceUnavailable)
		case "/endless":
			w.WriteHeader(http.StatusOK)
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 1<<16)); err != nil {
					return
				}
			}
		case "/silent":
			<-r.Context().Done()
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer s.Close()
	up := netip.MustParseAddrPort(s.Listener.Addr().String())
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	down := netip.MustParseAddrPort(closed.Addr().String())
	closed.Close()
	garbage := serveBytes(t, "SSH-2.0-x\r\n\r\n")

	for _, c := range []struct {
		at    netip.AddrPort
		check string
		want  string // "": passes
	}{
		{up, "tcp", ""},
		{down, "tcp", "connection refused"},
		{up, "http,path=/ready", ""},
		{up, "http,path=/ready?full=1", ""},
		{up, "http,path=/ready,code=204", ""},
		{up, "http,path=/ready,code=200", "gives status 204, want 200"},
		{up, "http,path=/moved", ""},
		{up, "http,path=/moved,code=302", ""},
		{up, "http,path=/broken", "gives status 503, want one from 200 to 399"},
		{up, "http,path=/broken,code=503", ""},
		{up, "http", "gives status 404"},
		{up, "http,path=/endless", ""},
		{up, "http,path=/silent,timeout=50ms", "no answer within 50ms"},
		{down, "http", "connection refused"},
		{garbage, "http", "malformed HTTP"},
		{garbage, "tcp", ""},
	} {
		h, err := plan.ParseHealthCheck(c.check)
		if err != nil {
			t.Fatal(err)
		}
		err = checker{(&net.Dialer{}).DialContext}.check(t.Context(), keyOf(c.at, h))
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.check, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", c.check, err, c.want)
		}
		if asked := last.Load(); h.Method == plan.CheckHTTP && c.at == up && asked.URL.RequestURI() != h.Path {
			t.Errorf("%s asked for %s", c.check, asked.URL.RequestURI())
		}
	}
	if asked := last.Load(); asked.Host != up.String() || asked.UserAgent() != "svcproxy-health-check" {
		t.Errorf("asked as host %q, agent %q", asked.Host, asked.UserAgent())
	}
}

// serveBytes answers every connection with s.
func serveBytes(t *testing.T, s string) netip.AddrPort {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := c.Write([]byte(s)); err != nil {
				t.Error(err)
			}
			c.Close()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String())
}
