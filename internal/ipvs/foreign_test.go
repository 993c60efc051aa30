package ipvs

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/ipvs/remark"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/ipset"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// A virtual server that others made while svcproxy knew the kernel stays as it is: when a
// Service needs its address, when that is given up, after a restart, and at clean-up.
func TestForeignVirtualServerOfLater(t *testing.T) {
	for _, restarts := range []bool{false, true} {
		r := newRig()
		b := r.backend(Options{}, plan.IPv4)
		with := webPlan(func(sp *plan.ServicePort) {
			sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("203.0.113.5"), Port: 80, Route: [3]plan.Route{{SNAT: true}, {SNAT: true}, {SNAT: true}}})
		}, 1)
		without := emptyPlan(with)
		mustApply(t, b, plan.Update{Plan: without})
		admin := ipvs.VirtualServer{Key: ipvs.ByAddr(ipvs.TCP, netip.MustParseAddrPort("203.0.113.5:80")), Scheduler: "wrr", ClientBits: 32}
		if err := errors.Join(r.servers.CreateServer(admin), r.servers.CreateReal(admin.Key, ipvs.RealServer{Addr: podB, Weight: 3})); err != nil {
			t.Fatal(err)
		}
		before := r.servers.String()
		var change []plan.Change
		for id, sp := range with.Services {
			change = append(change, plan.Change{ID: id, New: sp})
		}
		err := b.Apply(t.Context(), plan.Update{Plan: with, Changed: change})
		bad, ok := errors.AsType[*dataplane.ObjectError](err)
		if !ok || bad.ID.Name != "web" || !strings.Contains(err.Error(), "not made by svcproxy") {
			t.Fatalf("have %v, want an error that names the Service", err)
		}
		if restarts {
			b = r.backend(Options{}, plan.IPv4)
		}
		b.Invalidate()
		mustApply(t, b, plan.Update{Plan: without})
		r.settle(t, b, without)
		if have := r.servers.String(); have != before {
			t.Errorf("restart %v: have\n%s\nwant\n%s", restarts, have, before)
		}
		held, err := r.tables.Read(t.Context(), table.Of(plan.IPv4))
		if err != nil || len(held.Elements[table.Servers.Name()]) != 0 {
			t.Errorf("restart %v: the record has %v, %v", restarts, held.Elements[table.Servers.Name()], err)
		}
		if err := cleanup(t.Context(), testEnv(plan.IPv4), Options{}, r.kernel()); err != nil {
			t.Fatal(err)
		}
		if have := r.servers.String(); have != before {
			t.Errorf("restart %v, cleaned up: have\n%s\nwant\n%s", restarts, have, before)
		}
	}
}

