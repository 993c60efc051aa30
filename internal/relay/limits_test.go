package relay

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
)

func mustAddrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func TestNewConnectionsAreRefusedWhenNothingIsIdle(t *testing.T) {
	r := mustStart(t, Options{Loops: 1, Descriptors: 8, IdleAfter: -1})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, echo)))
	ln := mustListen(t, r, plan.TCP, s)
	var open []*net.TCPConn
	for range 4 {
		c := mustDial(t, ln.Addr())
		mustExchange(t, c, "x")
		open = append(open, c)
	}
	if err := exchange(ln.Addr().String()); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("one too many: %v", err)
	}
	for _, c := range open {
		mustExchange(t, c, "still there")
	}
	if f := s.Figures(); f.Failures[NoDescriptors] != 1 || f.Open != 4 {
		t.Errorf("figures %+v", f)
	}
	open[0].Close()
	eventually(t, "there is room again", func() bool { return exchange(ln.Addr().String()) == nil })
}

func TestTheServiceWithMostConnectionsGivesWay(t *testing.T) {
	r := mustStart(t, Options{Loops: 1, Descriptors: 12, IdleAfter: time.Nanosecond})
	greedy, modest := r.NewService("default/greedy"), r.NewService("default/modest")
	to := servicePort(mustServe(t, echo))
	greedy.Update(to)
	modest.Update(to)
	many, few := mustListen(t, r, plan.TCP, greedy), mustListen(t, r, plan.TCP, modest)
	old := mustDial(t, few.Addr())
	mustExchange(t, old, "x")
	for range 20 { // more than there is room for
		mustExchange(t, mustDial(t, many.Addr()), "x")
	}
	for range 2 {
		mustExchange(t, mustDial(t, few.Addr()), "x")
	}
	mustExchange(t, old, "the oldest of all, of the Service that has few")
	if f := greedy.Figures(); f.Failures[GaveWay] != 17 || f.Open != 3 {
		t.Errorf("greedy: %+v", f)
	}
	if f := modest.Figures(); f.Failures != [reasons]uint64{} || f.Open != 3 {
		t.Errorf("modest: %+v", f)
	}
}

// However many connections a Service gets, and however fast, there is room for others
// at once: whether they are idle or bring a byte now and then.
func TestOneServiceLeavesRoomForOthers(t *testing.T) {
	for _, p := range []plan.Protocol{plan.TCP, plan.UDP} {
		r := mustStart(t, Options{Descriptors: 192, UDPTimeout: time.Minute})
		var held []net.Conn
		greedy, second, modest := r.NewService("default/greedy"), r.NewService("default/second"), r.NewService("default/modest")
		to := servicePort(mustServe(t, echo))
		attacked := to
		if p == plan.UDP {
			attacked = udpPort(mustServeUDP(t, ""))
		}
		greedy.Update(attacked)
		second.Update(attacked)
		modest.Update(to)
		few := mustListen(t, r, plan.TCP, modest)
		for _, s := range []*Service{greedy, second} {
			many := mustListen(t, r, p, s)
			for range 600 { // and much of what the last one has left is left again
				c, err := net.Dial(strings.ToLower(p.String()), many.Addr().String())
				if err != nil {
					continue // refused
				}
				t.Cleanup(func() { c.Close() })
				_, _ = c.Write([]byte("x"))
				held = append(held, c)
			}
			eventually(t, "all were taken or refused", func() bool {
				f := s.Figures()
				return f.Total+f.Failures[NoDescriptors] >= 600
			})
		}
		for range 4 { // nine of the descriptors are left
			for _, c := range held {
				_, _ = c.Write([]byte("x"))
			}
			mustExchange(t, mustDial(t, few.Addr()), p.String())
		}
		if f := modest.Figures(); f.Failures != [reasons]uint64{} {
			t.Errorf("%s: modest: %+v", p, f)
		}
	}
}

