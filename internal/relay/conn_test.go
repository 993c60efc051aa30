package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/proxyproto"
)

// closedPort returns an address of 127.0.0.1 that refuses.
func closedPort(t *testing.T) netip.AddrPort {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).AddrPort()
}

// silentPort returns an address of 127.0.0.1 that does not answer a connect: its
// queue is full.
func silentPort(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(sa.(*unix.SockaddrInet4).Port))
	for range 10 {
		c, err := net.DialTimeout("tcp4", at.String(), 100*time.Millisecond)
		if err != nil {
			return at
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the queue of a listener does not fill up")
	return at
}

func mustExchange(t *testing.T, c net.Conn, what string) {
	t.Helper()
	if _, err := c.Write([]byte(what)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(what))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != what {
		t.Fatalf("sent %q, got %q, err %v", what, got, err)
	}
}

func TestHalfCloseIsPassedOn(t *testing.T) {
	r := mustStart(t, Options{})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, func(c *net.TCPConn) { // answers when all was said
		all, _ := io.ReadAll(c)
		_, _ = c.Write([]byte("got " + string(all)))
		_ = c.CloseWrite()
		_, _ = c.Read(make([]byte, 1))
		c.Close()
	})))
	c := mustDial(t, mustListen(t, r, plan.TCP, s).Addr())
	_, _ = c.Write([]byte("hello"))
	_ = c.CloseWrite()
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "got hello" {
		t.Errorf("got %q, err %v", got, err)
	}
	eventually(t, "the connection is closed", func() bool { return s.Figures().Open == 0 })
}

func TestAHalfCloseOfTheEndpointLeavesTheOtherHalf(t *testing.T) {
	r := mustStart(t, Options{})
	s := r.NewService("default/web")
	got := make(chan string, 1)
	s.Update(servicePort(mustServe(t, func(c *net.TCPConn) {
		_ = c.CloseWrite()
		all, _ := io.ReadAll(c)
		got <- string(all)
		c.Close()
	})))
	c := mustDial(t, mustListen(t, r, plan.TCP, s).Addr())
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("read %d, err %v; want the end", n, err)
	}
	_, _ = c.Write([]byte("still here"))
	_ = c.CloseWrite()
	if all := <-got; all != "still here" {
		t.Errorf("the endpoint got %q", all)
	}
}

func TestResetsArePassedOn(t *testing.T) {
	r := mustStart(t, Options{})
	s := r.NewService("default/web")
	ended := make(chan error, 1)
	s.Update(servicePort(mustServe(t, func(c *net.TCPConn) {
		defer c.Close()
		_, _ = c.Write([]byte("x"))
		one := make([]byte, 1)
		if _, err := c.Read(one); err == nil && one[0] == 'r' {
			_ = c.SetLinger(0)
			return
		}
		_, err := c.Read(one)
		ended <- err
	})))
	ln := mustListen(t, r, plan.TCP, s)
	c := mustDial(t, ln.Addr())
	_, _ = c.Read(make([]byte, 1))
	_, _ = c.Write([]byte("r"))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the endpoint resets: the client sees %v", err)
	}
	c = mustDial(t, ln.Addr())
	_, _ = c.Read(make([]byte, 1))
	_, _ = c.Write([]byte("c"))
	_ = c.SetLinger(0)
	c.Close()
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client resets: the endpoint sees %v", err)
	}
	eventually(t, "all is given back", func() bool { return s.Figures().Open == 0 && r.open.Load() == 0 })
}

func TestWhatAClientSaysWhileEndpointsAreTriedIsNotLost(t *testing.T) {
	r := mustStart(t, Options{ConnectTimeouts: []time.Duration{500 * time.Millisecond, 500 * time.Millisecond, 10 * time.Second}})
	s := r.NewService("default/web")
	sp := servicePort(closedPort(t), silentPort(t), mustServe(t, echo))
	s.Update(sp)
	ln := mustListen(t, r, plan.TCP, s)
	for range 4 {
		c := mustDial(t, ln.Addr())
		mustExchange(t, c, "early")
		c.Close()
	}
	f := s.Figures()
	if f.Total != 4 || f.Retries == 0 || f.Failures != [reasons]uint64{} {
		t.Errorf("figures %+v", f)
	}
}

func TestAffinityMovesToTheEndpointThatAnswers(t *testing.T) {
	r := mustStart(t, Options{})
	s := r.NewService("default/legacy")
	sp := servicePort(closedPort(t), mustServe(t, echo))
	sp.Affinity = time.Hour
	s.Update(sp)
	ln := mustListen(t, r, plan.TCP, s)
	for range 20 {
		c := mustDial(t, ln.Addr())
		mustExchange(t, c, "x")
		c.Close()
	}
	if f := s.Figures(); f.Total != 20 || f.Retries > 1 {
		t.Errorf("%d connections and %d retries; want 20, and at most one retry", f.Total, f.Retries)
	}
}

