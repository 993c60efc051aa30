package nftables

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

// beside runs f on a thread in the namespace of the test.
func beside(t *testing.T, f func() error) <-chan error {
	t.Helper()
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		defer ns.Close()
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			ended <- err
			return
		}
		ended <- f()
	}()
	return ended
}

// edit makes random changes to the table as another program would, without a look at
// what is there: many of them are refused.
func edit(rng *rand.Rand, k nft.Tables, table nft.Table, core map[string]*nft.Set, services int) {
	set := core[[]string{setServices, setEndpoints, setClusterIPs, setEndpointAddrs}[rng.IntN(4)]]
	sp := bigService(rng.IntN(services), 3, 0)
	fr := front{Frontend: &sp.Frontends[0], key: frontKey(sp.ID.Protocol, &sp.Frontends[0]), verdict: nft.Verdict{Code: nft.Drop}}
	_, e := fr.verdictElement(sp.ID)
	switch set.Name {
	case setEndpoints:
		_, e = fr.slotElement(plan.Cluster, rng.IntN(3), sp.Pools[plan.Cluster][rng.IntN(3)].Addr)
	case setClusterIPs, setEndpointAddrs:
		e = nft.Element{Key: nft.AddrTuple(sp.Frontends[0].Addr)}
	}
	kind := nft.DeleteElements
	if rng.IntN(3) == 0 {
		kind = nft.AddElements
	}
	ops := []nft.Op{{Kind: kind, Table: table, Set: set, Elements: []nft.Element{e}}}
	if rng.IntN(10) == 0 {
		ops = []nft.Op{{Kind: nft.FlushChain, Table: table, Name: chainReject}}
	}
	_ = k.Commit(context.Background(), ops)
}

// Another program edits the table while Services change. Whatever it hits, between
// whichever commits, the end is that of a fresh start.
func TestKernelEditsBesideChanges(t *testing.T) {
	nstest.Enter(t)
	k := newKernel(t)
	b := newBackend(testEnv(plan.IPv4), k)
	const services = 200
	p := bigPlan(services, 3)
	mustApply(t, b, plan.Update{Plan: p})
	table, core := b.families[0].table, b.families[0].core

	var disturbed atomic.Bool
	seen, ready := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	watching := beside(t, func() error {
		return b.watch(ctx, ready, func(what string) {
			disturbed.Store(true)
			if strings.Contains(what, setHairpin) {
				close(seen)
			}
		})
	})
	<-ready
	editing := beside(t, func() error {
		other := &kernel.Tables{}
		defer other.Close()
		rng := rand.New(rand.NewPCG(47, 47))
		for range 500 {
			edit(rng, other, table, core, services)
		}
		pair := nft.Concat(nil).Addr(plantest.NewWorld(plan.IPv4).At("pod", 1)).Addr(plantest.NewWorld(plan.IPv4).At("pod", 1)).Proto(6).Port(9).Tuple()
		return other.Commit(context.Background(), []nft.Op{{Kind: nft.AddElements, Table: table, Set: core[setHairpin], Elements: []nft.Element{{Key: pair}}}})
	})

	rng := rand.New(rand.NewPCG(48, 48))
	u := plan.Update{Plan: p}
	step := func() {
		if disturbed.Swap(false) {
			b.Invalidate()
		}
		if err := b.Apply(context.Background(), u); err == nil {
			u.Changed = nil
		}
	}
	running := true
	for n := 0; running; n++ {
		select {
		case err := <-editing:
			if err != nil {
				t.Fatal(err)
			}
			running = false
		default:
		}
		sp := bigService(rng.IntN(services), 1+rng.IntN(5), rng.IntN(4))
		u.Changed = append(u.Changed, plan.Change{ID: sp.ID, Old: p.Services[sp.ID], New: sp})
		p.Services[sp.ID] = sp
		step()
	}
	<-seen
	for range 3 { // an Apply that is refused is repeated
		step()
	}
	other := &fake.Tables{}
	mustApply(t, newBackend(testEnv(plan.IPv4), other), plan.Update{Plan: p})
	if have, want := state(t, k, plan.IPv4), state(t, other, plan.IPv4); have != want {
		t.Errorf("in the end: %s", plantest.FirstDifference(have, want))
	}
	cancel()
	if err := <-watching; !errors.Is(err, context.Canceled) {
		t.Errorf("the watch ends with %v", err)
	}
}
