package ipvs

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
)

var portsFor = flag.Duration("ports-for", 6*time.Second, "how long TestKernelFewSourcePorts keeps connecting; the case from the field takes 3m")

// fewPorts are the client's: those that ip_vs and the node still remember are used
// again and again.
const (
	firstPort = 40_000
	fewPorts  = 200
)

// greet answers every connection with a name and closes it first, so that it is not the
// client that has to keep its port.
func greet(t *testing.T, h *lab.Host, at netip.AddrPort) {
	t.Helper()
	l, err := h.Listen(at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, h.Name()) // the client says what it misses
			_ = c.Close()
		}
	}()
}

// client connects as fast as it can.
type client struct {
	host *lab.Host
	to   string

	mu      sync.Mutex // guards all below
	moved   time.Time  // from when on the endpoint "old" must not be reached; zero: it may
	answers map[string]int
	wrong   []string
}

// run connects until ctx ends.
func (c *client) run(ctx context.Context) {
	for ctx.Err() == nil {
		begun := time.Now()
		name, err := c.once()
		c.mu.Lock()
		switch {
		case errors.Is(err, syscall.EADDRNOTAVAIL): // no port of its own is free
		case err != nil:
			c.wrong = append(c.wrong, fmt.Sprintf("connection %d: %v", len(c.answers), err))
		case name == "old" && !c.moved.IsZero() && begun.After(c.moved):
			c.wrong = append(c.wrong, "a connection reached the endpoint that was gone")
		default:
			c.answers[name]++
		}
		c.mu.Unlock()
	}
}

func (c *client) once() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := c.host.DialContext(ctx, "tcp", c.to)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		return "", err
	}
	name, err := io.ReadAll(conn)
	if err == nil && len(name) == 0 {
		err = net.ErrClosed
	}
	return string(name), err
}

// repeatedSYNs is how often the host sent the first segment of a connection again.
func repeatedSYNs(t *testing.T, h *lab.Host) int {
	t.Helper()
	n := -1
	err := h.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		lines := strings.Split(string(b), "\n")
		for i := 0; i+1 < len(lines); i += 2 {
			values := strings.Fields(lines[i+1])
			for at, name := range strings.Fields(lines[i]) {
				if name == "TCPSynRetrans" {
					n, err = strconv.Atoi(values[at])
				}
			}
		}
		return err
	})
	if err != nil || n < 0 {
		t.Fatalf("TCPSynRetrans: %d, %v", n, err)
	}
	return n
}

// a client of few source ports is answered every time, without having to ask
// twice, also while the node remembers a closed connection from the same port; an
// endpoint that goes meanwhile gets none from then on, and its real server goes.
func TestKernelFewSourcePorts(t *testing.T) {
	onKernel(t) // skips without ip_vs
	w := plantest.NewWorld(plan.IPv4)
	leaf := func(name string, n int) lab.LeafSpec {
		return lab.LeafSpec{Name: name, Behind: "node", Addrs: []netip.Addr{w.At("pod", n)}, From: w.Node[:1]}
	}
	l, err := lab.Build(lab.Topology{
		Hosts:  []lab.HostSpec{{Name: "node", Forwards: true, OwnRun: true, Addrs: w.Node}},
		Leaves: []lab.LeafSpec{leaf("old", 1), leaf("new", 2), leaf("ask", 250)},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	greet(t, l.Host("old"), netip.AddrPortFrom(w.At("pod", 1), 8080))
	greet(t, l.Host("new"), netip.AddrPortFrom(w.At("pod", 2), 8080))
	if err := l.Host("ask").Sysctl("ipv4/ip_local_port_range", fmt.Sprintf("%d %d", firstPort, firstPort+fewPorts-1)); err != nil {
		t.Fatal(err)
	}

	k := newKernel()
	t.Cleanup(func() { _ = k.close() })
	b := newBackend(testEnv(plan.IPv4), Options{DrainTimeout: *portsFor / 4, Scheduler: scheduler.Default}, k)
	apply := func(u plan.Update) {
		if err := l.Host("node").Do(func() error { return b.Apply(context.Background(), u) }); err != nil {
			t.Fatal(err)
		}
	}
	two, one := webPlan(nil, 1, 2), webPlan(nil, 2)
	apply(plan.Update{Plan: two})
	ctx, cancel := context.WithTimeout(context.Background(), *portsFor)
	defer cancel()
	c := &client{host: l.Host("ask"), to: webKey.Addr.String(), answers: map[string]int{}}
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() { c.run(ctx) })
	}
	<-time.After(*portsFor / 3)
	apply(plantest.Difference(two, one))
	c.mu.Lock()
	c.moved = time.Now()
	c.mu.Unlock()
	for at := b.Due(); !at.IsZero(); at = b.Due() {
		<-time.After(time.Until(at))
		apply(plan.Update{Plan: one})
	}
	clients.Wait()

	left, err := k.servers.RealServers(webKey)
	if err != nil || len(left) != 1 || left[0].Addr.Addr() != w.At("pod", 2) {
		t.Errorf("real servers at the end: %v, %v", left, err)
	}
	again := repeatedSYNs(t, l.Host("ask"))
	total := c.answers["old"] + c.answers["new"]
	t.Logf("%d connections from %d ports: %v; %d asked twice", total, fewPorts, c.answers, again)
	if len(c.wrong) > 0 {
		t.Errorf("%d failed; first: %s", len(c.wrong), c.wrong[0])
	}
	if c.answers["old"] == 0 || c.answers["new"] == 0 || total < 2*fewPorts {
		t.Errorf("%d connections do not use ports again: %v", total, c.answers)
	}
	if again*20 > total {
		t.Errorf("%d of %d connections asked twice", again, total)
	}
}