func TestRefusals(t *testing.T) {
	closed := closedPort(t)
	for name, c := range map[string]struct {
		sp     *plan.ServicePort
		route  plan.Route
		reason Reason
	}{
		"no endpoints":       {servicePort(), plan.Route{SNAT: true}, NoEndpoint},
		"reject":             {servicePort(closed), plan.Route{Verdict: plan.Reject}, NoEndpoint},
		"endpoint refuses":   {servicePort(closed), plan.Route{SNAT: true}, ConnectRefused},
		"endpoint is silent": {servicePort(silentPort(t)), plan.Route{SNAT: true}, ConnectTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			r := mustStart(t, Options{ConnectTimeouts: []time.Duration{20 * time.Millisecond, 20 * time.Millisecond}})
			s := r.NewService(name)
			s.Update(c.sp)
			ln := mustListen(t, r, plan.TCP, s)
			ln.SetRouter(func(Flow) (*Service, plan.Route) { return s, c.route })
			conn, err := net.Dial("tcp4", ln.Addr().String())
			if err == nil {
				defer conn.Close()
				_, err = conn.Read(make([]byte, 1))
			}
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the client sees %v", err)
			}
			if f := s.Figures(); f.Failures[c.reason] != 1 || f.Open != 0 {
				t.Errorf("%s: figures %+v", c.reason, f)
			}
			eventually(t, "all is given back", func() bool { return r.limit.used.Load() == 1 })
		})
	}
}

func TestASlowReaderHoldsBackOnlyItself(t *testing.T) {
	r := mustStart(t, Options{Loops: 1})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, func(c *net.TCPConn) {
		defer c.Close()
		one := make([]byte, 1)
		if _, err := c.Read(one); err == nil && one[0] == 'e' {
			_, _ = c.Write(one)
			return
		}
		for data := make([]byte, 1<<20); ; { // until the relay takes no more, and beyond
			if _, err := c.Write(data); err != nil {
				return
			}
		}
	})))
	ln := mustListen(t, r, plan.TCP, s)
	for range 4 {
		slow := mustDial(t, ln.Addr())
		_, _ = slow.Write([]byte("s"))
	}
	last := uint64(0)
	eventually(t, "the streams stand still", func() bool {
		now := s.Figures().ToClient
		still := now == last && now > 0
		last = now
		time.Sleep(5 * time.Millisecond)
		return still
	})
	for range 50 {
		mustExchange(t, mustDial(t, ln.Addr()), "e")
	}
}

func TestFlowsToARemovedEndpointEndAtTheirTime(t *testing.T) {
	for name, draining := range map[string]bool{"vanished": false, "draining": true} {
		t.Run(name, func(t *testing.T) {
			r := mustStart(t, Options{})
			s := r.NewService("default/web")
			a := mustServe(t, echo)
			s.Update(servicePort(a))
			c := mustDial(t, mustListen(t, r, plan.TCP, s).Addr())
			mustExchange(t, c, "before")
			s.Update(servicePort())
			mustExchange(t, c, "goes on without a time limit")
			s.Update(servicePort(a))
			gone := servicePort()
			gone.Policy = &plan.Policy{VanishedTimeout: 30 * time.Millisecond}
			if draining {
				gone.Policy = &plan.Policy{DrainTimeout: 30 * time.Millisecond}
				gone.Draining = []netip.AddrPort{a}
			}
			s.Update(gone)
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the client sees %v", err)
			}
			if f := s.Figures(); f.Failures[EndpointGone] != 1 {
				t.Errorf("figures %+v", f)
			}
		})
	}
}

func TestShutdownWaitsForConnections(t *testing.T) {
	r := mustStart(t, Options{})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, echo)))
	ln := mustListen(t, r, plan.TCP, s)
	c := mustDial(t, ln.Addr())
	mustExchange(t, c, "x")
	done := make(chan error, 1)
	go func() { done <- r.Shutdown(context.Background()) }()
	eventually(t, "new connections are refused", func() bool {
		extra, err := net.Dial("tcp4", ln.Addr().String())
		if err == nil {
			extra.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	mustExchange(t, c, "still served")
	_ = c.CloseWrite()
	_, _ = io.ReadAll(c)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := r.Listen(ListenConfig{Protocol: plan.TCP, Router: forward(s)}); !errors.Is(err, ErrStopped) {
		t.Errorf("listening after the end: %v", err)
	}
}

func TestProxyProtocolComesFirst(t *testing.T) {
	for _, version := range []uint8{1, 2} {
		r := mustStart(t, Options{})
		s := r.NewService("default/web")
		sp := servicePort(mustServe(t, echo))
		sp.Policy = &plan.Policy{ProxyProtocol: version}
		s.Update(sp)
		ln := mustListen(t, r, plan.TCP, s)
		c := mustDial(t, ln.Addr())
		_, _ = c.Write([]byte("payload"))
		_ = c.CloseWrite()
		all, err := io.ReadAll(c)
		if err != nil {
			t.Fatal(err)
		}
		h, rest, err := proxyproto.Parse(all)
		if err != nil {
			t.Fatalf("version %d: %q: %v", version, all, err)
		}
		if h.Version != version || h.Client.String() != c.LocalAddr().String() || h.Local != ln.Addr() || string(rest) != "payload" {
			t.Errorf("version %d: header %+v, rest %q", version, h, rest)
		}
	}
}

func TestTheAddressCanBeListenedOnAgainAtOnce(t *testing.T) {
	r := mustStart(t, Options{})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, echo)))
	for _, p := range []plan.Protocol{plan.TCP, plan.UDP} {
		ln := mustListen(t, r, p, s)
		c := ListenConfig{Protocol: p, Addr: ln.Addr(), Router: forward(s)}
		if _, err := r.Listen(c); !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), ln.Addr().String()) {
			t.Errorf("%s: a second listener: %v", p, err)
		}
		var open *net.TCPConn
		if p == plan.TCP {
			open = mustDial(t, ln.Addr())
			mustExchange(t, open, "x")
		}
		ln.Close()
		ln, err := r.Listen(c)
		if err != nil {
			t.Fatalf("%s: %v", p, err)
		}
		if open != nil {
			mustExchange(t, open, "goes on")
		}
		ln.Close()
	}
}
