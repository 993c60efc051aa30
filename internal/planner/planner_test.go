package planner_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

func TestFirst(t *testing.T) {
	w := newWorld(t, defaultSettings())
	w.apply([]byte(alder))
	w.apply([]byte(`
kind: Service
metadata: {name: a, namespace: aaa}
spec: {clusterIP: 10.62.0.3, ports: [{port: 80}]}
---
kind: Service
metadata: {name: kubernetes, namespace: default}
spec: {clusterIP: 10.62.0.1, ports: [{port: 443}]}
---
kind: Service
metadata: {name: names, namespace: kube-system}
spec: {clusterIP: 10.62.0.10, ports: [{port: 53, protocol: UDP}]}
`))
	u := w.planner.First()
	w.take(u)
	if !u.Partial || !u.Node {
		t.Errorf("Partial %v, Node %v, want both", u.Partial, u.Node)
	}
	if have, want := ids(u), "default/kubernetes kube-system/names"; have != want {
		t.Errorf("First plans %s, want %s", have, want)
	}
	u = w.sync()
	if u.Partial {
		t.Error("the update after First is partial")
	}
	if have, want := ids(u), "aaa/a"; have != want {
		t.Errorf("the update after First plans %s, want %s", have, want)
	}
	w.checkFresh()

	all := planner.New(w.state, w.settings.options(t)).Update()
	if have, want := ids(all), "default/kubernetes kube-system/names aaa/a"; have != want {
		t.Errorf("an update without First plans %s, want %s", have, want)
	}
}

func ids(u plan.Update) string {
	var out []string
	for _, c := range u.Changed {
		out = append(out, c.ID.String())
	}
	return strings.Join(out, " ")
}

const webAndOdd = `
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.62.0.20, ports: [{port: 80}]}
---
kind: Service
metadata: {name: odd, namespace: default}
spec: {clusterIP: 10.62.0.21, ports: [{port: 80}]}
`

func oddSlice(addr string) []byte {
	return []byte(fmt.Sprintf(`
kind: EndpointSlice
metadata: {name: odd-1, namespace: default, labels: {kubernetes.io/service-name: odd}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [%s]}]
`, addr))
}

// TestHold is R-44 as far as the planner goes: one port stays at its last good
// version while everything else goes on.
func TestHold(t *testing.T) {
	odd := plan.ID{Namespace: "default", Name: "odd", Protocol: plan.TCP, Family: plan.IPv4}
	setup := func(t *testing.T) (w *world, good, bad *plan.ServicePort) {
		w = newWorld(t, defaultSettings())
		w.apply([]byte(alder + "---" + webAndOdd))
		w.apply(oddSlice("10.61.2.1"))
		w.sync()
		good = w.services[odd]
		w.apply(oddSlice("10.61.2.2"))
		w.sync()
		return w, good, w.services[odd]
	}
	t.Run("last good version", func(t *testing.T) {
		w, good, bad := setup(t)
		w.planner.Hold(odd, good)
		if u := w.sync(); ids(u) != "default/odd" || w.services[odd] != good {
			t.Errorf("after Hold %s changed, odd is\n%s", ids(u), w.services[odd])
		}
		w.planner.SetOptions(w.settings.options(t)) // plans all again
		if u := w.sync(); !u.Empty() || w.services[odd] != good {
			t.Errorf("planning again ends the Hold: %s", ids(u))
		}
		w.planner.Release(odd)
		w.sync()
		if !w.services[odd].Equal(bad) {
			t.Errorf("after Release odd is\n%s", w.services[odd])
		}
		w.checkFresh()
	})
	t.Run("out of the plan", func(t *testing.T) {
		w, _, bad := setup(t)
		w.planner.Hold(odd, nil)
		w.sync()
		if len(w.services) != 1 || w.services[odd] != nil {
			t.Errorf("plan is\n%s", w.plan())
		}
		w.planner.Hold(odd, nil) // again, as a retry that fails would
		if u := w.sync(); !u.Empty() {
			t.Errorf("the second Hold changes %s", ids(u))
		}
		w.planner.Release(odd)
		w.sync()
		if !w.services[odd].Equal(bad) {
			t.Errorf("after Release odd is\n%s", w.services[odd])
		}
	})
	t.Run("new facts end it", func(t *testing.T) {
		w, good, _ := setup(t)
		w.planner.Hold(odd, good)
		w.sync()
		w.apply(oddSlice("10.61.2.3"))
		w.sync()
		w.checkFresh()
		if planner.Held(w.planner) != planner.Held(setupFresh(t, w)) {
			t.Error("the Hold is still remembered")
		}
	})
	t.Run("deletion ends it", func(t *testing.T) {
		w, good, _ := setup(t)
		w.planner.Hold(odd, good)
		w.sync()
		w.delete([]byte("Service default/odd"))
		w.sync()
		w.checkFresh()
		if w.services[odd] != nil {
			t.Error("odd is still there")
		}
	})
	t.Run("against removal", func(t *testing.T) {
		w, _, bad := setup(t)
		w.delete([]byte("Service default/odd"))
		w.sync()
		w.planner.Hold(odd, bad)
		w.sync()
		if w.services[odd] != bad {
			t.Error("odd is not held")
		}
		w.planner.Release(odd)
		w.sync()
		if w.services[odd] != nil {
			t.Error("odd is still there after Release")
		}
	})
	t.Run("against removal, then wanted again", func(t *testing.T) {
		w, _, bad := setup(t)
		w.delete([]byte("Service default/odd"))
		w.sync()
		w.planner.Hold(odd, bad)
		w.sync()
		w.apply([]byte(webAndOdd))
		w.apply(oddSlice("10.61.2.4"))
		w.sync()
		w.checkFresh()
	})
	t.Run("unknown", func(t *testing.T) {
		w, _, _ := setup(t)
		w.planner.Release(plan.ID{Namespace: "default", Name: "nobody"})
		w.planner.Hold(plan.ID{Namespace: "default", Name: "nobody"}, nil)
		if u := w.sync(); !u.Empty() {
			t.Errorf("changes %s", ids(u))
		}
	})
}

