package cluster

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"
)

// clock is a clock that stands still until moved.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func newClock() *clock { return &clock{t: time.Unix(1_700_000_000, 0)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

func name(n string) Name { return Name{Namespace: "default", Name: n} }

func service(n string, port uint16) *Service {
	return &Service{Name: name(n), Type: "ClusterIP", Ports: []ServicePort{{Name: Intern(""), Protocol: "TCP", Port: port}}}
}

func slice(n, svc string, addrs ...string) *Slice {
	s := &Slice{Name: name(n), Service: svc, Ports: []SlicePort{{Name: Intern(""), Protocol: "TCP", Port: 80}}}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, Endpoint{Addr: netip.MustParseAddr(a), Node: Intern(""), Topology: internTopology(TopologySet{}), Flags: Ready | Serving})
	}
	return s
}

// drained returns the names of changed Services and forgets them.
func drained(s *State) []string {
	d := s.Drain()
	var out []string
	for n := range d.Services {
		out = append(out, n.Name)
	}
	slices.Sort(out)
	return out
}

func mustDrain(t *testing.T, s *State, want ...string) {
	t.Helper()
	if have := drained(s); !slices.Equal(have, want) {
		t.Errorf("changed Services: have %q, want %q", have, want)
	}
}

func sliceNames(sls []*Slice) []string {
	var out []string
	for _, sl := range sls {
		out = append(out, fmt.Sprintf("%s@%d", sl.Name.Name, sl.source))
	}
	return out
}

func mustBeEmpty(t *testing.T, s *State) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.services) != 0 {
		t.Errorf("%d entries are left", len(s.services))
	}
	for _, k := range s.sources {
		if len(k.slices) != 0 {
			t.Errorf("%d slices of source %s are left", len(k.slices), k.name)
		}
	}
}

func TestOnlyDifferencesAreChanges(t *testing.T) {
	s := NewState(time.Now)
	to := s.Sink("a", Services, Slices)
	to.SetService(service("web", 80))
	to.SetSlice(slice("web-1", "web", "10.0.0.1"))
	mustDrain(t, s, "web")
	to.SetService(service("web", 80))
	again := slice("web-1", "web", "10.0.0.1")
	again.Trigger = time.Now().Add(time.Hour)
	to.SetSlice(again)
	mustDrain(t, s)
	to.SetService(service("web", 81))
	mustDrain(t, s, "web")
	to.SetSlice(slice("web-1", "web", "10.0.0.2"))
	mustDrain(t, s, "web")
	to.DeleteService(name("other"))
	to.DeleteSlice(name("other"))
	mustDrain(t, s)
}

func TestSliceMovesToAnotherService(t *testing.T) {
	s := NewState(time.Now)
	to := s.Sink("a", Services, Slices)
	to.SetSlice(slice("x", "old", "10.0.0.1"))
	s.Drain()
	to.SetSlice(slice("x", "new", "10.0.0.1"))
	mustDrain(t, s, "new", "old")
	if _, sls := s.Service(name("old")); len(sls) != 0 {
		t.Errorf("the old Service still has %q", sliceNames(sls))
	}
	if _, sls := s.Service(name("new")); len(sls) != 1 {
		t.Errorf("the new Service has %q", sliceNames(sls))
	}
	if have := s.Names(); !slices.Equal(have, []Name{name("new")}) {
		t.Errorf("names: %v", have)
	}
	to.DeleteSlice(name("x"))
	mustBeEmpty(t, s)
}

func TestFirstSourceIsInForce(t *testing.T) {
	s := NewState(time.Now)
	first, second := s.Sink("first", Services), s.Sink("second", Services)
	second.SetService(service("web", 2))
	first.SetService(service("web", 1))
	port := func() uint16 {
		svc, _ := s.Service(name("web"))
		if svc == nil {
			return 0
		}
		return svc.Ports[0].Port
	}
	if have := port(); have != 1 {
		t.Errorf("port %d is in force, want that of the first source", have)
	}
	s.Drain()
	first.DeleteService(name("web"))
	mustDrain(t, s, "web")
	if have := port(); have != 2 {
		t.Errorf("port %d is in force after the first source deleted its own, want 2", have)
	}
	first.DeleteService(name("web"))
	mustDrain(t, s)
	second.DeleteService(name("web"))
	mustDrain(t, s, "web")
	if have := port(); have != 0 {
		t.Errorf("port %d is in force after both deleted theirs", have)
	}
	mustBeEmpty(t, s)
}

