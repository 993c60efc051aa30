package planner_test

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

// big is a world of n Services with ten endpoints each, whose slices can be
// exchanged for others.
type big struct {
	state   *cluster.State
	sink    cluster.Sink
	planner *planner.Planner
	n       int
	round   byte
}

const perService = 10

func newBig(tb testing.TB, n int) *big {
	tb.Helper()
	b := &big{state: cluster.NewState(time.Now), n: n}
	b.sink = b.state.Sink("test", cluster.Services, cluster.Slices, cluster.Nodes)
	s := defaultSettings()
	b.planner = planner.New(b.state, s.options(tb))
	b.sink.SetNode(&cluster.Node{Name: "alder", Zone: "z1"})
	for i := range n {
		b.sink.SetService(b.service(i))
		b.sink.SetSlice(b.slice(i))
	}
	return b
}

func (b *big) name(i int) cluster.Name {
	return cluster.Name{Namespace: "default", Name: fmt.Sprintf("service-%05d", i)}
}

func (b *big) service(i int) *cluster.Service {
	return &cluster.Service{
		Name: b.name(i), Type: "NodePort", Created: int64(i),
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
		Ports:      []cluster.ServicePort{{Name: cluster.Intern("http"), Protocol: "TCP", Port: uint16(80 + i>>16), NodePort: uint16(i)}},
	}
}

// slice makes the slice of Service i; its last endpoint is another in each round.
func (b *big) slice(i int) *cluster.Slice {
	n := b.name(i)
	sl := &cluster.Slice{
		Name: n, Service: n.Name,
		Ports:     []cluster.SlicePort{{Name: cluster.Intern("http"), Protocol: "TCP", Port: 8080}},
		Endpoints: make([]cluster.Endpoint, perService),
	}
	for j := range sl.Endpoints {
		last := byte(j)
		if j == perService-1 {
			last += b.round
		}
		sl.Endpoints[j] = cluster.Endpoint{
			Addr: netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), last}), Node: cluster.Intern("birch"),
			Flags: cluster.Ready | cluster.Serving,
		}
	}
	return sl
}

// change replaces one endpoint and plans.
func (b *big) change(tb testing.TB, sl *cluster.Slice) {
	b.sink.SetSlice(sl)
	if u := b.planner.Update(); len(u.Changed) != 1 {
		tb.Fatalf("%d changes, want 1", len(u.Changed))
	}
}

// BenchmarkChange replaces one endpoint of one Service: the cost must not grow with
// the number of Services.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{50, 5000, 50000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			big := newBig(b, n)
			big.planner.Update()
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				if i%n == 0 {
					big.round = (big.round + 1) % 100
				}
				sl := big.slice(i % n)
				b.StartTimer()
				big.change(b, sl)
			}
		})
	}
}

// BenchmarkStart plans everything once.
func BenchmarkStart(b *testing.B) {
	for _, n := range []int{50, 5000, 50000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			big := newBig(b, n)
			b.ReportAllocs()
			for b.Loop() {
				p := planner.New(big.state, planner.Options{NodeName: "alder", Families: []plan.Family{plan.IPv4}})
				if u := p.Update(); len(u.Changed) != n {
					b.Fatalf("%d changes, want %d", len(u.Changed), n)
				}
			}
		})
	}
}

// BenchmarkMemory reports what plan and planner hold for each endpoint, without the
// facts.
func BenchmarkMemory(b *testing.B) {
	big := newBig(b, 5000)
	for b.Loop() {
		before := heap()
		big.planner.Update()
		b.ReportMetric(float64(heap()-before)/float64(big.n*perService), "B/endpoint")
		runtime.KeepAlive(big)
		big = newBig(b, 5000)
	}
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestChangeAllocations: one change allocates the same at any number of Services.
func TestChangeAllocations(t *testing.T) {
	allocs := func(n int) float64 {
		big := newBig(t, n)
		big.planner.Update()
		var spare []*cluster.Slice
		for range 21 {
			big.round++
			spare = append(spare, big.slice(n/2))
		}
		return testing.AllocsPerRun(len(spare)-1, func() {
			big.change(t, spare[0])
			spare = spare[1:]
		})
	}
	if few, many := allocs(50), allocs(5000); many > few {
		t.Errorf("%v allocations for a change among 5,000 Services, %v among 50", many, few)
	}
}
