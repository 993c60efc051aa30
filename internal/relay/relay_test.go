package relay

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// mustStart returns a running relay, shut down at the end of the test.
func mustStart(t *testing.T, o Options) *Relay {
	t.Helper()
	r := New(o)
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = r.Shutdown(ctx)
	})
	return r
}

// forward routes every flow to s's cluster pool, with the node's address.
func forward(s *Service) Router {
	return func(Flow) (*Service, plan.Route) { return s, plan.Route{SNAT: true} }
}

// mustListen serves s on a free port of 127.0.0.1.
func mustListen(t *testing.T, r *Relay, p plan.Protocol, s *Service) *Listener {
	t.Helper()
	ln, err := r.Listen(ListenConfig{Protocol: p, Addr: netip.MustParseAddrPort("127.0.0.1:0"), Router: forward(s)})
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// servicePort is a TCP ServicePort with endpoints of weight 1.
func servicePort(eps ...netip.AddrPort) *plan.ServicePort {
	sp := &plan.ServicePort{ID: plan.ID{Namespace: "default", Name: "web", Protocol: plan.TCP, Family: plan.IPv4}}
	for _, ep := range eps {
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: ep, Weight: 1})
	}
	return sp
}

// mustServe accepts on a free port of 127.0.0.1 and has handle serve each connection.
func mustServe(t *testing.T, handle func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	ln, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			go handle(c)
		}
	}()
	return ln.Addr().(*net.TCPAddr).AddrPort()
}

func echo(c *net.TCPConn) {
	_, _ = io.Copy(c, c)
	c.Close()
}

func mustDial(t *testing.T, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

func TestBytesGoBothWays(t *testing.T) {
	r := mustStart(t, Options{})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, echo)))
	ln := mustListen(t, r, plan.TCP, s)
	for _, size := range []int{1, 64, bufferSize, bufferSize + 1, 8 << 20} {
		c := mustDial(t, ln.Addr())
		sent := make([]byte, size)
		for i := range sent {
			sent[i] = byte(i * 7 >> 3)
		}
		go func() {
			_, _ = c.Write(sent)
			_ = c.CloseWrite()
		}()
		got, err := io.ReadAll(c)
		if err != nil || string(got) != string(sent) {
			t.Errorf("%d bytes: %d came back, err %v", size, len(got), err)
		}
	}
	if f := s.Figures(); f.Total != 5 || f.FromClient != f.ToClient || f.FromClient < 8<<20 {
		t.Errorf("figures %+v", f)
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: raw sockets")
	}
}

func contextThatEnds(t *testing.T, after time.Duration) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithTimeout(context.Background(), after)
}

// Who connected before a listener was closed is served, also if nobody had accepted yet.
func TestCloseServesWhoWaits(t *testing.T) {
	r := mustStart(t, Options{})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, echo)))
	for range 300 {
		ln := mustListen(t, r, plan.TCP, s)
		c := mustDial(t, ln.Addr())
		ln.Close()
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
}
