package userspace

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
	"github.com/svcproxy/svcproxy/internal/sys/route"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// leadsNowhere returns a listener to which the tables lead and that is not open.
func (r *rig) leadsNowhere(t *testing.T) string {
	t.Helper()
	for _, f := range plan.Families {
		c, err := r.tables.Read(context.Background(), tableOf(f))
		if errors.Is(err, nft.ErrNoTable) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		open := map[netip.AddrPort]bool{}
		for id, on := range r.sockets.open {
			for cl := range listeners.Class(listeners.Classes) {
				if on[cl] && id.Family == f {
					open[netip.AddrPortFrom(cl.Addr(listeners.DefaultBlocks().Of(f)), portFor(id))] = true
				}
			}
		}
		for _, set := range []string{setListeners, setPorts} {
			for _, e := range c.Elements[set] {
				a, rest := e.Data.Addr(familyOf(f))
				port, _ := rest.Port()
				if to := netip.AddrPortFrom(a, port); !open[to] {
					return fmt.Sprintf("%s leads to %s, of %s", set, to, e.Comment)
				}
			}
		}
	}
	return ""
}

// Whatever way a plan is reached, with restarts, lost writes and others' interference,
// the tables are those of a fresh start, and what they lead to is open all the time.
func TestEndStateDoesNotDependOnThePath(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			r := newRig(t, nil)
			var last, applied *plan.Plan
			for step := range 120 {
				last = randomPlan(rng, last)
				switch rng.IntN(8) {
				case 0: // a restart: nothing is open, and is before the tables are written
					r, applied = newRig(t, r), nil
				case 1:
					r.Invalidate()
				case 2: // somebody empties what matters most
					_ = r.tables.Disturb(nft.Op{Kind: nft.FlushSet, Table: tableOf(plan.IPv4), Name: setListeners})
					r.Invalidate()
				case 3:
					_ = r.tables.Disturb(nft.Op{Kind: nft.DeleteTable, Table: tableOf(plan.IPv6)})
					r.Invalidate()
				case 4: // a write is lost
					left := rng.IntN(3)
					r.tables.Refuse = func([]nft.Op) error {
						if left--; left < 0 {
							return &nft.Error{Err: unix.ENOBUFS}
						}
						return nil
					}
					_ = r.Apply(context.Background(), plantest.Difference(applied, last))
					r.tables.Refuse = nil
				}
				r.mustApply(t, plantest.Difference(applied, last))
				applied = last
				if where := r.leadsNowhere(t); where != "" {
					t.Fatalf("step %d: %s", step, where)
				}
				if step%5 != 0 {
					continue
				}
				other := newRig(t, nil)
				other.mustApply(t, plan.Update{Plan: last})
				for _, f := range plan.Families {
					if have, want := state(t, r.tables, f), state(t, other.tables, f); have != want {
						t.Fatalf("step %d, %s: %s", step, f, plantest.FirstDifference(have, want))
					}
				}
				if len(r.sockets.open) != len(last.Services) {
					t.Fatalf("step %d: %d Service ports are served, want %d", step, len(r.sockets.open), len(last.Services))
				}
			}
		})
	}
}

// Before anything is written that leads to a listener, it is open; before one is
// closed, nothing leads there.
func TestListenersAreOpenWheneverTablesLeadThere(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	r := newRig(t, nil)
	r.tables.Refuse = func([]nft.Op) error {
		if where := r.leadsNowhere(t); where != "" {
			t.Error(where)
		}
		return nil
	}
	var last *plan.Plan
	for range 200 {
		next := randomPlan(rng, last)
		r.mustApply(t, plantest.Difference(last, next))
		last = next
	}
}