// A node port is left to others where they have a virtual server, whether that was there
// before or came later; the Service is served elsewhere, and there when they are gone.
func TestNodePortLeftToOthers(t *testing.T) {
	admin := ipvs.VirtualServer{Key: ipvs.ByAddr(ipvs.TCP, netip.AddrPortFrom(plantest.NewWorld(plan.IPv4).Node[0], 31080)), Scheduler: "wrr", ClientBits: 32}
	p := webPlan(func(sp *plan.ServicePort) {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Port: 31080, Route: [3]plan.Route{{SNAT: true}, {SNAT: true}, {SNAT: true}}})
	}, 1)
	theirs := admin.String() + "\n  -> 10.61.1.2:8080 Masq 3\n"
	for _, later := range []bool{false, true} {
		r := newRig()
		b := r.backend(Options{}, plan.IPv4)
		if later {
			mustApply(t, b, plan.Update{Plan: emptyPlan(p)})
		}
		if err := errors.Join(r.servers.CreateServer(admin), r.servers.CreateReal(admin.Key, ipvs.RealServer{Addr: podB, Weight: 3})); err != nil {
			t.Fatal(err)
		}
		mustApply(t, b, plan.Update{Plan: p, Changed: plantest.Difference(emptyPlan(p), p).Changed})
		if have, want := r.servers.String(), "TCP 10.62.0.20:80 rr\n  -> 10.61.1.1:8080 Masq 1\n"+theirs; have != want {
			t.Errorf("later %v: have\n%s\nwant\n%s", later, have, want)
		}
		notes := b.Remarks()
		if len(notes) != 1 || notes[0].Name != "web" || notes[0].Reason != remark.Taken || !strings.Contains(notes[0].Message, "31080") {
			t.Errorf("later %v: notes %+v", later, notes)
		}
		if what, _, err := b.findChange(t.Context()); what != "" || err != nil {
			t.Errorf("later %v: found %q, %v", later, what, err)
		}
		if err := r.servers.DeleteServer(admin.Key); err != nil {
			t.Fatal(err)
		}
		if what, _, err := b.findChange(t.Context()); !strings.Contains(what, "31080") || err != nil {
			t.Errorf("later %v: found %q, %v", later, what, err)
		}
		b.Invalidate()
		mustApply(t, b, plan.Update{Plan: p})
		fresh := newRig()
		mustApply(t, fresh.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
		if have, want := r.state(t), fresh.state(t); have != want {
			t.Errorf("later %v: %s", later, plantest.FirstDifference(have, want))
		}
	}
}