func TestSlicesOfAllSourcesAddUp(t *testing.T) {
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		s := NewState(time.Now)
		sinks := []Sink{s.Sink("first", Slices), s.Sink("second", Slices)}
		for _, i := range order {
			sinks[i].SetSlice(slice("b", "web", fmt.Sprintf("10.0.%d.1", i)))
			sinks[i].SetSlice(slice("a", "web", fmt.Sprintf("10.0.%d.2", i)))
		}
		_, sls := s.Service(name("web"))
		if have, want := sliceNames(sls), []string{"a@0", "a@1", "b@0", "b@1"}; !slices.Equal(have, want) {
			t.Errorf("order %v: have %q, want %q", order, have, want)
		}
		sinks[0].DeleteSlice(name("b"))
		_, sls = s.Service(name("web"))
		if have, want := sliceNames(sls), []string{"a@0", "a@1", "b@1"}; !slices.Equal(have, want) {
			t.Errorf("order %v, after a delete: have %q, want %q", order, have, want)
		}
	}
}

func TestSliceWithoutServiceIsKept(t *testing.T) {
	s := NewState(time.Now)
	to := s.Sink("a", Slices)
	to.SetSlice(slice("stray", ""))
	_, sls := s.Service(Name{Namespace: "default"})
	if len(sls) != 1 {
		t.Fatalf("have %q", sliceNames(sls))
	}
	to.DeleteSlice(name("stray"))
	mustBeEmpty(t, s)
}

func TestNodeOfFirstSource(t *testing.T) {
	s := NewState(time.Now)
	first, second := s.Sink("first", Nodes), s.Sink("second", Nodes)
	second.SetNode(&Node{Name: "alder", Zone: "b"})
	first.SetNode(nil)
	if n := s.Node(); n == nil || n.Zone != "b" {
		t.Fatalf("a source without the Node took it away: %v", n)
	}
	if d := s.Drain(); !d.Node {
		t.Error("a new Node is not a change")
	}
	first.SetNode(&Node{Name: "alder", Zone: "a"})
	if n := s.Node(); n.Zone != "a" {
		t.Errorf("zone %s is in force, want that of the first source", n.Zone)
	}
	s.Drain()
	second.SetNode(&Node{Name: "alder", Zone: "c"})
	first.SetNode(&Node{Name: "alder", Zone: "a"})
	if d := s.Drain(); d.Node {
		t.Error("a Node that is not in force, or equal, is a change")
	}
	first.SetNode(nil)
	second.SetNode(nil)
	if d := s.Drain(); !d.Node || s.Node() != nil {
		t.Errorf("after both deleted it: changed %v, node %v", d.Node, s.Node())
	}
}

func TestServiceCIDRsAndHost(t *testing.T) {
	s := NewState(time.Now)
	first, second := s.Sink("first", ServiceCIDRs), s.Sink("second", ServiceCIDRs)
	p := func(in ...string) (out []netip.Prefix) {
		for _, c := range in {
			out = append(out, netip.MustParsePrefix(c))
		}
		return out
	}
	first.SetServiceCIDRs(p("10.9.0.0/16", "10.1.0.0/16"))
	second.SetServiceCIDRs(p("10.1.0.0/16", "fd00::/112"))
	if have, want := s.ServiceCIDRs(), p("10.1.0.0/16", "10.9.0.0/16", "fd00::/112"); !slices.Equal(have, want) {
		t.Errorf("have %v, want %v", have, want)
	}
	if d := s.Drain(); !d.CIDRs {
		t.Error("no change of CIDRs")
	}
	first.SetServiceCIDRs(p("10.1.0.0/16", "10.9.0.0/16"))
	if d := s.Drain(); !d.Empty() {
		t.Errorf("the same CIDRs in another order are a change: %+v", d)
	}
	a := []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	s.SetHost(a)
	if have := s.Host(); len(have) != 2 || have[0] != a[1] {
		t.Errorf("host addresses: %v", have)
	}
	if d := s.Drain(); !d.Host {
		t.Error("no change of the host")
	}
	s.SetHost([]netip.Addr{a[1], a[0]})
	if d := s.Drain(); !d.Empty() {
		t.Errorf("the same host addresses are a change: %+v", d)
	}
}

