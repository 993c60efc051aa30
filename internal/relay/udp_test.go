package relay

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// udpPort is a UDP ServicePort with endpoints of weight 1.
func udpPort(eps ...netip.AddrPort) *plan.ServicePort {
	sp := servicePort(eps...)
	sp.ID.Protocol = plan.UDP
	return sp
}

// mustServeUDP answers every datagram on 127.0.0.1 with the server's name and what came.
func mustServeUDP(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort(append([]byte(name), buf[:n]...), from)
		}
	}()
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func mustDialUDP(t *testing.T, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// mustAsk sends a datagram and returns the answer.
func mustAsk(t *testing.T, c *net.UDPConn, what string) string {
	t.Helper()
	if _, err := c.Write([]byte(what)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return string(buf[:n])
}

func TestDatagramsFindTheirClient(t *testing.T) {
	r := mustStart(t, Options{UDPTimeout: time.Minute})
	s := r.NewService("default/dns")
	s.Update(udpPort(mustServeUDP(t, "a "), mustServeUDP(t, "b ")))
	ln := mustListen(t, r, plan.UDP, s)
	seen := map[byte]bool{}
	for i := range 20 {
		c := mustDialUDP(t, ln.Addr())
		first := mustAsk(t, c, fmt.Sprint("one ", i))
		second := mustAsk(t, c, fmt.Sprint("two ", i))
		if first[0] != second[0] || first[1:] != fmt.Sprint(" one ", i) || second[1:] != fmt.Sprint(" two ", i) {
			t.Errorf("client %d got %q and %q", i, first, second)
		}
		seen[first[0]] = true
	}
	if len(seen) != 2 {
		t.Errorf("endpoints that answered: %v", seen)
	}
	if f := s.Figures(); f.Open != 20 || f.Total != 20 || f.FromClient == 0 || f.ToClient == 0 {
		t.Errorf("figures %+v", f)
	}
}

func TestFlowsMoveFromAnEndpointThatIsGone(t *testing.T) {
	r := mustStart(t, Options{UDPTimeout: time.Minute})
	s := r.NewService("default/dns")
	a, b := mustServeUDP(t, "a "), mustServeUDP(t, "b ")
	s.Update(udpPort(a))
	c := mustDialUDP(t, mustListen(t, r, plan.UDP, s).Addr())
	if got := mustAsk(t, c, "x"); got != "a x" {
		t.Fatalf("got %q", got)
	}
	serving := udpPort(b)
	serving.Serving = []netip.AddrPort{a, b}
	s.Update(serving)
	if got := mustAsk(t, c, "x"); got != "a x" {
		t.Errorf("while the endpoint serves: got %q", got)
	}
	s.Update(udpPort(b))
	if got := mustAsk(t, c, "x"); got != "b x" {
		t.Errorf("when it is gone: got %q", got)
	}
	if os.Geteuid() != 0 {
		return // ICMP errors need raw sockets
	}
	s.Update(&plan.ServicePort{})
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 10)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("without endpoints: %d bytes, err %v", n, err)
	}
}

func TestErrorsOfDatagramsArePassedBack(t *testing.T) {
	needsRoot(t)
	r := mustStart(t, Options{UDPTimeout: time.Minute})
	s := r.NewService("default/dns")
	gone := mustServeUDP(t, "")
	free, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(gone.Addr(), 0)))
	if err != nil {
		t.Fatal(err)
	}
	closed := free.LocalAddr().(*net.UDPAddr).AddrPort()
	free.Close()
	s.Update(udpPort(closed))
	c := mustDialUDP(t, mustListen(t, r, plan.UDP, s).Addr())
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 10)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%d bytes, err %v, want connection refused", n, err)
	}
}

func TestJoinedDatagramsKeepTheirSizes(t *testing.T) {
	r := mustStart(t, Options{UDPTimeout: time.Minute})
	s := r.NewService("default/dns")
	s.Update(udpPort(mustServeUDP(t, "")))
	c := mustDialUDP(t, mustListen(t, r, plan.UDP, s).Addr())
	sizes := []int{100, 100, 100, 40, 1400, 1400, 3, 0, 9000, 9000, 60000, 60000, 7}
	got := map[int]int{}
	for _, n := range sizes {
		if _, err := c.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, 1<<16)
	for range sizes {
		n, err := c.Read(buf)
		if err != nil {
			t.Fatalf("after %v: %v", got, err)
		}
		got[n]++
	}
	for _, n := range sizes {
		if got[n]--; got[n] < 0 {
			t.Errorf("a datagram of %d bytes is missing; %v", n, got)
		}
	}
}

func TestIdleFlowsEnd(t *testing.T) {
	r := mustStart(t, Options{UDPTimeout: 500 * time.Millisecond})
	s := r.NewService("default/dns")
	s.Update(udpPort(mustServeUDP(t, "")))
	c := mustDialUDP(t, mustListen(t, r, plan.UDP, s).Addr())
	mustAsk(t, c, "x")
	eventually(t, "the flow ends", func() bool { return s.Figures().Open == 0 && r.limit.used.Load() == 1 })
	mustAsk(t, c, "x")
	if f := s.Figures(); f.Total != 2 {
		t.Errorf("%d flows, want 2", f.Total)
	}
}

func TestTheLongestIdleFlowGivesWay(t *testing.T) {
	r := mustStart(t, Options{Loops: 1, UDPTimeout: time.Minute, MaxFlows: 3})
	s := r.NewService("default/dns")
	s.Update(udpPort(mustServeUDP(t, "")))
	ln := mustListen(t, r, plan.UDP, s)
	var clients []*net.UDPConn
	for range 3 {
		c := mustDialUDP(t, ln.Addr())
		clients = append(clients, c)
		mustAsk(t, c, "x")
	}
	mustAsk(t, clients[0], "x")
	mustAsk(t, mustDialUDP(t, ln.Addr()), "x") // in place of the second
	mustAsk(t, clients[0], "x")
	mustAsk(t, clients[2], "x")
	f := s.Figures()
	if f.Open != 3 || f.Total != 4 || f.Failures[GaveWay] != 1 {
		t.Errorf("open %d, total %d, gave way %d; want 3, 4 and 1", f.Open, f.Total, f.Failures[GaveWay])
	}
}