// What others have just done to a Service's virtual servers is no fault of the Service: a
// change of it is carried out all the same.
func TestChangeAfterInterference(t *testing.T) {
	real := ipvs.RealServer{Addr: podB, Weight: 7}
	for name, break_ := range map[string]func(*ipvs.Fake) error{
		"virtual server deleted": func(f *ipvs.Fake) error { return f.DeleteServer(webKey) },
		"real server deleted":    func(f *ipvs.Fake) error { return f.DeleteReal(webKey, podA) },
		"real server added":      func(f *ipvs.Fake) error { return f.CreateReal(webKey, real) },
	} {
		r := newRig()
		b := r.backend(Options{}, plan.IPv4)
		old := webPlan(nil, 1)
		mustApply(t, b, plan.Update{Plan: old})
		if err := break_(r.servers); err != nil {
			t.Fatal(err)
		}
		changed := webPlan(func(sp *plan.ServicePort) {
			sp.Policy = &plan.Policy{Scheduler: "lc"}
			sp.Pools[plan.Cluster][0].Weight = 2
		}, 1, 2)
		var change []plan.Change
		for id, sp := range changed.Services {
			change = append(change, plan.Change{ID: id, Old: old.Services[id], New: sp})
		}
		if err := b.Apply(t.Context(), plan.Update{Plan: changed, Changed: change}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		fresh := newRig()
		mustApply(t, fresh.backend(Options{}, plan.IPv4), plan.Update{Plan: changed})
		if have, want := r.servers.String(), fresh.servers.String(); have != want {
			t.Errorf("%s: have\n%s\nwant\n%s", name, have, want)
		}
	}
}

// The virtual servers of a kube-proxy for node ports are on no address of its own: its IP
// sets tell them, when svcproxy takes over and at clean-up. Others' stay.
func TestNodePortsOfKubeProxy(t *testing.T) {
	at := func(p ipvs.Protocol, a string) ipvs.Key { return ipvs.ByAddr(p, netip.MustParseAddrPort(a)) }
	for name, remove := range map[string]func(*rig, kernel) error{
		"take-over": func(r *rig, k kernel) error {
			p := emptyPlan(webPlan(nil))
			b := newBackend(testEnv(plan.IPv4), Options{}, k)
			err := b.Apply(t.Context(), plan.Update{Plan: p})
			r.settle(t, b, p)
			return err
		},
		"clean-up": func(_ *rig, k kernel) error { return cleanup(t.Context(), testEnv(plan.IPv4), Options{}, k) },
	} {
		r := newRig()
		k := r.kernel()
		k.sets = &ipset.Fake{
			Set:     map[string]bool{"KUBE-NODE-PORT-TCP": false, "KUBE-NODE-PORT-UDP": false},
			Entries: map[string][]uint16{"KUBE-NODE-PORT-TCP": {31080}, "KUBE-NODE-PORT-UDP": {31053}},
		}
		errs := []error{r.device.Create(t.Context()), r.device.Add(webKey.Addr.Addr())}
		for _, key := range []ipvs.Key{webKey, at(ipvs.TCP, "192.0.2.11:31080"), at(ipvs.UDP, "192.0.2.11:31053"), at(ipvs.TCP, "192.0.2.11:31053")} {
			errs = append(errs, r.servers.CreateServer(ipvs.VirtualServer{Key: key, Scheduler: "rr", ClientBits: 32}))
		}
		errs = append(errs, remove(r, k))
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if have, want := r.servers.String(), "TCP 192.0.2.11:31053 rr\n"; have != want {
			t.Errorf("%s: have\n%s\nwant\n%s", name, have, want)
		}
	}
}

// Flows of a Service that is gone keep what leads to their virtual servers when others
// delete the device and all tables.
func TestRetiredOutlivesInterference(t *testing.T) {
	r := newRig()
	b := r.backend(Options{DrainTimeout: time.Minute}, plan.IPv4)
	external := netip.MustParseAddrPort("203.0.113.5:80")
	p := webPlan(func(sp *plan.ServicePort) {
		// As with a Local policy, on a node without endpoints.
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: external.Addr(), Port: 80, Route: [3]plan.Route{{}, {}, {Verdict: plan.Drop}}})
	}, 1)
	mustApply(t, b, plan.Update{Plan: p})
	mark := ipvs.Key{}
	for k := range b.families[0].servers.All() {
		if k.Mark != 0 {
			mark = k
		}
	}
	if mark.Mark == 0 {
		t.Fatalf("no virtual server by mark:\n%s", r.servers)
	}
	r.servers.SetLive(webKey, podA, 1, 0, 0)
	r.servers.SetLive(mark, podA, 1, 0, 0)
	mustApply(t, b, plantest.Difference(p, emptyPlan(p)))
	before := r.state(t)
	if !strings.Contains(before, "203.0.113.5 . tcp . 80") {
		t.Errorf("nothing leads to the external address:\n%s", before)
	}
	r.device.LoseAll()
	if err := r.tables.Commit(t.Context(), []nft.Op{{Kind: nft.DeleteTable, Table: table.Of(plan.IPv4)}}); err != nil {
		t.Fatal(err)
	}
	b.Invalidate()
	mustApply(t, b, plan.Update{Plan: emptyPlan(p)})
	if have := r.state(t); have != before {
		t.Error(plantest.FirstDifference(have, before))
	}
	r.settle(t, b, emptyPlan(p))
	if have := r.state(t); strings.Contains(have, "203.0.113.5") || r.servers.String() != "" {
		t.Errorf("left:\n%s", have)
	}
}

// How long virtual servers are left alone after a listing follows from what the listing
// took, and not from an Apply that it had to wait for.
func TestComparisonCountsTheListingOnly(t *testing.T) {
	r := newRig()
	b := r.backend(Options{}, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: webPlan(nil, 1)})
	r.servers.Fail = func(_ int, op ipvs.Op) error {
		if op.Name == "dump" {
			r.clock = r.clock.Add(3 * time.Second)
		}
		return nil
	}
	b.mu.Lock() // as an Apply does
	found := make(chan time.Duration)
	go func() {
		_, took, err := b.findChange(t.Context())
		if err != nil {
			t.Error(err)
		}
		found <- took
	}()
	r.clock = r.clock.Add(time.Hour)
	b.mu.Unlock()
	if took := <-found; took != 3*time.Second {
		t.Errorf("it took %s", took)
	}
}