// TestDescriptorLimit runs a relay in a process that may have 256 descriptors, under
// attack on one Service: nothing happens to the other.
func TestDescriptorLimit(t *testing.T) {
	const variable = "RELAY_TEST_LIMITED"
	if at := os.Getenv(variable); at != "" {
		limitedRelay(at)
		return
	}
	endpoint := mustServe(t, echo)
	cmd := exec.Command(os.Args[0], "-test.run=^TestDescriptorLimit$")
	cmd.Env = append(os.Environ(), variable+"="+endpoint.String())
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close() // it ends then
		rest, _ := io.ReadAll(out)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the relay: %v\n%s", err, rest)
		}
	}()
	line := make([]byte, 64)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	at := strings.Fields(string(line[:n]))

	var storm sync.WaitGroup
	for range 4 {
		storm.Go(func() {
			var held []net.Conn
			for i := range 200 {
				c, err := net.Dial("tcp4", at[0])
				if err != nil {
					continue // refused
				}
				switch i % 3 {
				case 0: // a reset at once
					_ = c.(*net.TCPConn).SetLinger(0)
					c.Close()
				case 1: // a byte, and nothing more
					_, _ = c.Write([]byte("x"))
					held = append(held, c)
				case 2: // half open
					_ = c.(*net.TCPConn).CloseWrite()
					held = append(held, c)
				}
			}
			for _, c := range held {
				c.Close()
			}
		})
	}
	for range 100 {
		eventually(t, "the other Service answers", func() bool { return exchange(at[1]) == nil })
	}
	storm.Wait()
	eventually(t, "the attacked Service answers again", func() bool { return exchange(at[0]) == nil })
}

// Two relays of one process together take no more than one alone.
func TestQuarters(t *testing.T) {
	limit := func(quarters int) int64 {
		b, err := newBudget(0, quarters)
		if err != nil {
			t.Fatal(err)
		}
		return b.limit
	}
	one, three, all := limit(1), limit(3), limit(4)
	if one <= 0 || three <= one || one+three > all {
		t.Errorf("%d and %d of %d", one, three, all)
	}
	if b, err := newBudget(100, 1); err != nil || b.limit != 100 {
		t.Errorf("a limit of one's own is %d: %v", b.limit, err)
	}
}

// limitedRelay serves two Services until its input ends.
func limitedRelay(endpoint string) {
	limit := unix.Rlimit{Cur: 256, Max: 256}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		panic(err)
	}
	r := New(Options{IdleAfter: 20 * time.Millisecond})
	if err := r.Start(); err != nil {
		panic(err)
	}
	var addrs []string
	for range 2 {
		s := r.NewService("limited")
		s.Update(servicePort(mustAddrPort(endpoint)))
		ln, err := r.Listen(ListenConfig{Protocol: plan.TCP, Addr: mustAddrPort("127.0.0.1:0"), Router: forward(s)})
		if err != nil {
			panic(err)
		}
		addrs = append(addrs, ln.Addr().String())
	}
	os.Stdout.WriteString(strings.Join(addrs, " ") + "\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// TestNothingIsLeftBehind counts descriptors and goroutines around everything that a
// connection can go through.
func TestNothingIsLeftBehind(t *testing.T) {
	endpoint := mustServe(t, func(c *net.TCPConn) {
		defer c.Close()
		_, _ = io.Copy(c, io.LimitReader(c, 1<<20))
	})
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	beforeFDs, beforeRoutines := descriptors(), runtime.NumGoroutine()
	r := New(Options{UDPTimeout: time.Minute})
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	s := r.NewService("default/web")
	s.Update(servicePort(endpoint, closedPort(t)))
	ln := mustListen(t, r, plan.TCP, s)
	var clients sync.WaitGroup
	for i := range 60 {
		clients.Go(func() {
			c, err := net.Dial("tcp4", ln.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			switch i % 3 {
			case 0:
				_ = c.(*net.TCPConn).SetLinger(0)
			case 1:
				_, _ = c.Write(make([]byte, 4<<20)) // more than is taken
			case 2:
				_, _ = c.Write([]byte("x"))
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.ReadAll(c)
			}
		})
	}
	clients.Wait()
	eventually(t, "all connections have ended", func() bool { return r.open.Load() == 0 })
	if err := r.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if n := r.limit.used.Load(); n != 0 {
		t.Errorf("%d descriptors are still counted", n)
	}
	eventually(t, "all descriptors and goroutines are given back", func() bool {
		return descriptors() <= beforeFDs && runtime.NumGoroutine() <= beforeRoutines
	})
}