// Packets meet what plan.Eval says: refused, dropped, or led to the listener of the
// Service's class.
func TestPacketsAsPlanned(t *testing.T) {
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 3))
		r := newRig(t, nil)
		p := randomPlan(rng, nil)
		for range 12 {
			p = randomPlan(rng, p)
		}
		r.mustApply(t, plan.Update{Plan: p})
		for _, f := range plan.Families {
			c, err := r.tables.Read(context.Background(), tableOf(f))
			if err != nil {
				t.Fatal(err)
			}
			tables := walk.New(familyOf(f), c)
			for _, pkt := range packets(f) {
				comparePacket(t, p, tables, pkt)
			}
		}
	}
}

// packets are first packets from everywhere to everything.
func packets(f plan.Family) (out []plan.Packet) {
	var to []netip.AddrPort
	for n := range 13 {
		for _, port := range []uint16{80, 81, 82} {
			to = append(to, netip.AddrPortFrom(at(f, "service", n+1), port))
		}
		for _, port := range []uint16{90, 91, 92} {
			to = append(to, netip.AddrPortFrom(at(f, "external", n+1), port), netip.AddrPortFrom(at(f, "external", n+100), port),
				netip.AddrPortFrom(at(f, "service", n+100), port))
		}
	}
	for n := range 24 {
		to = append(to, netip.AddrPortFrom(at(f, "node", 11), uint16(30000+n)), netip.AddrPortFrom(at(f, "node", 21), uint16(30000+n)))
	}
	to = append(to, netip.AddrPortFrom(at(f, "client", 9), 80))
	for _, dst := range to {
		for _, proto := range []plan.Protocol{plan.TCP, plan.UDP, plan.SCTP} {
			out = append(out,
				plan.Packet{Proto: proto, Src: at(f, "pod", 1), Dst: dst, In: "cni0"},
				plan.Packet{Proto: proto, Src: at(f, "client", 7), Dst: dst, In: "eth0"},
				plan.Packet{Proto: proto, Src: at(f, "node", 11), Dst: dst})
		}
	}
	return out
}

func comparePacket(t *testing.T, p *plan.Plan, tables *walk.Tables, pkt plan.Packet) {
	t.Helper()
	want := plan.Eval(p, pkt)
	outcome, have := send(tables, pkt, 0)
	to := netip.AddrPort{}
	if outcome == plan.Forwarded {
		to = have.Dst
	}
	wanted, wantTo := want.Outcome, netip.AddrPort{}
	if wanted == plan.Forwarded {
		if want.Service.Protocol == plan.SCTP {
			wanted = plan.Refused
		} else {
			cl := listeners.ClassOf(want.Frontend.Route[want.Origin])
			wantTo = netip.AddrPortFrom(cl.Addr(listeners.DefaultBlocks().Of(want.Service.Family)), portFor(want.Service))
		}
	}
	if outcome != wanted || to != wantTo {
		t.Errorf("%+v: %s %s, want %s %s (%s)", pkt, outcome, to, wanted, wantTo, want)
	}
}

// send has a packet pass the tables; choice is what every random one comes to.
func send(tables *walk.Tables, pkt plan.Packet, choice uint32) (plan.Outcome, walk.Fate) {
	have := tables.Send(walk.Packet{Proto: uint8(pkt.Proto), Src: pkt.Src, Dst: pkt.Dst, In: pkt.In, SrcLocal: pkt.In == ""},
		func(n uint32) uint32 { return choice % n })
	switch {
	case have.Rejected:
		return plan.Refused, have
	case have.Dropped:
		return plan.Dropped, have
	case have.Dst != pkt.Dst:
		return plan.Forwarded, have
	}
	return plan.Pass, have
}

