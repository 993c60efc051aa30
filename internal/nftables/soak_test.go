package nftables

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
)

// Service ports that come and go, each time under other names, with affinity and
// source ranges among them, leave nothing behind, in memory or in the kernel.
func TestServicesThatComeAndGoLeaveNothing(t *testing.T) { comeAndGo(t, &fake.Tables{}, 20, 30) }

func TestKernelServicesThatComeAndGoLeaveNothing(t *testing.T) {
	nstest.Enter(t)
	comeAndGo(t, newKernel(t), 5, 300)
}

func comeAndGo(t *testing.T, tables nft.Tables, rounds, services int) {
	p := webPlan(time.Hour, 1, 2)
	b := newBackend(testEnv(plan.IPv4), tables)
	mustApply(t, b, plan.Update{Plan: p})
	kept, held := state(t, tables, plan.IPv4), 0
	f := b.families[0]
	for round := range rounds {
		more := *p
		more.Services = maps.Clone(p.Services)
		for n := range services {
			sp := bigService(n, 1+n%20, round)
			sp.ID.Name = fmt.Sprintf("round-%d-%d", round, n)
			sp.Affinity = time.Duration(n%2) * time.Hour
			if n%3 == 0 {
				sp.Frontends[0].Allow = plantest.LocalTraffic(plantest.NewWorld(plan.IPv4), 4).Prefixes
			}
			more.Services[sp.ID] = sp
		}
		mustApply(t, b, plantest.Difference(p, &more))
		mustApply(t, b, plantest.Difference(&more, p))
		for !b.Due().IsZero() { // the kernel may still hold on to chains
			mustApply(t, b, plan.Update{Plan: p})
		}
		if have := state(t, tables, plan.IPv4); have != kept {
			t.Fatalf("round %d: %s", round, plantest.FirstDifference(have, kept))
		}
		now := len(f.services) + len(f.objects) + len(f.unused) + len(f.refs.counts) + len(f.batch) + len(f.leads)
		if round == 0 {
			held = now
		}
		if now != held || len(f.services) != len(p.Services) {
			t.Fatalf("round %d: %d things are remembered, %d after the first; %d Service ports, want %d", round, now, held, len(f.services), len(p.Services))
		}
	}
}
