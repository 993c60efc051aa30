package iptables

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// watched is a store of which each write is looked at.
type watched struct {
	sys.Tables
	written func()
}

func (w watched) Restore(ctx context.Context, input func(*bufio.Writer) error) error {
	err := w.Tables.Restore(ctx, input)
	w.written()
	return err
}

// When a cluster becomes a large one, or a small one again, packets meet what the
// plan says after each write, in whatever parts the rules are written.
func TestLayoutChangesUnderTraffic(t *testing.T) {
	for _, store := range bothStores {
		t.Run(store.String(), func(t *testing.T) {
			p, hairpins := crowded()
			b, fakes := onFakes(t, store, plan.IPv4)
			mustApply(t, b, plan.Update{Plan: p})
			writes := 0
			b.families[0].tables = watched{Tables: fakes[plan.IPv4], written: func() {
				writes++
				w := newWalker(t, p.Node, fakes[plan.IPv4])
				for _, pkt := range hairpins {
					if have, want := w.walk(pkt), wantFate(p, pkt); !have.equal(want) {
						t.Fatalf("after write %d, packet %+v:\nhave %v\nwant %v", writes, pkt, have, want)
					}
				}
			}}
			for _, many := range []int{always, manyEndpoints * 10, always} {
				before := writes
				setMany(t, b, many)
				b.Invalidate()
				mustApply(t, b, plan.Update{Plan: p})
				if want := map[sys.Store]int{sys.Legacy: 1, sys.NFT: 3}[store]; writes-before < want {
					t.Errorf("limit %d: %d writes, want %d or more", many, writes-before, want)
				}
			}
		})
	}
}

// crowded is a plan with more chains than the nft store is given at once, and for each
// Service a packet from one of its endpoints to itself.
func crowded() (*plan.Plan, []plan.Packet) {
	p := twoServices()
	w := testWorld(plan.IPv4)
	var packets []plan.Packet
	for n := range 40 {
		var pods [20]netip.Addr
		for i := range pods {
			pods[i] = w.at("pod", n*5+i+1)
		}
		sp := clusterService(w, fmt.Sprintf("crowd-%d", n), n+10, pods[:]...)
		p.Services[sp.ID] = sp
		packets = append(packets, plan.Packet{
			Proto: plan.TCP, Src: pods[n%len(pods)], In: "cni0",
			Dst: netip.AddrPortFrom(sp.Frontends[0].Addr, sp.Frontends[0].Port),
		})
	}
	return p, packets
}

// While many chains change at once, and are written in parts, a Service that no longer
// forwards to outside clients is refused or dropped from the moment on at which it is
// no longer translated.
func TestRefusedBeforeUntranslatedInParts(t *testing.T) {
	for _, store := range bothStores {
		t.Run(store.String(), func(t *testing.T) {
			w := testWorld(plan.IPv4)
			before, _ := crowded()
			sp := clusterService(w, "edge", 200, w.at("pod", 99))
			sp.Pools[plan.Local] = sp.Pools[plan.Cluster]
			sp.Frontends = append(sp.Frontends, plan.Frontend{
				Kind: plan.LoadBalancerIP, Addr: w.at("external", 20), Port: 80, Route: [3]plan.Route{toCluster, toClusterSNAT, toLocal},
			})
			before.Services[sp.ID] = sp
			after := *before
			after.Services = maps.Clone(before.Services)
			gone := clusterService(w, "edge", 200, w.at("remote", 99))
			gone.Frontends = append(gone.Frontends, sp.Frontends[1])
			gone.Frontends[1].Route = [3]plan.Route{toCluster, toClusterSNAT, dropped}
			after.Services[gone.ID] = gone

			b, fakes := onFakes(t, store, plan.IPv4)
			mustApply(t, b, plan.Update{Plan: before})
			pkt := plan.Packet{Proto: plan.TCP, Src: w.outside, In: "eth0", Dst: netip.AddrPortFrom(sp.Frontends[1].Addr, 80)}
			b.families[0].tables = watched{Tables: fakes[plan.IPv4], written: func() {
				have := newWalker(t, before.Node, fakes[plan.IPv4]).walk(pkt)
				if !have.equal(wantFate(before, pkt)) && !have.equal(wantFate(&after, pkt)) {
					t.Errorf("in between, a packet from outside meets %v", have)
				}
			}}
			setMany(t, b, always)
			mustApply(t, b, plantest.Difference(before, &after))
		})
	}
}
