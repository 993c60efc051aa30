package ipvs

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
)

// inUse is a kernel in which the mode is in force and has an open connection, and the
// plan that it carries out.
func inUse(t *testing.T) (*rig, *plan.Plan) {
	t.Helper()
	r := newRig()
	r.routing.Source4 = netip.MustParseAddr("192.0.2.11")
	p := webPlan(func(sp *plan.ServicePort) {
		external := sp.Frontends[0]
		external.Kind, external.Addr = plan.ExternalIP, netip.MustParseAddr("203.0.113.9")
		sp.Frontends = append(sp.Frontends, external)
	}, 1, 2)
	mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
	r.servers.SetLive(webKey, podA, 1, 0, 0)
	return r, p
}

// mustDrain goes on with a hand-over and checks that connections are waited for.
func (h *handover) mustDrain(t *testing.T, r *rig, connections int) {
	t.Helper()
	err := h.next(t.Context(), testEnv(plan.IPv4), Options{DrainTimeout: time.Hour}, r.kernel())
	draining, ok := errors.AsType[*dataplane.Draining](err)
	if !ok || draining.Connections != connections {
		t.Fatalf("have %v, want %d open connections", err, connections)
	}
	if yes, err := inForce(t.Context(), r.kernel()); err != nil || yes {
		t.Errorf("in force: %t, %v", yes, err)
	}
}

func (h *handover) mustEnd(t *testing.T, r *rig) {
	t.Helper()
	if err := h.next(t.Context(), testEnv(plan.IPv4), Options{DrainTimeout: time.Hour}, r.kernel()); err != nil {
		t.Fatal(err)
	}
	if have, want := r.state(t), newRig().state(t); have != want {
		t.Error(plantest.FirstDifference(have, want))
	}
}

// When another mode takes over, new flows are its own at once; open connections keep
// their virtual servers, addresses and routes until they have ended, and a connection
// that is being made is waited for.
func TestHandOver(t *testing.T) {
	r, _ := inUse(t)
	servers, device := r.servers.String(), r.device.String()
	h := &handover{}
	h.mustDrain(t, r, 1)
	if r.servers.String() != servers || r.device.String() != device {
		t.Error("virtual servers or addresses are gone")
	}
	if have := r.tables.String(); strings.Contains(have, "nat-prerouting") || !strings.Contains(have, "steer-prerouting") || !strings.Contains(have, "ct status") {
		t.Errorf("the table is\n%s", have)
	}
	if have := r.state(t); !strings.Contains(have, "route local 10.62.0.20/32 dev lo table 255 proto 115 src 192.0.2.11") {
		t.Errorf("the node's own connections still begin at the Service's address:\n%s", have)
	}
	r.servers.SetLive(webKey, podA, 0, 0, 0)
	h.mustEnd(t, r)

	r, _ = inUse(t)
	r.servers.SetLive(webKey, podA, 0, 0, 0)
	h.mustDrain(t, r, 0)
	h.mustEnd(t, r)
}

// A hand-over goes on after a restart, and ends at the deadline.
func TestHandOverEnds(t *testing.T) {
	r, _ := inUse(t)
	(&handover{}).mustDrain(t, r, 1)
	h := &handover{}
	h.mustDrain(t, r, 1)
	r.clock = r.clock.Add(time.Hour)
	h.mustEnd(t, r)
}

// Where nothing of the mode is there, nothing is waited for.
func TestHandOverOfNothing(t *testing.T) {
	(&handover{}).mustEnd(t, newRig())
}

// A mode that comes back while connections drain ends as if it had never gone.
func TestHandOverIsTakenBack(t *testing.T) {
	r, p := inUse(t)
	before := r.state(t)
	(&handover{}).mustDrain(t, r, 1)
	mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
	if have := r.state(t); have != before {
		t.Error(plantest.FirstDifference(have, before))
	}
}

// Once it is given up a table leaves new flows alone, but for those to addresses on the
// device that nobody translated.
func TestGivenUp(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 21))
		p := plantest.RandomPlan(rng, nil, plan.IPv4)
		r := newRig()
		mustApply(t, r.backend(Options{}, plan.IPv4), plan.Update{Plan: p})
		(&handover{}).mustDrain(t, r, 0)
		held, err := r.tables.Read(t.Context(), table.Of(plan.IPv4))
		if err != nil {
			t.Fatal(err)
		}
		tables := walk.New(nft.IPv4, held)
		bound, err := r.device.Addrs()
		if err != nil {
			t.Fatal(err)
		}
		for _, pkt := range plantest.PacketsFor(rng, p, plantest.NewWorld(plan.IPv4)) {
			begin := func() *walk.Journey {
				return tables.Begin(walk.Packet{Proto: uint8(pkt.Proto), Src: pkt.Src, Dst: pkt.Dst, In: pkt.In}, nil)
			}
			for _, hooks := range [][]nft.HookNum{{nft.Prerouting, nft.Forward, nft.Postrouting}, {nft.Output, nft.Postrouting}} {
				j := begin()
				for _, h := range hooks {
					if !j.Pass(h, first, last) {
						t.Errorf("%+v ends in %v", pkt, h)
					}
				}
				if f := j.Fate(); f.Mark != 0 || f.Masqueraded || f.Dst != pkt.Dst {
					t.Errorf("%+v is changed: %+v", pkt, f)
				}
			}
			if passes := begin().Pass(nft.Input, first, last); passes == slices.Contains(bound, pkt.Dst.Addr()) {
				t.Errorf("%+v passes to the node: %t", pkt, passes)
			}
		}
	}
}