// A UDP flow survives as long as it leads to a listener of its destination.
func TestStaleFlows(t *testing.T) {
	r := newRig(t, nil)
	vip, node, other := netip.MustParseAddrPort("10.62.0.20:80"), netip.MustParseAddrPort("192.0.2.11:31080"), netip.MustParseAddrPort("192.0.2.11:53")
	some := webPlan(plan.UDP, 5)
	port := portFor(plan.ID{Namespace: "default", Name: "web", Port: "http", Protocol: plan.UDP, Family: plan.IPv4})
	kept := netip.AddrPortFrom(listeners.ClassOf(plan.Route{}).Addr(listeners.DefaultBlocks().V4), port)
	hidden := netip.AddrPortFrom(listeners.ClassOf(plan.Route{SNAT: true}).Addr(listeners.DefaultBlocks().V4), port)
	// What began before the Service was there is not translated.
	r.flows[[2]netip.AddrPort{vip, vip}], r.flows[[2]netip.AddrPort{node, node}], r.flows[[2]netip.AddrPort{other, other}] = 1, 1, 1
	r.mustApply(t, plantest.Difference(nil, some))
	wantFlows(t, r, [][2]netip.AddrPort{{other, other}})

	r.flows[[2]netip.AddrPort{vip, kept}], r.flows[[2]netip.AddrPort{vip, hidden}], r.flows[[2]netip.AddrPort{node, hidden}] = 1, 1, 1
	r.flows[[2]netip.AddrPort{node, kept}] = 1 // of a node port that kept clients' addresses once
	r = newRig(t, r)
	r.mustApply(t, plan.Update{Plan: some})
	wantFlows(t, r, [][2]netip.AddrPort{{other, other}, {vip, kept}, {vip, hidden}, {node, hidden}})

	more := webPlan(plan.UDP, 6, 7) // the relay moves them
	r.mustApply(t, plantest.Difference(some, more))
	wantFlows(t, r, [][2]netip.AddrPort{{other, other}, {vip, kept}, {vip, hidden}, {node, hidden}})
	none := webPlan(plan.UDP)
	r.mustApply(t, plantest.Difference(more, none))
	wantFlows(t, r, [][2]netip.AddrPort{{other, other}})

	r.mustApply(t, plantest.Difference(none, some))
	r.flows[[2]netip.AddrPort{vip, kept}] = 1
	gone := &plan.Plan{Node: some.Node, Services: map[plan.ID]*plan.ServicePort{}}
	r.mustApply(t, plantest.Difference(some, gone))
	wantFlows(t, r, [][2]netip.AddrPort{{other, other}})
}

func wantFlows(t *testing.T, r *rig, want [][2]netip.AddrPort) {
	t.Helper()
	if len(r.flows) != len(want) {
		t.Errorf("flows %v, want %v", r.flows, want)
	}
	for _, k := range want {
		if r.flows[k] == 0 {
			t.Errorf("flow %v is gone", k)
		}
	}
}

// A Service port that cannot be listened for is named; the others are served.
func TestOneBadServicePort(t *testing.T) {
	r := newRig(t, nil)
	r.sockets.refuse = true
	p := webPlan(plan.TCP, 5)
	err := r.Apply(context.Background(), plantest.Difference(nil, p))
	var bad *dataplane.ObjectError
	if !errors.As(err, &bad) || bad.ID.Name != "web" {
		t.Fatalf("Apply: %v, want an error of default/web", err)
	}
	r.sockets.refuse = false
	r.mustApply(t, plantest.Difference(nil, p))
	if got := state(t, r.tables, plan.IPv4); !strings.Contains(got, "10.62.0.20") {
		t.Errorf("the Service is not served:\n%s", got)
	}
}

// Restarting with nothing changed writes nothing.
func TestRestartWritesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	r := newRig(t, nil)
	p := randomPlan(rng, nil)
	for range 10 {
		p = randomPlan(rng, p)
	}
	r.mustApply(t, plan.Update{Plan: p})
	commits := r.tables.Commits()
	r = newRig(t, r)
	r.mustApply(t, plan.Update{Plan: &plan.Plan{Node: p.Node}, Partial: true})
	r.mustApply(t, plan.Update{Plan: p})
	if n := r.tables.Commits() - commits; n > 0 {
		t.Errorf("%d commits", n)
	}
}

