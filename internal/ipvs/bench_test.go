package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// manyServices is a plan with a number of Services of five endpoints each.
func manyServices(n int) *plan.Plan {
	p := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{}, Node: webPlan(nil).Node}
	for i := range n {
		for id, sp := range webPlan(nil, 1, 2, 3, 4, 5).Services {
			id.Name = fmt.Sprintf("svc-%d", i)
			sp.ID = id
			sp.Frontends[0].Addr = netip.AddrFrom4([4]byte{10, 62, byte(i >> 8), byte(i)})
			p.Services[id] = sp
		}
	}
	return p
}

// BenchmarkEndpointChange replaces an endpoint of one Service among many: what that
// costs does not depend on how many there are.
func BenchmarkEndpointChange(b *testing.B) {
	for _, n := range []int{100, 2000, 20_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := manyServices(n)
			r := newRig()
			be := r.backend(Options{}, plan.IPv4)
			mustApply(b, be, plan.Update{Plan: p})
			id := plan.ID{Namespace: "default", Name: "svc-7", Port: "http", Protocol: plan.TCP, Family: plan.IPv4}
			i := 0
			for b.Loop() {
				i++
				old := p.Services[id]
				changed := *old
				changed.Pools[plan.Cluster] = slices.Clone(old.Pools[plan.Cluster])
				changed.Pools[plan.Cluster][i%5].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 61, 1, byte(10 + i%200)}), 8080)
				p.Services[id] = &changed
				u := plan.Update{Plan: p, Changed: []plan.Change{{ID: id, Old: old, New: &changed}}}
				if err := be.Apply(context.Background(), u); err != nil {
					b.Fatal(err)
				}
				if at := be.Due(); !at.IsZero() {
					r.clock = at
				}
				r.servers.Ops()
			}
		})
	}
}

// BenchmarkFirstSync writes everything.
func BenchmarkFirstSync(b *testing.B) {
	p := manyServices(2000)
	for b.Loop() {
		mustApply(b, newRig().backend(Options{}, plan.IPv4), plan.Update{Plan: p})
	}
}
