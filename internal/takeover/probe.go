package takeover

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// patience is how long the self-probe waits, for its Service to be programmed and for
// each answer.
const (
	patience = 10 * time.Second
	answer   = time.Second
)

// probeName is the Service that only the mode under test knows, so that a connection
// to it says nothing about rules of others.
var probeName = plan.Name{Namespace: "svcproxy", Name: "self-probe"}

func probeID(f plan.Family) plan.ID {
	return plan.ID{Namespace: probeName.Namespace, Name: probeName.Name, Protocol: plan.TCP, Family: f}
}

func isProbe(id plan.ID) bool { return id.Service() == probeName }

// probe puts a Service in front of a listener of this process into the kernel,
// connects to it, and takes it out again.
func (t *Takeover) probe(parent context.Context, f plan.Family) (err error) {
	ctx, cancel := context.WithTimeout(parent, patience)
	defer cancel()
	addr := t.address(f)
	if !addr.IsValid() {
		t.cfg.Log.Debug("the node has no address for the self-probe", "family", f)
		return nil
	}
	token, err := newToken()
	if err != nil {
		return err
	}
	l, err := t.cfg.Listen(netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		return fmt.Errorf("listen for the self-probe: %w", err)
	}
	defer func() { _ = l.Close() }()
	go serve(l, token)
	front, err := t.freePort(addr)
	if err != nil {
		return err
	}
	sp := probeService(f, front, portOf(l))
	if err := t.cfg.Loop.Do(ctx, func() { t.cfg.Planner.Hold(sp.ID, sp) }); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.withdraw(parent, sp.ID)) }()
	if err := t.await(ctx, sp.ID, sp); err != nil {
		return err
	}
	return t.ask(ctx, netip.AddrPortFrom(addr, front), token)
}

// withdraw takes a probe's Service out of the kernel. Once the loop has ended with
// parent nothing can; the next start does.
func (t *Takeover) withdraw(parent context.Context, id plan.ID) error {
	ctx, cancel := context.WithTimeout(parent, patience)
	defer cancel()
	if err := t.cfg.Loop.Do(ctx, func() { t.cfg.Planner.Release(id) }); err != nil {
		return err
	}
	return t.await(ctx, id, nil)
}

// probeService is reached by the node's own processes and pods, not from outside.
func probeService(f plan.Family, front uint16, endpoint netip.AddrPort) *plan.ServicePort {
	sp := &plan.ServicePort{
		ID: probeID(f),
		Frontends: []plan.Frontend{{
			Kind: plan.ExternalIP, Addr: endpoint.Addr(), Port: front,
			Route: [3]plan.Route{plan.FromNode: {SNAT: true}, plan.FromOutside: {Verdict: plan.Drop}},
		}},
	}
	sp.Pools[plan.Cluster] = []plan.Endpoint{{Addr: endpoint, OnNode: true, Weight: 1}}
	return sp
}

// address is one of the node's own: one that accepts node ports, or else any that no
// Service range covers. It is invalid if there is none.
func (t *Takeover) address(f plan.Family) netip.Addr {
	t.mu.Lock()
	node := t.node
	t.mu.Unlock()
	if node == nil {
		return netip.Addr{}
	}
	fits := func(a netip.Addr) bool {
		return plan.FamilyOf(a) == f && !a.IsLoopback() && !a.IsLinkLocalUnicast() &&
			!slices.ContainsFunc(node.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, a := range append(slices.Clone(node.NodePorts[f].Addrs), node.Addrs...) {
		if fits(a) {
			return a
		}
	}
	return netip.Addr{}
}

// await waits until the kernel has sp, nil: nothing, under id.
func (t *Takeover) await(ctx context.Context, id plan.ID, sp *plan.ServicePort) error {
	for {
		t.mu.Lock()
		have := t.applied[id]
		t.mu.Unlock()
		if have == sp {
			return nil
		}
		select {
		case <-t.changed:
		case <-ctx.Done():
			s := t.cfg.Loop.Status()
			for _, q := range s.Quarantined {
				if q.Service == id.String() {
					return fmt.Errorf("the kernel refuses the Service of the self-probe: %s", q.Error)
				}
			}
			if s.LastError != "" {
				return fmt.Errorf("the Service of the self-probe is not programmed: %s", s.LastError)
			}
			return fmt.Errorf("wait for the Service of the self-probe to be programmed: %w", ctx.Err())
		}
	}
}

// ask connects until the listener's token comes back, and returns what went wrong
// last if it never does.
func (t *Takeover) ask(ctx context.Context, to netip.AddrPort, token string) error {
	for {
		err := t.askOnce(ctx, to, token)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(answer / 10):
		case <-ctx.Done():
			return fmt.Errorf("a connection to %s, which the mode should forward to this process, fails: %w; see that no other rule keeps the node from connecting to itself", to, err)
		}
	}
}

func (t *Takeover) askOnce(ctx context.Context, to netip.AddrPort, token string) error {
	dialing, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	c, err := t.cfg.Dial(dialing, to.String())
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetReadDeadline(time.Now().Add(answer)); err != nil {
		return err
	}
	have := make([]byte, len(token))
	if _, err := io.ReadFull(c, have); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	if string(have) != token {
		return errors.New("something else answered")
	}
	return nil
}

func portOf(l net.Listener) netip.AddrPort {
	a, _ := netip.ParseAddrPort(l.Addr().String()) // a listener of TCP has such an address
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// serve gives the token to whoever connects, until the listener is closed.
func serve(l net.Listener, token string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.SetWriteDeadline(time.Now().Add(answer))
		_, _ = io.WriteString(c, token)
		_ = c.Close()
	}
}

func newToken() (string, error) {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		return "", fmt.Errorf("make a token: %w", err)
	}
	return hex.EncodeToString(b), nil
}

// freePort returns a port of addr on which nobody listens.
func (t *Takeover) freePort(addr netip.Addr) (uint16, error) {
	l, err := t.cfg.Listen(netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		return 0, fmt.Errorf("find a free port for the self-probe: %w", err)
	}
	defer func() { _ = l.Close() }()
	return portOf(l).Port(), nil
}
