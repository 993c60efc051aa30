package iptables

import (
	"fmt"
	"maps"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
)

// Service ports that come and go, each time under other names, leave nothing
// behind, in memory or in the kernel.
func TestServicesThatComeAndGoLeaveNothing(t *testing.T) {
	for _, store := range bothStores {
		t.Run(store.String(), func(t *testing.T) {
			w := testWorld(plan.IPv4)
			p := twoServices()
			b, fakes := onFakes(t, store, plan.IPv4)
			mustApply(t, b, plan.Update{Plan: p})
			d, kept, held := b.families[0].desired, state(fakes), 0
			for round := range 20 {
				more := *p
				more.Services = maps.Clone(p.Services)
				for n := range 30 {
					sp := clusterService(w, fmt.Sprintf("round-%d-%d", round, n), n+10, w.at("pod", n+1), w.at("remote", n+1))
					more.Services[sp.ID] = sp
				}
				mustApply(t, b, plantest.Difference(p, &more))
				mustApply(t, b, plantest.Difference(&more, p))
				if state(fakes) != kept {
					t.Fatalf("round %d: %s", round, plantest.FirstDifference(state(fakes), kept))
				}
				now := len(d.services) + len(d.dirty) + d.track.Len() + d.track.Differing() + len(d.shared) + len(d.rules)
				if round == 0 {
					held = now
				}
				if now != held || len(d.services) != len(p.Services) {
					t.Fatalf("round %d: %d things are remembered, %d after the first; %d Service ports, want %d", round, now, held, len(d.services), len(p.Services))
				}
			}
		})
	}
}
