package ipvs

import (
	"io"
	"math"
	"net"
	"net/netip"
	"testing"
	"time"
)

// Addresses of the virtual server whose shares are counted, of its real servers, all of
// lo, and a range of clients.
var (
	sharedVIP   = ap("10.9.9.9:80")
	sharedReals = [...]netip.AddrPort{ap("10.9.9.1:8080"), ap("10.9.9.2:8080"), ap("10.9.9.3:8080")}
	clients     = netip.MustParsePrefix("10.8.0.0/16")
)

// serveNumber answers every connection with a number and keeps it until the other side
// closes it.
func serveNumber(t *testing.T, at netip.AddrPort, number byte) {
	t.Helper()
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
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
			go func() {
				_, _ = c.Write([]byte{number}) // the client says what it misses
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}()
		}
	}()
}

// answeredBy connects from an address, port 0 for any, and returns who answered and the
// open connection.
func answeredBy(t *testing.T, from netip.AddrPort) (byte, *net.TCPConn) {
	t.Helper()
	d := net.Dialer{Timeout: time.Minute, LocalAddr: net.TCPAddrFromAddrPort(from)}
	c, err := d.Dial("tcp", sharedVIP.String())
	if err != nil {
		t.Fatal(err)
	}
	var number [1]byte
	if _, err := io.ReadFull(c, number[:]); err != nil {
		t.Fatalf("from %s: %v", from, err)
	}
	return number[0], c.(*net.TCPConn)
}

// inOrder is the n-th address of the clients.
func inOrder(n int) netip.Addr {
	a := clients.Addr().As4()
	a[2], a[3] = byte(n>>8), byte(n)
	return netip.AddrFrom4(a)
}

// Real servers of weights 1, 2 and 5 get their shares of connections, within 10 % of
// each, from every scheduler that knows weights; those that hash a client give it the
// same real server again.
func TestKernelShares(t *testing.T) {
	one := inOrder(1)
	byAddr := func(n int) netip.AddrPort { return netip.AddrPortFrom(inOrder(n), 0) }
	byPort := func(n int) netip.AddrPort { return netip.AddrPortFrom(one, uint16(10_000+n)) }
	anyPort := func(int) netip.AddrPort { return netip.AddrPortFrom(one, 0) }
	for _, c := range []struct {
		name      string
		scheduler string
		flags     Flags
		n         int
		from      func(n int) netip.AddrPort
		hold      bool // connections stay open
		sticky    bool
	}{
		{name: "wrr", scheduler: "wrr", n: 320, from: anyPort},
		{name: "wlc", scheduler: "wlc", n: 320, from: anyPort, hold: true},
		{name: "sh", scheduler: "sh", n: 512, from: byAddr, sticky: true},
		{name: "sh with ports", scheduler: "sh", flags: SHPort, n: 512, from: byPort},
		{name: "mh", scheduler: "mh", n: 2048, from: byAddr, sticky: true},
		{name: "mh with ports", scheduler: "mh", flags: MHPort, n: 2048, from: byPort},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := inKernel(t)
			runIP(t, "route", "add", "local", clients.String(), "dev", "lo")
			runIP(t, "addr", "add", sharedVIP.Addr().String()+"/32", "dev", "lo")
			v := VirtualServer{Key: ByAddr(TCP, sharedVIP), Scheduler: c.scheduler, Flags: c.flags, ClientBits: 32}
			if err := k.CreateServer(v); err != nil {
				t.Fatal(err)
			}
			weights := [...]uint32{1, 2, 5}
			for i, at := range sharedReals {
				runIP(t, "addr", "add", at.Addr().String()+"/32", "dev", "lo")
				serveNumber(t, at, byte(i))
				if err := k.CreateReal(v.Key, RealServer{Addr: at, Weight: weights[i]}); err != nil {
					t.Fatal(err)
				}
			}
			var counts [len(sharedReals)]int
			first := make([]byte, c.n)
			for n := range c.n {
				by, conn := answeredBy(t, c.from(n))
				counts[by]++
				first[n] = by
				if c.hold {
					t.Cleanup(func() { conn.Close() })
					continue
				}
				_ = conn.SetLinger(0) // no port waits for late segments
				_ = conn.Close()
			}
			t.Logf("%d connections: %v", c.n, counts)
			for i, have := range counts {
				want := float64(c.n) * float64(weights[i]) / 8
				if math.Abs(float64(have)-want) > 0.1*want {
					t.Errorf("%d of %d connections to the real server of weight %d, want %.0f", have, c.n, weights[i], want)
				}
			}
			for n := 0; c.sticky && n < c.n; n += c.n / 32 {
				by, conn := answeredBy(t, c.from(n))
				_ = conn.Close()
				if by != first[n] {
					t.Errorf("client %s: first real server %d, then %d", c.from(n).Addr(), first[n], by)
				}
			}
		})
	}
}
