package relay

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/handover"
)

func TestASuccessorTakesTheSocketsWithoutAnInterruption(t *testing.T) {
	for name, path := range map[string]string{
		"file":     filepath.Join(t.TempDir(), "relay.sock"),
		"abstract": fmt.Sprintf("@svcproxy-relay-test-%d", os.Getpid()),
	} {
		t.Run(name, func(t *testing.T) { handOver(t, path) })
	}
}

// heir is one of two processes that serve the same Services.
type heir struct {
	*Relay
	web, dns *Service
	at       map[plan.Protocol]netip.AddrPort
}

// newHeir serves on free ports, or on those of another.
func newHeir(t *testing.T, in *handover.Inheritance, before *heir, tcp, udp []netip.AddrPort) *heir {
	t.Helper()
	loops := 3
	if in != nil {
		loops = 2 // which serve the sockets of three
	}
	h := &heir{Relay: mustStart(t, Options{Inherited: in, Loops: loops, UDPTimeout: time.Minute}), at: map[plan.Protocol]netip.AddrPort{}}
	h.web, h.dns = h.NewService("default/web"), h.NewService("default/dns")
	web, dns := servicePort(tcp...), udpPort(udp...)
	web.Affinity = time.Hour
	h.web.Update(web)
	h.dns.Update(dns)
	for p, s := range map[plan.Protocol]*Service{plan.TCP: h.web, plan.UDP: h.dns} {
		at := mustAddrPort("127.0.0.1:0")
		if before != nil {
			at = before.at[p]
		}
		ln, err := h.Listen(ListenConfig{Key: "default/" + s.Name(), Protocol: p, Addr: at, Router: forward(s)})
		if err != nil {
			t.Fatal(err)
		}
		h.at[p] = ln.Addr()
		if want := map[plan.Protocol]int{plan.TCP: 1, plan.UDP: 3}[p]; ln.Sockets() != want {
			t.Errorf("%d sockets for %s, want %d", ln.Sockets(), p, want)
		}
	}
	return h
}

// mustInherit waits for who offers at path.
func mustInherit(t *testing.T, path string) *handover.Inheritance {
	t.Helper()
	var in *handover.Inheritance
	eventually(t, "the predecessor offers", func() bool {
		var err error
		if in, err = handover.Inherit(context.Background(), path); err != nil {
			t.Fatal(err)
		}
		return in != nil
	})
	return in
}

func handOver(t *testing.T, path string) {
	ctx := context.Background()
	tcp := []netip.AddrPort{mustServe(t, name("a")), mustServe(t, name("b")), mustServe(t, name("c"))}
	udp := []netip.AddrPort{mustServeUDP(t, "a"), mustServeUDP(t, "b"), mustServeUDP(t, "c")}
	old := newHeir(t, nil, nil, tcp, udp)
	at := old.at
	offered := make(chan struct{})
	go old.OfferUntil(ctx, path, offered, nil)
	kept := mustDial(t, at[plan.TCP])
	sticksTo := mustRead(t, kept)
	var flows []*net.UDPConn
	var answers []string
	for range 20 { // in all loops
		flows = append(flows, mustDialUDP(t, at[plan.UDP]))
		answers = append(answers, mustAsk(t, flows[len(flows)-1], "x"))
	}

	var stop atomic.Bool
	connects := make(chan error, 1)
	go func() { // new connections all the time
		var err error
		for !stop.Load() && err == nil {
			err = exchange(at[plan.TCP].String())
		}
		connects <- err
	}()

	in := mustInherit(t, path)
	young := newHeir(t, in, old, tcp, udp)
	if err := young.Succeed(); err != nil {
		t.Fatal(err)
	}
	<-offered
	before := old.web.Figures().Total
	for range 20 {
		if got := mustRead(t, mustDial(t, at[plan.TCP])); got != sticksTo {
			t.Errorf("the client sticks to %q and was connected to %q", sticksTo, got)
		}
	}
	stop.Store(true)
	if err := <-connects; err != nil {
		t.Errorf("a connection during the handover: %v", err)
	}
	if now := old.web.Figures().Total; now != before {
		t.Errorf("the predecessor took %d connections afterwards", now-before)
	}
	if young.web.Figures().Total < 20 {
		t.Errorf("the successor has taken %d connections", young.web.Figures().Total)
	}
	for i, flow := range flows {
		if got := mustAsk(t, flow, "x"); got != answers[i] {
			t.Errorf("the endpoint of flow %d answered %q before and %q now", i, answers[i], got)
		}
	}
	if f := young.dns.Figures(); f.Total != 20 || f.Open != 20 || old.dns.Figures().Open != 0 {
		t.Errorf("the successor has had %d flows, want the 20 of the predecessor", f.Total)
	}
	mustExchange(t, kept, "the predecessor's connections go on")
}