// Clean-up leaves nothing of ours and everything of others; a second one has nothing to do.
func TestCleanup(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	foreign := nft.Table{Family: nft.IPv4, Name: "foreign"}
	if err := r.tables.Commit(ctx, []nft.Op{{Kind: nft.AddTable, Table: foreign}}); err != nil {
		t.Fatal(err)
	}
	r.mustApply(t, plantest.Difference(nil, webPlan(plan.TCP, 5)))
	for _, e := range []bool{true, false} {
		if found, err := inForce(ctx, r.tables); err != nil || found != e {
			t.Errorf("in force: %t, %v, want %t", found, err, e)
		}
		if err := cleanup(ctx, r.env, r.host); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := r.routing.List(ctx); len(left) > 0 {
		t.Errorf("routes left: %v", left)
	}
	if ok, _ := r.tables.Exists(ctx, foreign); !ok {
		t.Error("a foreign table is gone")
	}
}

// Others' changes are noticed and repaired by the next Apply.
func TestInterference(t *testing.T) {
	r := newRig(t, nil)
	p := webPlan(plan.TCP, 5)
	r.mustApply(t, plantest.Difference(nil, p))
	before, routes := state(t, r.tables, plan.IPv4), mustRoutes(t, r)
	ctx, cancel := context.WithCancel(context.Background())
	heard, tables, watched := make(chan string, 16), make(chan struct{}), make(chan struct{})
	ended := make(chan error)
	go func() { ended <- r.watch(ctx, tables, watched, func(what string) { heard <- what }) }()
	<-tables
	<-watched
	if err := r.tables.Disturb(nft.Op{Kind: nft.DeleteTable, Table: tableOf(plan.IPv4)}); err != nil {
		t.Fatal(err)
	}
	<-heard
	if err := r.routing.Delete(ctx, routes[0]); err != nil {
		t.Fatal(err)
	}
	<-heard
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the watch ended with %v", err)
	}
	r.Invalidate()
	r.mustApply(t, plan.Update{Plan: p})
	if after := state(t, r.tables, plan.IPv4); after != before {
		t.Error(plantest.FirstDifference(after, before))
	}
	for _, e := range routes {
		if !slices.Contains(mustRoutes(t, r), e) {
			t.Errorf("%s is not back", e)
		}
	}
}

func mustRoutes(t *testing.T, r *rig) []route.Entry {
	t.Helper()
	out, err := r.routing.List(context.Background())
	if err != nil || len(out) == 0 {
		t.Fatal(out, err)
	}
	return out
}

// An SCTP port is refused and remarked on once.
func TestSCTPIsRemarkedOn(t *testing.T) {
	r := newRig(t, nil)
	p := webPlan(plan.SCTP, 5)
	r.mustApply(t, plantest.Difference(nil, p))
	r.mustApply(t, plantest.Difference(p, webPlan(plan.SCTP, 6)))
	notes := r.Remarks()
	if len(notes) != 1 || notes[0].Name != "web" || !notes[0].Warning || !strings.Contains(notes[0].Message, "http") {
		t.Errorf("remarks %+v", notes)
	}
	if more := r.Remarks(); len(more) > 0 {
		t.Errorf("again: %+v", more)
	}
}

// Diff says what an Apply would write, and nothing after one.
func TestDiff(t *testing.T) {
	r := newRig(t, nil)
	p := webPlan(plan.TCP, 5)
	ctx := context.Background()
	if lines, err := r.Diff(ctx, p); err != nil || len(lines) == 0 {
		t.Fatalf("%q, %v, want differences", lines, err)
	}
	r.mustApply(t, plantest.Difference(nil, p))
	if lines, err := r.Diff(ctx, p); err != nil || len(lines) > 0 {
		t.Errorf("%q, %v, want none", lines, err)
	}
	if lines, err := r.Diff(ctx, webPlan(plan.TCP)); err != nil || len(lines) == 0 {
		t.Errorf("%q, %v, want differences", lines, err)
	}
}
