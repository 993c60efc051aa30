package dataplane

import (
	"slices"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// patient is a kernel with work of its own: three times, a minute apart each.
type patient struct {
	*kernel
	start time.Time
}

func (p patient) Due() time.Time {
	const times = 3
	for i := range times {
		at := p.start.Add(time.Duration(i+1) * time.Minute)
		calls := p.calls()
		if len(calls) == 0 || calls[len(calls)-1].end.Before(at) {
			return at
		}
	}
	return time.Time{}
}

func (p patient) Remarks() []plan.Note {
	return []plan.Note{{Kind: "Service", Namespace: "default", Name: "a", Message: "said by the mode"}}
}

func (p patient) Report() []string { return []string{"net.ipv4.vs.conntrack = 1"} }

func TestBackendsOwnWorkComesDue(t *testing.T) {
	onBench(t, func(b *bench, c *Config) {
		b.world.set(service(tcp("a"), 20, 1))
		c.Backend = patient{b.kernel, b.start}
	}, func(b *bench) {
		b.pass(time.Second)
		n := len(b.kernel.calls())
		b.pass(10 * time.Minute)
		var at []time.Duration
		for _, a := range b.kernel.calls()[n:] {
			at = append(at, a.start.Sub(b.start))
			if len(a.changed) > 0 {
				t.Errorf("Apply at %s has changes %v", a.start.Sub(b.start), a.changed)
			}
		}
		if want := []time.Duration{time.Minute, 2 * time.Minute, 3 * time.Minute}; !slices.Equal(at, want) {
			t.Errorf("applied at %v, want %v", at, want)
		}
		if b.kernel.rereads != 0 {
			t.Errorf("the kernel was read back %d times", b.kernel.rereads)
		}
		if have := b.Status().Kernel; !slices.Equal(have, []string{"net.ipv4.vs.conntrack = 1"}) {
			t.Errorf("status says %q", have)
		}
		if !slices.ContainsFunc(b.rec.notes, func(n plan.Note) bool { return n.Message == "said by the mode" }) {
			t.Errorf("notes: %+v", b.rec.notes)
		}
	})
}
