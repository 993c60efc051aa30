package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

func TestASuccessorTakesTheSocketsWithoutAnInterruption(t *testing.T) {
	for name, path := range map[string]string{
		"file":     filepath.Join(t.TempDir(), "relay.sock"),
		"abstract": fmt.Sprintf("@svcproxy-relay-test-%d", os.Getpid()),
	} {
		t.Run(name, func(t *testing.T) { handOver(t, path) })
	}
}

func handOver(t *testing.T, path string) {
	ctx := context.Background()
	tcp, udp := mustServe(t, echo), mustServeUDP(t, "")
	serve := func(r *Relay, addrs map[plan.Protocol]string) (*Service, *Service, map[plan.Protocol]*Listener) {
		web, dns := r.NewService("default/web"), r.NewService("default/dns")
		web.Update(servicePort(tcp))
		dns.Update(udpPort(udp))
		listeners := map[plan.Protocol]*Listener{}
		for p, s := range map[plan.Protocol]*Service{plan.TCP: web, plan.UDP: dns} {
			ln, err := r.Listen(ListenConfig{Key: "default/" + s.Name(), Protocol: p, Addr: mustAddrPort(addrs[p]), Router: forward(s)})
			if err != nil {
				t.Fatal(err)
			}
			listeners[p] = ln
		}
		return web, dns, listeners
	}
	old := mustStart(t, Options{UDPTimeout: time.Minute})
	oldWeb, _, listeners := serve(old, map[plan.Protocol]string{plan.TCP: "127.0.0.1:0", plan.UDP: "127.0.0.1:0"})
	at := map[plan.Protocol]string{}
	for p, ln := range listeners {
		at[p] = ln.Addr().String()
	}
	offered := make(chan error, 1)
	go func() { offered <- old.Offer(ctx, path) }()
	kept := mustDial(t, listeners[plan.TCP].Addr())
	mustExchange(t, kept, "before")

	var stop atomic.Bool
	connects := make(chan error, 1)
	go func() { // new connections all the time
		var err error
		for !stop.Load() && err == nil {
			err = exchange(at[plan.TCP])
		}
		connects <- err
	}()

	var in *Inheritance
	eventually(t, "the predecessor offers", func() bool {
		var err error
		if in, err = Inherit(ctx, path); err != nil {
			t.Fatal(err)
		}
		return in != nil
	})
	if got := in.Addrs("default/default/web", plan.TCP); len(got) != 1 || got[0] != listeners[plan.TCP].Addr() {
		t.Errorf("inherited for web: %v", got)
	}
	young := mustStart(t, Options{Inherited: in, UDPTimeout: time.Minute})
	youngWeb, youngDNS, _ := serve(young, at)
	if err := in.Done(); err != nil {
		t.Fatal(err)
	}
	if err := <-offered; err != nil {
		t.Errorf("the predecessor: %v", err)
	}
	before := oldWeb.Figures().Total
	for range 20 {
		if err := exchange(at[plan.TCP]); err != nil {
			t.Error(err)
		}
	}
	stop.Store(true)
	if err := <-connects; err != nil {
		t.Errorf("a connection during the handover: %v", err)
	}
	if now := oldWeb.Figures().Total; now != before {
		t.Errorf("the predecessor took %d connections afterwards", now-before)
	}
	if youngWeb.Figures().Total < 20 {
		t.Errorf("the successor has taken %d connections", youngWeb.Figures().Total)
	}
	mustAsk(t, mustDialUDP(t, mustAddrPort(at[plan.UDP])), "x")
	if youngDNS.Figures().Total != 1 {
		t.Error("the successor has no flow")
	}
	mustExchange(t, kept, "the predecessor's connections go on")
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
	defer cancel()
	path := filepath.Join(t.TempDir(), "relay.sock")
	if in, err := Inherit(ctx, path); in != nil || err != nil {
		t.Errorf("without a predecessor: %v, %v", in, err)
	}
	r := mustStart(t, Options{})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, echo)))
	ln, err := r.Listen(ListenConfig{Key: "web", Protocol: plan.TCP, Addr: mustAddrPort("127.0.0.1:0"), Router: forward(s)})
	if err != nil {
		t.Fatal(err)
	}
	offered := make(chan error, 1)
	go func() { offered <- r.Offer(ctx, path) }()
	for range 2 {
		var in *Inheritance
		eventually(t, "the relay offers", func() bool {
			in, err = Inherit(ctx, path)
			return in != nil || err != nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in.abandon()
	}
	if err := exchange(ln.Addr().String()); err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-offered; !errors.Is(err, context.Canceled) {
		t.Errorf("the offer ended with %v", err)
	}
}
