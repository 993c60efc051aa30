package nftables

import (
	"maps"
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
)

// Many new Services cost few commits that lead to them, at the start and behind what the
// node itself needs; what no Service waits for comes after all of them.
func TestManyNewServices(t *testing.T) {
	for name, first := range map[string]int{"start": 0, "behind a part": 3} {
		t.Run(name, func(t *testing.T) {
			memory := &fake.Tables{}
			b := newBackend(testEnv(plan.IPv4), memory)
			const services = 3000
			part, whole := bigPlan(first, 2), bigPlan(services, 2)
			u := plan.Update{Plan: whole}
			if first > 0 {
				mustApply(t, b, plan.Update{Plan: part, Partial: true})
				for _, id := range slices.SortedFunc(maps.Keys(whole.Services), plan.ID.Compare) {
					if part.Services[id] == nil {
						u.Changed = append(u.Changed, plan.Change{ID: id, New: whole.Services[id]})
					}
				}
			}
			leading, guarding := 0, false
			memory.Refuse = func(ops []nft.Op) error {
				leads, guards := false, false
				for i := range ops {
					if ops[i].Kind != nft.AddElements {
						continue
					}
					leads = leads || ops[i].Set.Name == setServices
					guards = guards || ops[i].Set.Name == setEndpointAddrs
				}
				if leads {
					leading++
				}
				if leads && guarding {
					t.Errorf("endpoints' addresses are written before the verdicts of commit %d", leading)
				}
				guarding = guarding || guards
				return nil
			}
			mustApply(t, b, u)
			if leading > 6 || leading < 3 {
				t.Errorf("%d Services are led to in %d commits, want 3 to 6", services, leading)
			}
			if n := len(mustRead(t, memory, plan.IPv4).Elements[setEndpointAddrs]); n != 2*services {
				t.Errorf("%d endpoints' addresses are there, want %d", n, 2*services)
			}
		})
	}
}

// What the node itself needs comes first, at the start and when everything was deleted.
func TestOwnNeedsComeFirst(t *testing.T) {
	for name, inForce := range map[string]bool{"start": false, "restart": true} {
		t.Run(name, func(t *testing.T) {
			memory := &fake.Tables{}
			whole := bigPlan(2000, 1)
			if inForce {
				mustApply(t, newBackend(testEnv(plan.IPv4), memory), plan.Update{Plan: whole})
			}
			b := newBackend(testEnv(plan.IPv4), memory)
			part, dns := bigPlan(0, 0), bigService(1999, 1, 0)
			part.Services[dns.ID] = dns
			mustApply(t, b, plan.Update{Plan: part, Partial: true})
			mustApply(t, b, plantest.Difference(part, whole))
			meddle(t, memory, nft.Op{Kind: nft.DeleteTable, Table: owned.Tables(plan.IPv4)[0]})
			b.Invalidate()
			var led []any
			memory.Refuse = func(ops []nft.Op) error {
				for i := range ops {
					if ops[i].Kind == nft.AddElements && ops[i].Set.Name == setServices {
						led = append(led, ops[i].Owner)
					}
				}
				return nil
			}
			mustApply(t, b, plan.Update{Plan: whole})
			if len(led) != 2000 || led[0] != dns.ID {
				t.Errorf("%d Services are led to, first %v; want 2000, %v", len(led), led[:1], dns.ID)
			}
		})
	}
}

// So it is when others emptied a map of verdicts.
func TestManyLostVerdicts(t *testing.T) {
	memory := &fake.Tables{}
	b := newBackend(testEnv(plan.IPv4), memory)
	const services = 12_000
	p := bigPlan(services, 1)
	mustApply(t, b, plan.Update{Plan: p})
	want, table := memory.String(), b.families[0].table
	lost := nft.Event{Table: table, What: "elements", Set: setServices}
	for _, e := range mustRead(t, memory, plan.IPv4).Elements[setServices] {
		lost.Keys = append(lost.Keys, e.Key)
	}
	meddle(t, memory, nft.Op{Kind: nft.FlushSet, Table: table, Name: setServices})
	b.families[0].suspect(&lost)
	before := memory.Commits()
	mustApply(t, b, plan.Update{Plan: p})
	if n := memory.Commits() - before; n > 8 {
		t.Errorf("%d lost verdicts are written in %d commits, want at most 8", services, n)
	}
	if have := memory.String(); have != want {
		t.Errorf("after the repair: %s", plantest.FirstDifference(have, want))
	}
}
