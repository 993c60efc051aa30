package planner_test

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
	"unique"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

func mustTopology(s cluster.TopologySet) cluster.Topology { return unique.Make(s) }

// TestIncremental changes facts and options at random: whatever the path, the plan
// is the one that a planner makes from scratch, and its updates add up to it.
func TestIncremental(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t, generator{r}.settings())
		w.sink.SetNode(generator{r}.node())
		for range 120 {
			generator{r}.step(w)
			if r.IntN(4) == 0 {
				w.sync()
				w.checkFresh()
				checkInvariants(t, w.plan())
			}
		}
		w.sync()
		w.checkFresh()
		if u := w.sync(); !u.Empty() {
			t.Errorf("an update without a change says %+v", u)
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// TestOrder hands the same facts over in another order, repeated, and with updates
// in between: the plan is the same.
func TestOrder(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 2))
		g := generator{r}
		s := g.settings()
		node := g.node()
		var facts []func(*world)
		add := func(f func(*world)) { facts = append(facts, f, f) }
		add(func(w *world) { w.sink.SetNode(node) })
		services := map[cluster.Name]bool{}
		sls := map[cluster.Name]bool{}
		for range 12 {
			if svc := g.service(g.name()); !services[svc.Name] {
				services[svc.Name] = true
				add(func(w *world) { c := *svc; w.sink.SetService(&c) })
			}
			if sl := g.slice(g.name()); !sls[sl.Name] {
				sls[sl.Name] = true
				add(func(w *world) { c := *sl; w.sink.SetSlice(&c) })
			}
		}
		var want string
		for try := range 6 {
			w := newWorld(t, s)
			for _, f := range facts {
				f(w)
				if try > 0 && r.IntN(3) == 0 {
					w.sync()
				}
			}
			w.sync()
			have := w.plan().String() + notesText(w.planner.Why(nil))
			if try == 0 {
				want = have
			} else if have != want {
				t.Fatalf("seed %d: the plan depends on the order of facts:\n%s", seed, diff(want, have))
			}
			r.Shuffle(len(facts), func(i, j int) { facts[i], facts[j] = facts[j], facts[i] })
		}
	}
}

// TestEverythingGoes: after all objects are gone, so is the plan.
func TestEverythingGoes(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 3))
	w := newWorld(t, defaultSettings())
	w.sink.SetNode(generator{r}.node())
	for range 300 {
		w.sink.SetService(generator{r}.service(generator{r}.name()))
		w.sink.SetSlice(generator{r}.slice(generator{r}.name()))
		w.sync()
	}
	if len(w.services) == 0 || len(w.health) == 0 {
		t.Fatal("nothing was planned")
	}
	for _, n := range w.state.Names() {
		w.sink.DeleteService(n)
		_, sls := w.state.Service(n)
		for _, sl := range sls {
			w.sink.DeleteSlice(sl.Name)
		}
	}
	w.sync()
	if p := w.plan(); len(p.Services) > 0 || len(p.Health) > 0 {
		t.Errorf("left over:\n%s", p)
	}
	services := func(n plan.Note) bool { return n.Kind != "Node" }
	if left := w.planner.Why(services); len(left) > 0 {
		t.Errorf("notes left over:\n%s", notesText(left))
	}
	if n := planner.Held(w.planner); n > 0 {
		t.Errorf("%d entries are left in the planner's maps", n)
	}
}