// setupFresh returns a planner of the facts of w that has planned them.
func setupFresh(t *testing.T, w *world) *planner.Planner {
	p := planner.New(w.state, w.settings.options(t))
	p.Update()
	return p
}

// TestNotesOnce: R-60, a remark is in one update, not in every one, until it
// changes.
func TestNotesOnce(t *testing.T) {
	w := newWorld(t, defaultSettings())
	w.apply([]byte(alder))
	mixed := `
kind: Service
metadata: {name: mix, namespace: default, uid: mix-1}
spec: {type: LoadBalancer, clusterIP: 10.62.0.95, loadBalancerSourceRanges: ["%s"], ports: [{port: 80}]}
status: {loadBalancer: {ingress: [{ip: 203.0.113.95}]}}
`
	w.apply([]byte(fmt.Sprintf(mixed, "2001:db8:51::/48")))
	w.sync()
	for i := range 100 {
		w.apply([]byte(fmt.Sprintf(`
kind: EndpointSlice
metadata: {name: mix-1, namespace: default, labels: {kubernetes.io/service-name: mix}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.61.2.%d]}]
`, i)))
		w.sync()
	}
	count := func() (n int) {
		for _, note := range w.noted {
			if note.Reason == planner.SourceRangesIgnored {
				n++
				if note.Kind != "Service" || note.Namespace != "default" || note.Name != "mix" || note.UID != "mix-1" || !note.Warning {
					t.Errorf("note %+v", note)
				}
			}
		}
		return n
	}
	if n := count(); n != 1 {
		t.Errorf("the note came %d times, want once", n)
	}
	w.apply([]byte(fmt.Sprintf(mixed, "2001:db8:52::/48")))
	w.sync()
	if n := count(); n != 2 {
		t.Errorf("after a change the note has come %d times, want twice", n)
	}
}

