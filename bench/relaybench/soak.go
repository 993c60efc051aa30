package relaybench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
)

// soak is a relay in this process under mixed load, on loopback, while one of its
// endpoints dies, another is born and the Services change, twice a second.
type soak struct {
	relay     *relay.Relay
	tcp, udp  *relay.Service
	tcpAt     netip.AddrPort
	udpAt     netip.AddrPort
	mu        sync.Mutex // guards endpoints
	endpoints []*soakEndpoint
	done      atomic.Int64
	deaths    atomic.Int64 // errors of flows whose endpoint died
	failures  atomic.Int64 // all others
	lastError atomic.Pointer[string]
}

// samePort listens on a port that is free for TCP; for UDP a flow may have it.
func samePort() (*net.TCPListener, *net.UDPConn, error) {
	tcp, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, nil, err
	}
	udp, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(tcp.Addr().(*net.TCPAddr).AddrPort()))
	if err != nil {
		return nil, nil, errors.Join(err, tcp.Close())
	}
	return tcp, udp, nil
}

// soakEndpoint answers on one port, TCP and UDP, what it is sent.
type soakEndpoint struct {
	at   netip.AddrPort
	tcp  *net.TCPListener
	udp  *net.UDPConn
	mu   sync.Mutex // guards open
	open map[net.Conn]struct{}
	dead bool
}

func newSoakEndpoint() (*soakEndpoint, error) {
	tcp, udp, err := samePort()
	for range 20 {
		if !errors.Is(err, unix.EADDRINUSE) {
			break
		}
		tcp, udp, err = samePort()
	}
	if err != nil {
		return nil, err
	}
	at := tcp.Addr().(*net.TCPAddr).AddrPort()
	e := &soakEndpoint{at: at, tcp: tcp, udp: udp, open: map[net.Conn]struct{}{}}
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			e.mu.Lock()
			if e.dead {
				e.mu.Unlock()
				c.Close()
				continue
			}
			e.open[c] = struct{}{}
			e.mu.Unlock()
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
				e.mu.Lock()
				defer e.mu.Unlock()
				delete(e.open, c)
			}()
		}
	}()
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, from, err := udp.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	return e, nil
}

// die ends an endpoint and its connections.
func (e *soakEndpoint) die() {
	_ = e.tcp.Close()
	_ = e.udp.Close()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dead = true
	for c := range e.open {
		_ = c.Close()
	}
}

// update tells the relay of the endpoints.
func (s *soak) update() {
	for svc, p := range map[*relay.Service]plan.Protocol{s.tcp: plan.TCP, s.udp: plan.UDP} {
		sp := &plan.ServicePort{ID: plan.ID{Name: "soak", Protocol: p, Family: plan.IPv4}}
		for _, e := range s.endpoints {
			sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: e.at, Weight: 1})
		}
		svc.Update(sp)
	}
}

// change replaces the oldest endpoint: first it takes no new flows, half a second
// later it dies.
func (s *soak) change() error {
	young, err := newSoakEndpoint()
	if err != nil {
		return err
	}
	s.mu.Lock()
	old := s.endpoints[0]
	s.endpoints = append(s.endpoints[1:], young)
	s.update()
	s.mu.Unlock()
	time.AfterFunc(500*time.Millisecond, func() {
		s.deaths.Add(1)
		old.die()
	})
	return nil
}

// flow runs one exchange after the other.
func (s *soak) flow(ctx context.Context, one func(*rand.Rand) error, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	for ctx.Err() == nil {
		before := s.deaths.Load()
		if err := one(r); err != nil {
			// An endpoint that died meanwhile takes its flows with it.
			if died := s.deaths.Load() > before; died && (errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE)) {
				continue
			}
			s.failures.Add(1)
			text := err.Error()
			s.lastError.Store(&text)
		}
		s.done.Add(1)
	}
}

// exchange sends n bytes and wants them back.
func (s *soak) exchange(n int, pause time.Duration) error {
	c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(s.tcpAt))
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	sent := make([]byte, n)
	for i := range sent {
		sent[i] = byte(i * 31 >> 4)
	}
	go func() {
		_, _ = c.Write(sent)
		time.Sleep(pause)
		_ = c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err == nil && len(got) < n {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && !bytes.Equal(got, sent) {
		err = errors.New("other bytes came back")
	}
	return err
}

// ask sends datagrams from a new port; one that is lost is asked for again.
func (s *soak) ask() error {
	c, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(s.udpAt))
	if err != nil {
		return err
	}
	defer c.Close()
	buf := make([]byte, 2048)
	for i := range 10 {
		want := fmt.Appendf(nil, "question %d", i)
		answered := false
		for try := 0; try < 20 && !answered; try++ {
			if _, err := c.Write(want); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
				return err
			}
			_ = c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
			n, err := c.Read(buf)
			answered = err == nil && bytes.Equal(buf[:n], want)
		}
		if !answered {
			return fmt.Errorf("question %d was not answered in 20 tries", i)
		}
	}
	return nil
}

