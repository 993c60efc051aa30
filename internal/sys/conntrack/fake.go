package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
)

// Fake is a table in memory. It is safe for concurrent use.
type Fake struct {
	// Fail, if set, is asked before each call and may return an error for it; n
	// counts the calls from 1.
	Fail func(n int) error
	// Strict: no connection is taken up in its middle.
	Strict bool

	mu    sync.Mutex // guards all below
	calls int
	flows []Flow
}

// Add puts flows into the table.
func (t *Fake) Add(f ...Flow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.flows = append(t.flows, f...)
}

// Flows returns what is in the table.
func (t *Fake) Flows() []Flow {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.flows)
}

// Calls returns how often DeleteUDP and DeleteTCP were called.
func (t *Fake) Calls() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.calls
}

// DeleteUDP does what Kernel.DeleteUDP does.
func (t *Fake) DeleteUDP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort) bool) (int, error) {
	return t.deleteTo(ctx, udp, to, func(f *Flow) bool { return stale(f.Dst, f.From) })
}

// DeleteTCP does what Kernel.DeleteTCP does.
func (t *Fake) DeleteTCP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort, answered bool) bool, instead func(to netip.AddrPort) netip.AddrPort) (int, error) {
	var replaced []Flow
	n, err := t.deleteTo(ctx, tcp, to, func(f *Flow) bool {
		ends := stale(f.Dst, f.From, f.Answered)
		if ends && t.Strict && f.Answered {
			r := *f
			if r.From = instead(f.Dst); r.From.IsValid() {
				replaced = append(replaced, r)
			}
		}
		return ends
	})
	t.Add(replaced...)
	return n, err
}

func (t *Fake) deleteTo(ctx context.Context, p protocol, to []netip.AddrPort, stale func(*Flow) bool) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls++
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("list %s flows: %w", p, err)
	}
	if t.Fail != nil {
		if err := t.Fail(t.calls); err != nil {
			return 0, err
		}
	}
	if len(to) == 0 {
		return 0, nil
	}
	if _, err := familyOf(to); err != nil {
		return 0, err
	}
	before := len(t.flows)
	t.flows = slices.DeleteFunc(t.flows, func(f Flow) bool {
		return protocol(f.TCP) == p && slices.Contains(to, f.Dst) && stale(&f)
	})
	return before - len(t.flows), nil
}

// String lists the flows, one a line, sorted.
func (t *Fake) String() string {
	var lines []string
	for _, f := range t.Flows() {
		lines = append(lines, f.String()+"\n")
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}