func TestReady(t *testing.T) {
	state := cluster.NewState(time.Now)
	sink := state.Sink("test", cluster.Services, cluster.Nodes)
	s := defaultSettings()
	opt := s.options(t)
	p := planner.New(state, opt)
	missing := func() string {
		ok, m := p.Ready()
		if ok != (len(m) == 0) {
			t.Errorf("Ready says %v but misses %v", ok, m)
		}
		return strings.Join(m, "; ")
	}
	if m := missing(); !strings.Contains(m, "test Service") || !strings.Contains(m, "test Node") || strings.Contains(m, "alder") {
		t.Errorf("at first it misses %q", m)
	}
	sink.Synced(cluster.Services)
	sink.Synced(cluster.Nodes)
	if m := missing(); !strings.Contains(m, `no Node named "alder"`) || !strings.Contains(m, "--hostname-override") {
		t.Errorf("without a Node it misses %q", m)
	}
	opt.NodeOptional = true
	p.SetOptions(opt)
	if m := missing(); m != "" {
		t.Errorf("with an optional Node it misses %q", m)
	}
	opt.Local.Kind = planner.NodeCIDR
	p.SetOptions(opt)
	if m := missing(); !strings.Contains(m, "no Node") {
		t.Errorf("NodeCIDR without a Node misses %q", m)
	}
	sink.SetNode(&cluster.Node{Name: "alder"})
	if m := missing(); !strings.Contains(m, "podCIDRs") {
		t.Errorf("NodeCIDR without pod ranges misses %q", m)
	}
	sink.SetNode(&cluster.Node{Name: "alder", PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.61.1.0/24")}})
	if m := missing(); m != "" {
		t.Errorf("with all there it misses %q", m)
	}
}

func TestChanged(t *testing.T) {
	w := newWorld(t, defaultSettings())
	w.sync()
	select {
	case <-w.planner.Changed():
	default:
	}
	w.apply([]byte(webAndOdd))
	select {
	case <-w.planner.Changed():
	default:
		t.Error("a new Service wakes nobody")
	}
}

// TestShared: equal lists are one list in memory.
func TestShared(t *testing.T) {
	w := newWorld(t, defaultSettings())
	w.apply([]byte(alder + `---
kind: Service
metadata: {name: dns, namespace: default}
spec: {type: NodePort, clusterIP: 10.62.0.20, externalTrafficPolicy: Local, ports: [{name: u, port: 53, protocol: UDP, nodePort: 31053}, {name: t, port: 53, protocol: TCP, nodePort: 31053}]}
---
kind: EndpointSlice
metadata: {name: dns-1, namespace: default, labels: {kubernetes.io/service-name: dns}}
addressType: IPv4
ports: [{name: u, port: 53, protocol: UDP}, {name: t, port: 53, protocol: TCP}]
endpoints: [{addresses: [10.61.1.1], nodeName: alder}, {addresses: [10.61.1.2], nodeName: alder}]
`))
	w.sync()
	var first *plan.Endpoint
	for id, sp := range w.services {
		for _, pool := range sp.Pools {
			if id.Family == plan.IPv4 && len(pool) != 2 {
				t.Fatalf("%s has %v", id, sp.Pools)
			}
			if first == nil {
				first = &pool[0]
			} else if &pool[0] != first {
				t.Errorf("%s holds a list of its own", id)
			}
		}
	}
}

// TestOptionsAreCopied: what the caller does with his slices later is his.
func TestOptionsAreCopied(t *testing.T) {
	s := defaultSettings()
	opt := s.options(t)
	state := cluster.NewState(time.Now)
	p := planner.New(state, opt)
	opt.Local.CIDRs[0] = netip.MustParsePrefix("192.0.2.0/24")
	opt.Families[0] = plan.IPv6
	n := p.Update().Plan.Node
	if l := n.Local[plan.IPv4]; !slices.Equal(l.Prefixes, []netip.Prefix{netip.MustParsePrefix("10.61.0.0/16")}) {
		t.Errorf("pods are recognised %s", l)
	}
}

// TestDuplicateOrder: which of two equally useful endpoints of one address counts
// does not depend on their order.
func TestDuplicateOrder(t *testing.T) {
	twins := [][2]string{
		{"10.61.2.9 node=alder", "10.61.2.9 node=birch"},
		{"10.61.2.9 zones=z1", "10.61.2.9 zones=z2"},
		{"10.61.2.9 nodes=alder", "10.61.2.9 nodes=birch"},
	}
	for _, pair := range twins {
		texts := map[string]bool{}
		for _, order := range [][]string{{pair[0], pair[1]}, {pair[1], pair[0]}} {
			w := newWorld(t, defaultSettings())
			w.apply([]byte(alder + "---" + webAndOdd))
			n := cluster.Name{Namespace: "default", Name: "web"}
			sl := &cluster.Slice{Name: n, Service: n.Name, Ports: []cluster.SlicePort{{Name: cluster.Intern(""), Protocol: "TCP", Port: 8080}}}
			for _, e := range append(order, "10.61.2.8 nodes=alder zones=z1") {
				sl.Endpoints = append(sl.Endpoints, mustEndpoint(t, e))
			}
			w.sink.SetSlice(sl)
			w.sync()
			texts[w.plan().String()] = true
		}
		if len(texts) != 1 {
			t.Errorf("%v: the plan depends on their order", pair)
		}
	}
}
