package nftables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

// timedTables measures commits, by the time that the kernel works for the thread.
type timedTables struct {
	nft.Tables
	commits int
	worst   time.Duration
}

func (c *timedTables) Commit(ctx context.Context, ops []nft.Op) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := kernelTime()
	err := c.Tables.Commit(ctx, ops)
	c.commits++
	c.worst = max(c.worst, kernelTime()-start)
	return err
}

func kernelTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		return 0
	}
	return time.Duration(u.Stime.Nano())
}

// bigPlan has Services of one ClusterIP each. Endpoints are remote.
func bigPlan(services, endpoints int) *plan.Plan {
	p := webPlan(0)
	clear(p.Services)
	for n := range services {
		sp := bigService(n, endpoints, 0)
		p.Services[sp.ID] = sp
	}
	p.Node.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}
	return p
}

// bigService is number n; version varies the last endpoint.
func bigService(n, endpoints, version int) *plan.ServicePort {
	sp := &plan.ServicePort{
		ID: plan.ID{Namespace: "default", Name: fmt.Sprintf("service-%d", n), Port: "http", Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{{
			Kind: plan.ClusterIP, Addr: netip.AddrFrom4([4]byte{10, byte(96 + n>>16), byte(n >> 8), byte(n)}), Port: 80,
			Route: [3]plan.Route{{}, {SNAT: true}, {SNAT: true}},
		}},
	}
	for i := range endpoints {
		at := n*endpoints + i
		if i == endpoints-1 {
			at += version << 21
		}
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{
			Addr:      netip.AddrPortFrom(netip.AddrFrom4([4]byte{byte(128 + at>>24), byte(at >> 16), byte(at >> 8), byte(at)}), 8080),
			Elsewhere: true, Weight: 1,
		})
	}
	return sp
}

func benchNamespace(b *testing.B) *timedTables {
	b.Helper()
	nstest.Enter(b)
	k := &kernel.Tables{}
	b.Cleanup(func() { _ = k.Close() })
	return &timedTables{Tables: k}
}

// sizes of clusters, R-51's among them.
var sizes = []struct{ services, endpoints int }{{1000, 10}, {10000, 10}, {5000, 50}, {1000, 2}, {44000, 2}, {45000, 1}}

// BenchmarkColdStart loads a plan into an empty kernel, and removes it again, which is
// not timed.
func BenchmarkColdStart(b *testing.B) {
	for _, s := range sizes {
		b.Run(fmt.Sprintf("%dx%d", s.services, s.endpoints), func(b *testing.B) {
			k := benchNamespace(b)
			p := bigPlan(s.services, s.endpoints)
			start, removal := time.Duration(0), time.Duration(0) // the worst commit of each
			for b.Loop() {
				k.worst = 0
				mustApply(b, newBackend(testEnv(plan.IPv4), k), plan.Update{Plan: p})
				b.StopTimer()
				start, k.worst = max(start, k.worst), 0
				if err := owned.Remove(context.Background(), testEnv(plan.IPv4).Log, k, owned.All); err != nil {
					b.Fatal(err)
				}
				removal = max(removal, k.worst)
				b.StartTimer()
			}
			b.ReportMetric(float64(start.Microseconds())/1000, "worst-commit-ms")
			b.ReportMetric(float64(removal.Microseconds())/1000, "worst-removal-ms")
		})
	}
}

// BenchmarkRestart finds the plan's state in the kernel.
func BenchmarkRestart(b *testing.B) {
	for _, s := range sizes {
		b.Run(fmt.Sprintf("%dx%d", s.services, s.endpoints), func(b *testing.B) {
			k := benchNamespace(b)
			p := bigPlan(s.services, s.endpoints)
			mustApply(b, newBackend(testEnv(plan.IPv4), k), plan.Update{Plan: p})
			before := k.commits
			for b.Loop() {
				mustApply(b, newBackend(testEnv(plan.IPv4), k), plan.Update{Plan: p})
			}
			if k.commits != before {
				b.Errorf("a restart writes %d times", k.commits-before)
			}
		})
	}
}

// BenchmarkChange changes one Service among many: its last endpoint is replaced, or it
// gets one more and loses it again.
func BenchmarkChange(b *testing.B) {
	for _, s := range sizes {
		for _, more := range []int{0, 1} {
			name := [...]string{"replace", "more-or-less"}[more]
			b.Run(fmt.Sprintf("%s/%dx%d", name, s.services, s.endpoints), func(b *testing.B) {
				k := benchNamespace(b)
				p := bigPlan(s.services, s.endpoints)
				backend := newBackend(testEnv(plan.IPv4), k)
				mustApply(b, backend, plan.Update{Plan: p})
				k.worst = 0
				i := 0
				var took []time.Duration
				for b.Loop() {
					i++
					n := i * 7919 % 100
					sp := bigService(n, s.endpoints+more*(i/100%2), (i/100)%8)
					u := plan.Update{Plan: p, Changed: []plan.Change{{ID: sp.ID, Old: p.Services[sp.ID], New: sp}}}
					p.Services[sp.ID] = sp
					start := time.Now()
					mustApply(b, backend, u)
					took = append(took, time.Since(start))
				}
				slices.Sort(took)
				b.ReportMetric(float64(k.worst.Microseconds())/1000, "worst-commit-ms")
				b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
			})
		}
	}
}

// BenchmarkCrossing changes a Service so that its frontend leads to another chain, for
// which the kernel walks all verdicts: among few; among many in one map; and with half
// of them node ports, which are in a map of their own.
func BenchmarkCrossing(b *testing.B) {
	for _, c := range []struct {
		name                  string
		clusterIPs, nodePorts int
	}{{"few", 1000, 0}, {"one-map", 44_000, 0}, {"two-maps", 22_000, 22_000}} {
		b.Run(c.name, func(b *testing.B) {
			k := benchNamespace(b)
			p := bigPlan(c.clusterIPs, 4)
			for n := range c.nodePorts {
				sp := bigService(100_000+n, 4, 0)
				sp.Frontends[0].Kind, sp.Frontends[0].Addr, sp.Frontends[0].Port = plan.NodePort, netip.Addr{}, uint16(10_000+n)
				p.Services[sp.ID] = sp
			}
			backend := newBackend(testEnv(plan.IPv4), k)
			mustApply(b, backend, plan.Update{Plan: p})
			i := 0
			for b.Loop() {
				i++
				sp := scaled(p.Services[bigService(i%100, 0, 0).ID], 4+(i/100+1)%2)
				u := plan.Update{Plan: p, Changed: []plan.Change{{ID: sp.ID, Old: p.Services[sp.ID], New: sp}}}
				p.Services[sp.ID] = sp
				mustApply(b, backend, u)
			}
		})
	}
}

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