// footprint is what must not grow.
type footprint struct {
	heap        uint64 // bytes in use after a collection
	rss         float64
	descriptors int
	goroutines  int
}

func measureFootprint() (footprint, error) {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return footprint{}, err
	}
	rss, err := field("/proc/self/status", "VmRSS:")
	return footprint{m.HeapAlloc, rss, len(entries), runtime.NumGoroutine()}, err
}

// runSoak fails if anything but flows of dead endpoints failed, or anything grew.
func runSoak(ctx context.Context, d time.Duration, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	s := &soak{relay: relay.New(relay.Options{UDPTimeout: 2 * time.Second})}
	if err := s.start(); err != nil {
		return err
	}
	var loads sync.WaitGroup
	seed := uint64(0)
	load := func(n int, one func(*rand.Rand) error) {
		for range n {
			seed++
			loads.Go(func() { s.flow(ctx, one, seed) })
		}
	}
	load(8, func(r *rand.Rand) error { return s.exchange(r.IntN(2000), 0) })                                 // short
	load(2, func(r *rand.Rand) error { return s.exchange(r.IntN(8<<20), 0) })                                // streams
	load(8, func(r *rand.Rand) error { return s.exchange(10, time.Duration(r.IntN(300))*time.Millisecond) }) // idle
	load(4, func(*rand.Rand) error { return s.ask() })                                                       // UDP
	load(2, func(*rand.Rand) error { return s.abandon() })                                                   // resets
	changes := time.NewTicker(500 * time.Millisecond)
	defer changes.Stop()
	report := time.NewTicker(min(d/10, time.Minute))
	defer report.Stop()
	var seen []footprint
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-changes.C:
			if err := s.change(); err != nil {
				return err
			}
		case <-report.C:
			u, err := measureFootprint()
			if err != nil {
				return err
			}
			seen = append(seen, u)
			fmt.Fprintf(out, "%d exchanges, %d endpoints died, %d failures; heap %.1f MiB, RSS %.1f MiB, %d descriptors, %d goroutines\n",
				s.done.Load(), s.deaths.Load(), s.failures.Load(), float64(u.heap)/(1<<20), u.rss/1024, u.descriptors, u.goroutines)
		}
	}
	loads.Wait()
	return s.verdict(seen)
}

// verdict compares the first third of the measurements with the last, means of each:
// how many flows happen to be open differs from one to the next.
func (s *soak) verdict(seen []footprint) error {
	var errs []error
	if n := s.failures.Load(); n > 0 {
		errs = append(errs, fmt.Errorf("%d failures, the last: %s", n, *s.lastError.Load()))
	}
	third := len(seen) / 3
	if third == 0 {
		return errors.Join(append(errs, fmt.Errorf("%d measurements are too few: let it run longer", len(seen)))...)
	}
	for _, m := range []struct {
		what  string
		slack float64
		of    func(footprint) float64
	}{
		{"the heap, MiB", 16, func(f footprint) float64 { return float64(f.heap) / (1 << 20) }},
		{"RSS, MiB", 32, func(f footprint) float64 { return f.rss / 1024 }},
		{"descriptors", 100, func(f footprint) float64 { return float64(f.descriptors) }},
		{"goroutines", 50, func(f footprint) float64 { return float64(f.goroutines) }},
	} {
		mean := func(part []footprint) (sum float64) {
			for _, f := range part {
				sum += m.of(f) / float64(len(part))
			}
			return sum
		}
		if first, last := mean(seen[:third]), mean(seen[len(seen)-third:]); last > first*5/4+m.slack {
			errs = append(errs, fmt.Errorf("%s: from %.1f to %.1f", m.what, first, last))
		}
	}
	return errors.Join(errs...)
}

func (s *soak) start() error {
	for range 4 {
		e, err := newSoakEndpoint()
		if err != nil {
			return err
		}
		s.endpoints = append(s.endpoints, e)
	}
	if err := s.relay.Start(); err != nil {
		return err
	}
	s.tcp, s.udp = s.relay.NewService("soak/tcp"), s.relay.NewService("soak/udp")
	s.update()
	for svc, p := range map[*relay.Service]plan.Protocol{s.tcp: plan.TCP, s.udp: plan.UDP} {
		ln, err := s.relay.Listen(relay.ListenConfig{
			Protocol: p, Addr: netip.MustParseAddrPort("127.0.0.1:0"),
			Router: func(relay.Flow) (*relay.Service, plan.Route) { return svc, plan.Route{SNAT: true} },
		})
		if err != nil {
			return err
		}
		if p == plan.TCP {
			s.tcpAt = ln.Addr()
		} else {
			s.udpAt = ln.Addr()
		}
	}
	return nil
}

// abandon begins an exchange and resets it.
func (s *soak) abandon() error {
	c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(s.tcpAt))
	if err != nil {
		return err
	}
	_ = c.SetLinger(0)
	_, _ = c.Write(make([]byte, 100_000))
	return c.Close()
}
