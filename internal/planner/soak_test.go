package planner_test

import (
	"testing"

	"github.com/svcproxy/svcproxy/internal/planner"
)

// Services that come and go, each time under other names, leave nothing behind
// in facts, planner and plan.
func TestServicesThatComeAndGoLeaveNothing(t *testing.T) {
	const services, rounds, settled = 500, 20, 2
	b := newBig(t, 0)
	b.planner.Update()
	var early int64
	for round := 1; round <= rounds; round++ {
		for i := range services {
			n := round*services + i
			b.sink.SetService(b.service(n))
			b.sink.SetSlice(b.slice(n))
		}
		if u := b.planner.Update(); len(u.Changed) != services {
			t.Fatalf("round %d: %d Service ports came, want %d", round, len(u.Changed), services)
		}
		for i := range services {
			n := round*services + i
			b.sink.DeleteService(b.name(n))
			b.sink.DeleteSlice(b.name(n))
		}
		u := b.planner.Update()
		if len(u.Changed) != services || len(u.Plan.Services) != 0 {
			t.Fatalf("round %d: %d Service ports went and %d stayed, want %d and 0", round, len(u.Changed), len(u.Plan.Services), services)
		}
		if held := planner.Held(b.planner); held != 0 {
			t.Fatalf("round %d: the planner remembers %d things of Services that are gone", round, held)
		}
		switch now := heap(); {
		case round == settled:
			early = now
		case round == rounds && now > early+early/10:
			t.Errorf("%d bytes of heap after round %d, %d after round %d", now, rounds, early, settled)
		}
	}
}