// table is the policy table, written out: the routes from pods, from the node and
// from outside. Where no endpoint is usable all reject.
var table = map[traffic][3]string{
	// {external, local policy, endpoints, pods known, masquerade all}
	{false, false, here, true, false}:       {"cluster", "cluster+snat", "cluster+snat"},
	{false, false, elsewhere, true, false}:  {"cluster", "cluster+snat", "cluster+snat"},
	{false, false, here, false, false}:      {"cluster", "cluster", "cluster"},
	{false, false, elsewhere, false, false}: {"cluster", "cluster", "cluster"},
	{false, true, here, true, false}:        {"local", "local+snat", "local+snat"},
	{false, true, here, false, false}:       {"local", "local", "local"},
	{false, true, elsewhere, true, false}:   {"drop", "drop", "drop"},
	{false, true, elsewhere, false, false}:  {"drop", "drop", "drop"},
	{true, false, here, true, false}:        {"cluster+snat", "cluster+snat", "cluster+snat"},
	{true, false, elsewhere, true, false}:   {"cluster+snat", "cluster+snat", "cluster+snat"},
	{true, false, here, false, false}:       {"cluster+snat", "cluster+snat", "cluster+snat"},
	{true, false, elsewhere, false, false}:  {"cluster+snat", "cluster+snat", "cluster+snat"},
	{true, true, here, true, false}:         {"cluster", "cluster+snat", "local"},
	{true, true, elsewhere, true, false}:    {"cluster", "cluster+snat", "drop"},
	{true, true, here, false, false}:        {"local", "cluster+snat", "local"},
	{true, true, elsewhere, false, false}:   {"drop", "cluster+snat", "drop"},

	{false, false, here, true, true}:       {"cluster+snat", "cluster+snat", "cluster+snat"},
	{false, false, elsewhere, true, true}:  {"cluster+snat", "cluster+snat", "cluster+snat"},
	{false, false, here, false, true}:      {"cluster+snat", "cluster+snat", "cluster+snat"},
	{false, false, elsewhere, false, true}: {"cluster+snat", "cluster+snat", "cluster+snat"},
	{false, true, here, true, true}:        {"local+snat", "local+snat", "local+snat"},
	{false, true, here, false, true}:       {"local+snat", "local+snat", "local+snat"},
	{false, true, elsewhere, true, true}:   {"drop", "drop", "drop"},
	{false, true, elsewhere, false, true}:  {"drop", "drop", "drop"},
}

type where int

const (
	nowhere where = iota
	here
	elsewhere
)

type traffic struct {
	external, local bool
	endpoints       where
	podsKnown       bool
	masqueradeAll   bool
}

// TestPolicyTable checks every route of random plans against the table: who is
// forwarded where, and masqueraded, follows from nothing else.
func TestPolicyTable(t *testing.T) {
	seen := map[traffic]bool{}
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 4))
		w := newWorld(t, generator{r}.settings())
		node := generator{r}.node()
		w.sink.SetNode(node)
		for range 30 {
			w.sink.SetService(generator{r}.service(generator{r}.name()))
			sl := generator{r}.slice(generator{r}.name())
			for i := range sl.Endpoints { // an address is on one node
				sl.Endpoints[i].Node = cluster.Intern(nodeOf(sl.Endpoints[i].Addr))
			}
			w.sink.SetSlice(sl)
		}
		w.sync()
		for id, sp := range w.plan().Services {
			svc, sls := w.state.Service(cluster.Name(id.Service()))
			tr := traffic{
				endpoints:     endpointsOf(sls, id),
				podsKnown:     w.node.Local[id.Family].Kind != plan.LocalUnknown,
				masqueradeAll: w.settings.MasqueradeAll,
			}
			for _, f := range sp.Frontends {
				tr.external, tr.local = f.Kind != plan.ClusterIP, svc.InternalLocal
				if tr.external {
					tr.local = svc.ExternalLocal && (svc.Type != "ClusterIP" || len(svc.ExternalIPs) > 0)
				}
				want := [3]string{"reject", "reject", "reject"}
				if tr.endpoints != nowhere {
					k := tr
					k.masqueradeAll = k.masqueradeAll && !k.external // of no meaning there
					want = table[k]
					seen[k] = true
				}
				for _, o := range plan.Origins {
					if have := f.Route[o].String(); have != want[o] {
						t.Errorf("seed %d: %s %v %+v from %v: %s, want %s", seed, id, f.Kind, tr, o, have, want[o])
					}
				}
			}
		}
	}
	for k := range table {
		if !seen[k] {
			t.Errorf("no random plan had %+v", k)
		}
	}
}

func nodeOf(a netip.Addr) string {
	if b := a.As16(); b[15]%2 == 0 {
		return "alder"
	}
	return "birch"
}

