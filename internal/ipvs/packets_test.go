package ipvs

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/walk"
)

// planned is what the plan says; but for whom ip_vs masquerades the node itself is
// always told, since its packets may have the Service's address as source.
func planned(p *plan.Plan, pkt plan.Packet) plantest.Fate {
	r := plan.Eval(p, pkt)
	out := plantest.Fate{Outcome: r.Outcome, Shares: map[string]float64{}}
	for _, e := range r.Endpoints {
		out.Shares[plantest.Arrival(e.Addr, e.SNAT || r.Origin == plan.FromNode)] += e.Share
	}
	return out
}

// Where ip_vs stands among the base chains (ip_vs_ops in ip_vs_core.c).
const (
	first      = math.MinInt32
	last       = math.MaxInt32
	ipvsInput  = 99
	ipvsOutput = -98
)

// path carries packets through our table and ip_vs.
type path struct {
	tables  *walk.Tables
	servers map[ipvs.Key]ipvs.Entry
	local   map[netip.Addr]bool // addresses of the host
	family  plan.Family
	steered uint32
}

// walked is what becomes of a packet, over all endpoints.
func (w *path) walked(t testing.TB, p *plan.Plan, pkt plan.Packet) plantest.Fate {
	t.Helper()
	begin := func() *walk.Journey {
		return w.tables.Begin(walk.Packet{
			Proto: uint8(pkt.Proto), Src: pkt.Src, Dst: pkt.Dst, In: pkt.In, SrcLocal: slices.Contains(p.Node.Addrs, pkt.Src),
		}, nil)
	}
	j := begin()
	server, o := w.toServer(j, pkt)
	if server == nil {
		return plantest.Fate{Outcome: o, Shares: map[string]float64{}}
	}
	out := plantest.Fate{Outcome: plan.Forwarded, Shares: map[string]float64{}}
	total := 0
	for _, r := range server.Real {
		total += int(r.Weight)
	}
	if total == 0 {
		return plantest.Fate{Outcome: plan.Refused, Shares: map[string]float64{}} // ip_vs answers with ICMP
	}
	for _, r := range server.Real {
		if r.Weight == 0 {
			continue
		}
		j := begin()
		w.toServer(j, pkt)
		j.Deliver(r.Addr)
		if !j.Pass(nft.Output, first, last) || !j.Pass(nft.Postrouting, first, last) {
			t.Fatalf("%+v: ends behind ip_vs", pkt)
		}
		f := j.Fate()
		if f.Mark != 0 {
			t.Errorf("%+v: leaves with mark %#x", pkt, f.Mark)
		}
		out.Shares[plantest.Arrival(r.Addr, f.Masqueraded)] += float64(r.Weight) / float64(total)
	}
	return out
}

// toServer brings a packet to its virtual server; nil if it ends before or needs none.
func (w *path) toServer(j *walk.Journey, pkt plan.Packet) (*ipvs.Entry, plan.Outcome) {
	ended := func() plan.Outcome {
		if j.Fate().Rejected {
			return plan.Refused
		}
		return plan.Dropped
	}
	hook, at := nft.Output, int32(ipvsOutput)
	if pkt.In != "" {
		if !j.Pass(nft.Prerouting, first, last) {
			return nil, ended()
		}
		if !w.local[pkt.Dst.Addr()] && j.Mark() != w.steered {
			if !j.Pass(nft.Forward, first, last) {
				return nil, ended()
			}
			return nil, plan.Pass
		}
		hook, at = nft.Input, ipvsInput
	}
	if !j.Pass(hook, first, at) {
		return nil, ended()
	}
	for _, k := range []ipvs.Key{ipvs.ByMark(table.ServerFamilyOf(w.family), j.Mark()), ipvs.ByAddr(ipvs.Protocol(pkt.Proto), pkt.Dst)} {
		if e, ok := w.servers[k]; ok {
			return &e, 0
		}
	}
	if !j.Pass(hook, at, last) {
		return nil, ended()
	}
	return nil, plan.Pass
}

// Packets meet in the tables and in ip_vs what the plan says about them.
func TestPacketsAsPlanned(t *testing.T) {
	for _, f := range plan.Families {
		for seed := range uint64(2 * plantest.LocalWays) {
			t.Run(fmt.Sprintf("%s/%d", f, seed), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, uint64(f)))
				r := newRig()
				b := r.backend(Options{}, f)
				var p, before *plan.Plan
				for range 12 {
					p = plantest.RandomPlan(rng, p, f)
					p.Node = plantest.RandomNode(rng, int(seed)%plantest.LocalWays, f)
					mustApply(t, b, plantest.Difference(before, p))
					before = p
				}
				r.settle(t, b, p)
				w := r.path(t, p, f)
				for _, pkt := range plantest.PacketsFor(rng, p, plantest.NewWorld(f)) {
					if have, want := w.walked(t, p, pkt), planned(p, pkt); !have.Equal(want) {
						t.Fatalf("packet %+v:\nhave %v\nwant %v (%+v)\n%s", pkt, have, want, plan.Eval(p, pkt).Frontend, r.state(t))
					}
				}
			})
		}
	}
}

func (r *rig) path(t testing.TB, p *plan.Plan, f plan.Family) *path {
	t.Helper()
	c, err := r.tables.Read(context.Background(), table.Of(f))
	if err != nil {
		t.Fatal(err)
	}
	all, err := r.servers.Dump(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	w := &path{
		tables: walk.New(table.FamilyOf(f), c), servers: map[ipvs.Key]ipvs.Entry{}, local: map[netip.Addr]bool{}, family: f,
		steered: table.MarkOf(table.SteerID, testEnv(f).MasqueradeBit),
	}
	for _, e := range all {
		w.servers[e.Key] = e
	}
	bound, _ := r.device.Addrs()
	for _, a := range slices.Concat(p.Node.Addrs, bound) {
		w.local[a] = true
	}
	return w
}