func TestCompleteAndAge(t *testing.T) {
	c := newClock()
	s := NewState(c.Now)
	if ok, _ := s.Complete(); !ok {
		t.Error("a State without sources awaits something")
	}
	api, files := s.Sink("api", Services, Nodes), s.Sink("files", Services)
	api.Seen(Services)
	if ok, missing := s.Complete(); ok || !slices.Equal(missing, []string{"api Service", "api Node", "files Service"}) {
		t.Errorf("complete %v, missing %q", ok, missing)
	}
	api.Synced(Services)
	files.Synced(Services)
	if s.Age() != 0 {
		t.Errorf("age %v, want 0", s.Age())
	}
	select {
	case <-s.Changed():
	default:
		t.Error("a kind that is synced wakes nobody")
	}
	c.Advance(10 * time.Second)
	api.Synced(Nodes)
	if ok, missing := s.Complete(); !ok {
		t.Errorf("missing %q", missing)
	}
	files.Seen(Services)
	if have := s.Age(); have != 10*time.Second {
		t.Errorf("age %v, want that of the oldest kind, 10s", have)
	}
	api.Seen(Services)
	c.Advance(time.Second)
	api.Seen(Slices) // not a kind that it delivers
	if have := s.Age(); have != time.Second {
		t.Errorf("age %v, want 1s", have)
	}
	c.Advance(-time.Minute)
	if have := s.Age(); have != 0 {
		t.Errorf("age %v after the clock went back, want 0", have)
	}
}

func TestTriggers(t *testing.T) {
	c := newClock()
	s := NewState(c.Now)
	to := s.Sink("a", Slices)
	old, young := slice("a", "web", "10.0.0.1"), slice("b", "web", "10.0.0.1")
	old.Trigger, young.Trigger = c.Now().Add(-time.Second), c.Now().Add(time.Second)
	to.SetSlice(old)
	to.SetSlice(young)
	to.DeleteSlice(name("b"))
	if d := s.Drain(); !slices.Equal(d.Triggers, []time.Time{young.Trigger}) {
		t.Errorf("triggers %v, want %v alone", d.Triggers, young.Trigger)
	}
	if d := s.Drain(); d.Triggers != nil {
		t.Errorf("triggers are drained twice: %v", d.Triggers)
	}
}