// endpointsOf says where the usable endpoints of a port are, worked out from the
// facts in the plainest way.
func endpointsOf(sls []*cluster.Slice, id plan.ID) where {
	best := map[netip.AddrPort]cluster.EndpointFlags{} // of all with that address and port
	for _, sl := range sls {
		for _, p := range sl.Ports {
			name := ""
			if p.Name != (cluster.String{}) {
				name = p.Name.Value()
			}
			if name != id.Port || string(p.Protocol) != id.Protocol.String() || p.Port == 0 || sl.IPv6 != (id.Family == plan.IPv6) {
				continue
			}
			for _, ep := range sl.Endpoints {
				k := netip.AddrPortFrom(ep.Addr, p.Port)
				if usefulness(ep.Flags) >= usefulness(best[k]) {
					best[k] = ep.Flags
				}
			}
		}
	}
	usable := nowhere
	for k, f := range best {
		if usefulness(f) < 2 {
			continue
		}
		if nodeOf(k.Addr()) == "alder" {
			return here
		}
		usable = elsewhere
	}
	return usable
}

func usefulness(f cluster.EndpointFlags) int {
	switch {
	case f&(cluster.Ready|cluster.Terminating) == cluster.Ready:
		return 4
	case f&cluster.Ready != 0:
		return 3
	case f&cluster.Serving != 0 && f&cluster.Terminating != 0:
		return 2
	case f&cluster.Serving != 0:
		return 1
	}
	return 0
}

// FuzzPlanner changes facts and options as the input says: no panic, and the plan
// is the one made from scratch.
func FuzzPlanner(f *testing.F) {
	f.Add([]byte{})
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 5))
		data := make([]byte, 300)
		for i := range data {
			data[i] = byte(r.IntN(256))
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		b := &bytesChooser{data}
		w := newWorld(t, generator{b}.settings())
		w.sink.SetNode(generator{b}.node())
		for !b.empty() {
			generator{b}.step(w)
		}
		w.sync()
		w.checkFresh()
		checkInvariants(t, w.plan())
		for range 3 {
			plan.Eval(w.plan(), plan.Packet{
				Proto: plan.TCP, Src: generator{b}.address("203.0.113.%d", "2001:db8:113::%d", 3),
				Dst: anyFrontend(w.plan()), In: "eth0",
			})
		}
	})
}

// anyFrontend returns the address of the plan's first frontend that has one.
func anyFrontend(p *plan.Plan) (a netip.AddrPort) {
	for _, id := range slices.SortedFunc(maps.Keys(p.Services), plan.ID.Compare) {
		for _, f := range p.Services[id].Frontends {
			if f.Addr.IsValid() {
				return netip.AddrPortFrom(f.Addr, f.Port)
			}
		}
	}
	return netip.MustParseAddrPort("10.62.0.1:80")
}

// TestUnchanged: what is planned again and comes out alike keeps its pointer.
func TestUnchanged(t *testing.T) {
	w := newWorld(t, defaultSettings())
	r := rand.New(rand.NewPCG(1, 6))
	w.sink.SetNode(generator{r}.node())
	for range 40 {
		w.sink.SetService(generator{r}.service(generator{r}.name()))
		w.sink.SetSlice(generator{r}.slice(generator{r}.name()))
	}
	w.sync()
	before := maps.Clone(w.services)
	w.planner.SetOptions(w.settings.options(t))
	if u := w.sync(); !u.Empty() {
		t.Errorf("the same options again change %d ports, node %v, health %v, notes %v", len(u.Changed), u.Node, u.Health, u.Notes)
	}
	for id, sp := range before {
		if w.services[id] != sp {
			t.Errorf("%s was made anew", id)
		}
	}
}

// TestTriggers: the update carries the times of the slices behind it.
func TestTriggers(t *testing.T) {
	w := newWorld(t, defaultSettings())
	g := generator{rand.New(rand.NewPCG(1, 7))}
	n := cluster.Name{Namespace: "a", Name: "s"}
	w.sink.SetService(g.service(n))
	sl := g.slice(n)
	sl.Trigger = time.Now().Add(time.Hour)
	w.sink.SetSlice(sl)
	if u := w.sync(); len(u.Triggers) != 1 || !u.Triggers[0].Equal(sl.Trigger) {
		t.Errorf("have %v, want %v", u.Triggers, sl.Trigger)
	}
	if u := w.sync(); len(u.Triggers) != 0 {
		t.Errorf("have %v again", u.Triggers)
	}
}