// name serves by saying who it is, and then what the client says.
func name(who string) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		_, _ = c.Write([]byte(who))
		echo(c)
	}
}

// mustRead reads one byte.
func mustRead(t *testing.T, c net.Conn) string {
	t.Helper()
	var b [1]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		t.Fatal(err)
	}
	return string(b[:])
}

// What is inherited is served by the predecessor alone until the successor takes over,
// and by the successor if the predecessor dies in between.
func TestInheritedSocketsWait(t *testing.T) {
	path := filepath.Join(t.TempDir(), "relay.sock")
	tcp, udp := []netip.AddrPort{mustServe(t, name("a"))}, []netip.AddrPort{mustServeUDP(t, "a")}
	old := newHeir(t, nil, nil, tcp, udp)
	offering, die := context.WithCancel(context.Background())
	go old.OfferUntil(offering, path, make(chan struct{}), nil)
	young := newHeir(t, mustInherit(t, path), old, tcp, udp)
	for range 20 {
		mustRead(t, mustDial(t, old.at[plan.TCP]))
		mustAsk(t, mustDialUDP(t, old.at[plan.UDP]), "x")
	}
	if n := young.web.Figures().Total + young.dns.Figures().Total; n > 0 {
		t.Errorf("the successor took %d flows already", n)
	}
	die()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = old.Shutdown(ctx)
	if err := young.Succeed(); err == nil {
		t.Error("the dead predecessor has said that it has stopped")
	}
	mustRead(t, mustDial(t, old.at[plan.TCP]))
	mustAsk(t, mustDialUDP(t, old.at[plan.UDP]), "x")
}

// A successor that serves in another way has the predecessor retire, more than once.
func TestRetire(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "relay.sock")
	if there, err := handover.Retire(ctx, path); there || err != nil {
		t.Errorf("without a predecessor: %t, %v", there, err)
	}
	r := mustStart(t, Options{})
	var retired atomic.Int32
	offering, cancel := context.WithCancel(ctx)
	defer cancel()
	go r.OfferUntil(offering, path, make(chan struct{}), func() error { retired.Add(1); return nil })
	mustInherit(t, path).Abandon() // it offers now
	for range 2 {
		if there, err := handover.Retire(ctx, path); !there || err != nil {
			t.Errorf("asked to retire: %t, %v", there, err)
		}
	}
	if retired.Load() != 2 {
		t.Errorf("asked %d times, want 2", retired.Load())
	}
}

// exchange makes a connection, and uses it.
func exchange(at string) error {
	c, err := net.Dial("tcp4", at)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1))
	return err
}

func TestASuccessorThatBreaksOffChangesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	path := filepath.Join(t.TempDir(), "relay.sock")
	if in, err := handover.Inherit(ctx, path); in != nil || err != nil {
		t.Errorf("without a predecessor: %v, %v", in, err)
	}
	h := newHeir(t, nil, nil, []netip.AddrPort{mustServe(t, echo)}, []netip.AddrPort{mustServeUDP(t, "")})
	ended, given := make(chan struct{}), make(chan struct{})
	go func() {
		h.OfferUntil(ctx, path, given, nil)
		close(ended)
	}()
	for range 2 {
		mustInherit(t, path).Abandon()
	}
	if there, err := handover.Retire(ctx, path); err == nil {
		t.Errorf("who cannot retire says that it has: %t", there)
	}
	if err := exchange(h.at[plan.TCP].String()); err != nil {
		t.Error(err)
	}
	cancel()
	<-ended
	select {
	case <-given:
		t.Error("the sockets were given to somebody")
	default:
	}
}