// TestAnyOrder applies the same final facts along many paths: repeated, in any
// order, with detours that are taken back.
func TestAnyOrder(t *testing.T) {
	type op func(sinks []Sink)
	var final, detours []op
	for source := range 2 {
		for i := range 6 {
			n := fmt.Sprintf("s%d", i)
			final = append(final,
				func(k []Sink) { k[source].SetService(service(n, uint16(100*source+i+1))) },
				func(k []Sink) {
					k[source].SetSlice(slice(fmt.Sprint("e", i), fmt.Sprint("s", i/2), fmt.Sprintf("10.%d.0.%d", source, i)))
				})
			detours = append(detours,
				func(k []Sink) { k[source].SetService(service(n, 7)) },
				func(k []Sink) { k[source].DeleteService(name(n)) },
				func(k []Sink) { k[source].SetSlice(slice(fmt.Sprint("e", i), "elsewhere")) },
				func(k []Sink) { k[source].DeleteSlice(name(fmt.Sprint("e", i))) })
		}
	}
	dump := func(s *State) (out []string) {
		for _, n := range s.Names() {
			svc, sls := s.Service(n)
			out = append(out, fmt.Sprint(n, svc != nil, svc.Ports[0].Port, sliceNames(sls)))
			for _, sl := range sls {
				out = append(out, fmt.Sprint(sl.Endpoints[0].Addr))
			}
		}
		return out
	}
	var want []string
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := NewState(time.Now)
		sinks := []Sink{s.Sink("0"), s.Sink("1")}
		for range r.IntN(100) {
			detours[r.IntN(len(detours))](sinks)
		}
		for _, i := range r.Perm(len(final)) {
			final[i](sinks)
			if r.IntN(3) == 0 {
				final[i](sinks)
			}
		}
		have := dump(s)
		if want == nil {
			want = have
		}
		if !reflect.DeepEqual(have, want) {
			t.Fatalf("seed %d:\nhave %q\nwant %q", seed, have, want)
		}
		for i := range 6 {
			for _, k := range sinks {
				k.DeleteService(name(fmt.Sprint("s", i)))
				k.DeleteSlice(name(fmt.Sprint("e", i)))
			}
		}
		mustBeEmpty(t, s)
	}
}

// TestConcurrentUse is for the race detector: sources write while a reader drains
// and reads; the reader must have seen every Service in the end.
func TestConcurrentUse(t *testing.T) {
	const each = 200
	s := NewState(time.Now)
	var writers sync.WaitGroup
	for i := range 3 {
		to := s.Sink(fmt.Sprint(i), Services, Slices)
		writers.Go(func() {
			for j := range each {
				n := fmt.Sprintf("s%d", j)
				to.SetService(service(n, uint16(i+1)))
				to.SetSlice(slice(n, n, "10.0.0.1"))
				to.Seen(Services)
				if j%3 == 0 {
					to.DeleteSlice(name(n))
				}
			}
			to.Synced(Services)
			to.Synced(Slices)
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	seen := map[Name]uint16{}
	read := func() {
		d := s.Drain()
		for n := range d.Services {
			if svc, _ := s.Service(n); svc != nil {
				seen[n] = svc.Ports[0].Port
			}
		}
		s.Counts()
		s.Age()
		s.Names()
	}
	for running := true; running; {
		select {
		case <-s.Changed():
			read()
		case <-done:
			running = false
		}
	}
	read()
	if len(seen) != each {
		t.Errorf("%d Services were seen, want %d", len(seen), each)
	}
	for n, port := range seen {
		if port != 1 {
			t.Errorf("%v ended with port %d, want that of the first source", n, port)
		}
	}
	if ok, missing := s.Complete(); !ok {
		t.Errorf("missing %q", missing)
	}
}

// TestChurnLeavesNothing creates and deletes many Services, again and again: the
// maps are empty and the heap does not grow (kubernetes/kubernetes#128928).
func TestChurnLeavesNothing(t *testing.T) {
	s := NewState(time.Now)
	to := s.Sink("a", Services, Slices)
	const services = 2000
	// The race detector's own allocations come and go; one entry left behind per
	// Service and round would be more than ten times this.
	const noise = 1 << 20
	var second uint64
	for round := range 10 {
		for i := range services {
			to.SetService(ReduceService(manyService(i)))
			to.SetSlice(ReduceSlice(manySlice(i, 3)))
		}
		s.Drain()
		for i := range services {
			svc := manyService(i)
			to.DeleteSlice(Name{Namespace: svc.Namespace, Name: svc.Name + "-x7k2p"})
			to.DeleteService(Name{Namespace: svc.Namespace, Name: svc.Name})
		}
		s.Drain()
		mustBeEmpty(t, s)
		switch heap := liveHeap(); {
		case round == 1:
			second = heap
		case round == 9 && heap > second+second/10+noise:
			t.Errorf("the heap holds %d bytes in round 10, %d in round 2", heap, second)
		}
	}
}
