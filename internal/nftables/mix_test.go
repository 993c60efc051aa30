package nftables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// BenchmarkMoreOrLess gives random Services of many one endpoint more or takes one away:
// from the plan to the commit, and how long of it the kernel worked. Of 44,000 hardly
// one is met twice, so they have one to four endpoints; of 1,000 some lose their last.
func BenchmarkMoreOrLess(b *testing.B) {
	for _, s := range []struct{ services, endpoints int }{{1000, 2}, {44_000, 2}} {
		b.Run(fmt.Sprintf("%dx%d", s.services, s.endpoints), func(b *testing.B) {
			k := benchNamespace(b)
			p := bigPlan(s.services, s.endpoints)
			backend := newBackend(testEnv(plan.IPv4), k)
			mustApply(b, backend, plan.Update{Plan: p})
			rng := rand.New(rand.NewPCG(1, 1))
			var took, kernel []time.Duration
			for b.Loop() {
				id := bigService(rng.IntN(s.services), 1, 0).ID
				old := p.Services[id]
				n := len(old.Pools[plan.Cluster])
				if rng.IntN(2) == 0 {
					n = max(0, n-1)
				} else {
					n++
				}
				sp := scaled(old, n)
				u := plan.Update{Plan: p, Changed: []plan.Change{{ID: id, Old: old, New: sp}}}
				p.Services[id] = sp
				start, sys := time.Now(), kernelTime()
				mustApply(b, backend, u)
				took, kernel = append(took, time.Since(start)), append(kernel, kernelTime()-sys)
			}
			for name, d := range map[string][]time.Duration{"": took, "kernel-": kernel} {
				slices.Sort(d)
				b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, name+"p50-ms")
				b.ReportMetric(float64(d[len(d)*99/100].Microseconds())/1000, name+"p99-ms")
			}
		})
	}
}

// scaled is a Service with its first n endpoints, and new ones if it has fewer.
func scaled(sp *plan.ServicePort, n int) *plan.ServicePort {
	out := *sp
	out.Frontends = slices.Clone(sp.Frontends)
	out.Frontends[0].Route = bigService(0, 1, 0).Frontends[0].Route
	if r := (plan.Route{Verdict: plan.Reject}); n == 0 {
		out.Frontends[0].Route = [3]plan.Route{r, r, r}
	}
	have := sp.Pools[plan.Cluster]
	out.Pools[plan.Cluster] = slices.Clone(have[:min(n, len(have))])
	for i := len(have); i < n; i++ {
		a := sp.Frontends[0].Addr.As4()
		out.Pools[plan.Cluster] = append(out.Pools[plan.Cluster], plan.Endpoint{
			Addr:      netip.AddrPortFrom(netip.AddrFrom4([4]byte{240, byte(i), a[2], a[3]}), 8080),
			Elsewhere: true, Weight: 1,
		})
	}
	return &out
}

// BenchmarkBareElements gives the kernel nothing but the elements of the endpoints of a
// cluster, made before, in commits as large as ours: what a start cannot be faster
// than. One run has a listener for notifications, as there is one beside every start.
func BenchmarkBareElements(b *testing.B) {
	const services, endpoints = 5000, 50
	for _, listener := range []bool{false, true} {
		b.Run(fmt.Sprintf("%dx%d/listener=%v", services, endpoints, listener), func(b *testing.B) {
			k := benchNamespace(b)
			if listener {
				c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)})
				if err != nil {
					b.Fatal(err)
				}
				defer c.Close()
			}
			table := owned.Tables(plan.IPv4)[0]
			set := settings{family: plan.IPv4}.coreSets()[setEndpoints]
			var elements []nft.Element
			for n := range services {
				sp := bigService(n, endpoints, 0)
				fr := front{Frontend: &sp.Frontends[0], key: frontKey(sp.ID.Protocol, &sp.Frontends[0])}
				for slot, ep := range sp.Pools[plan.Cluster] {
					_, e := fr.slotElement(plan.Cluster, slot, ep.Addr)
					elements = append(elements, e)
				}
			}
			commit := func(ops ...nft.Op) {
				if err := k.Commit(context.Background(), ops); err != nil {
					b.Fatal(err)
				}
			}
			begin := kernelTime()
			for b.Loop() {
				commit(nft.Op{Kind: nft.AddTable, Table: table}, nft.Op{Kind: nft.AddSet, Table: table, Set: set})
				for chunk := range slices.Chunk(elements, elementsPerCommit) {
					commit(nft.Op{Kind: nft.AddElements, Table: table, Set: set, Elements: chunk})
				}
				b.StopTimer()
				at := kernelTime()
				commit(nft.Op{Kind: nft.DeleteTable, Table: table})
				begin += kernelTime() - at
				b.StartTimer()
			}
			b.ReportMetric(float64((kernelTime()-begin).Microseconds())/1000/float64(b.N), "kernel-ms/op")
		})
	}
}
