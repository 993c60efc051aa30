package nftables

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

func newKernel(t *testing.T) *kernel.Tables {
	t.Helper()
	k := &kernel.Tables{}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return k
}

func TestKernelIsSupported(t *testing.T) {
	nstest.Enter(t)
	for _, f := range plan.Families {
		if err := Supports(context.Background(), f); err != nil {
			t.Error(err)
		}
	}
	if out := listing(t); out != "" {
		t.Errorf("trying out leaves something behind:\n%s", out)
	}
}

// listing is what the program nft says about the namespace.
func listing(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		t.Fatalf("nft list ruleset: %v\n%s", err, out)
	}
	return string(out)
}

// The kernel takes the same steps as the fake, ends like it, and nft can list it.
func TestKernelEndStateDoesNotDependOnThePath(t *testing.T) {
	nstest.Enter(t)
	k := newKernel(t)
	lossy := &lossyTables{Tables: k}
	walkPlans(t, lossy, 11, 60, func(yes bool) { lossy.lose = yes }, func() nft.Tables { return &fake.Tables{} })
	if out := listing(t); !strings.Contains(out, "map services") {
		t.Errorf("nft lists:\n%s", out)
	}
}

// lossyTables fails every other commit while lose is set.
type lossyTables struct {
	nft.Tables
	lose bool
	n    int
}

func (l *lossyTables) Commit(ctx context.Context, ops []nft.Op) error {
	if l.n++; l.lose && l.n%2 == 0 {
		return &nft.Error{Err: unix.ENOBUFS}
	}
	return l.Tables.Commit(ctx, ops)
}

// countingTables counts commits.
type countingTables struct {
	nft.Tables
	commits int
}

func (c *countingTables) Commit(ctx context.Context, ops []nft.Op) error {
	c.commits++
	return c.Tables.Commit(ctx, ops)
}

func TestKernelRestartWritesNothing(t *testing.T) {
	nstest.Enter(t)
	rng := rand.New(rand.NewPCG(3, 3))
	p := plantest.RandomPlan(rng, nil, plan.Families[:]...)
	for range 40 {
		p = plantest.RandomPlan(rng, p, plan.Families[:]...)
	}
	w := plantest.NewWorld(plan.IPv4)
	long := webPlan(time.Hour, 1).Services[onlyID(webPlan(0))] // names as long as they get
	long.ID = plan.ID{Namespace: strings.Repeat("n", 63), Name: strings.Repeat("s", 63), Port: strings.Repeat("p", 15), Protocol: plan.SCTP, Family: plan.IPv4}
	long.Frontends[0].Addr, long.Frontends[1].Port = w.At("service", 200), 32767
	long.Frontends[1].Route = [3]plan.Route{{}, {SNAT: true}, {Pool: plan.Local}}
	long.Pools[plan.Local] = long.Pools[plan.Cluster]
	p.Services[long.ID] = long
	k := &countingTables{Tables: newKernel(t)}
	mustApply(t, newBackend(testEnv(plan.Families[:]...), k), plan.Update{Plan: p})
	k.commits = 0
	mustApply(t, newBackend(testEnv(plan.Families[:]...), k), plan.Update{Plan: p})
	if k.commits != 0 {
		t.Errorf("a restart with the state intact writes %d times", k.commits)
	}
}

// What is large in one dimension fits: endpoints of a Service, node ports, source ranges.
func TestKernelTakesLargeObjects(t *testing.T) {
	nstest.Enter(t)
	k := &countingTables{Tables: newKernel(t)}
	p := webPlan(0, 1)
	web := *p.Services[onlyID(p)]
	for n := range 5000 {
		web.Pools[plan.Cluster] = append(web.Pools[plan.Cluster], plan.Endpoint{
			Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 128, byte(n >> 8), byte(n)}), 8080), Weight: 1, Elsewhere: true})
	}
	vault := *p.Services[onlyID(p)]
	vault.ID.Name = "vault"
	vault.Frontends = []plan.Frontend{web.Frontends[0]}
	vault.Frontends[0].Addr = plantest.NewWorld(plan.IPv4).At("external", 1)
	for n := range 1000 {
		vault.Frontends[0].Allow = append(vault.Frontends[0].Allow, netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(16 + n>>7), byte(n << 1), 0}), 24))
	}
	ports := *p.Services[onlyID(p)]
	ports.ID.Name = "ports"
	ports.Frontends = nil
	for n := range 65_000 {
		f := web.Frontends[1]
		f.Port = uint16(500 + n)
		ports.Frontends = append(ports.Frontends, f)
	}
	web.Frontends = web.Frontends[:1]
	p.Services = map[plan.ID]*plan.ServicePort{web.ID: &web, vault.ID: &vault, ports.ID: &ports}
	b := newBackend(testEnv(plan.IPv4), k)
	mustApply(t, b, plan.Update{Plan: p})
	c := mustRead(t, k, plan.IPv4)
	for set, want := range map[string]int{setEndpoints: 5001 + 1, setNodePorts: 65_000, setPortEndpoints: 65_000, setServices: 2} {
		if have := len(c.Elements[set]); have != want {
			t.Errorf("%s has %d elements, want %d", set, have, want)
		}
	}
	less := web
	less.Pools[plan.Cluster] = slices.Delete(slices.Clone(web.Pools[plan.Cluster]), 2500, 2501)
	k.commits = 0
	mustApply(t, b, plan.Update{Plan: p, Changed: []plan.Change{{ID: web.ID, Old: &web, New: &less}}})
	if k.commits > 2 { // the change, and the chain that is not needed any more
		t.Errorf("an endpoint less takes %d commits", k.commits)
	}
}

// Others' changes are told, with who made them; ours are not.
func TestKernelTellsOfOthers(t *testing.T) {
	nstest.Enter(t)
	k := newKernel(t)
	b := newBackend(testEnv(plan.IPv4), k)
	mustApply(t, b, plan.Update{Plan: webPlan(time.Hour, 1)})
	ctx, cancel := context.WithCancel(context.Background())
	told := make(chan string, 100)
	ended := make(chan error, 1)
	ready := make(chan struct{})
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	go func() {
		runtime.LockOSThread() // never unlocked, as above
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			ended <- err
			return
		}
		ended <- b.watch(ctx, ready, func(what string) { told <- what })
	}()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	mustApply(t, b, plan.Update{Plan: webPlan(time.Hour, 1, 2)})
	for _, c := range []struct{ command, want string }{
		{"add element ip svcproxy cluster-ips { 10.62.0.99 }", "table ip svcproxy: elements were added to cluster-ips by nft, process "},
		{"delete element ip svcproxy services { 10.62.0.20 . tcp . 80 }", "table ip svcproxy: elements of services were deleted by nft"},
		{"flush chain ip svcproxy to-services", "table ip svcproxy: a rule of chain to-services was deleted by nft"},
		{"flush ruleset", "table ip svcproxy: "},
	} {
		if out, err := exec.Command("nft", c.command).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v\n%s", c.command, err, out)
		}
		if what := <-told; !strings.HasPrefix(what, c.want) {
			t.Errorf("after nft %s told is %q, want %q", c.command, what, c.want)
		}
		for drained := false; !drained; {
			select {
			case <-told: // the same commit's
			default:
				drained = true
			}
		}
	}
	b.Invalidate()
	mustApply(t, b, plan.Update{Plan: webPlan(time.Hour, 1, 2)})
	if out := listing(t); !strings.Contains(out, "10.62.0.20 . tcp . 80") {
		t.Errorf("not repaired:\n%s", out)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Watch ends with %v", err)
	}
}

// Thousands of clients keep their endpoints over a restart; those of an endpoint that
// goes lose it at once, and nobody else does.
func TestKernelRestartKeepsClients(t *testing.T) {
	nstest.Enter(t)
	k := &countingTables{Tables: newKernel(t)}
	p := webPlan(time.Hour, 1, 2)
	b := newBackend(testEnv(plan.IPv4), k)
	mustApply(t, b, plan.Update{Plan: p})
	set := b.families[0].settings.affinitySet(onlyID(p), plan.Cluster)
	table := b.families[0].table
	const clients = 6000
	var all []nft.Element
	for n := range clients {
		to := netip.AddrPortFrom(plantest.NewWorld(plan.IPv4).At("pod", 1+n%2), 8080)
		all = append(all, nft.Element{Key: nft.AddrTuple(netip.AddrFrom4([4]byte{172, 16, byte(n >> 8), byte(n)})), Data: endpointTuple(to), Timeout: time.Hour})
	}
	for chunk := range slices.Chunk(all, 1000) {
		meddle(t, k, nft.Op{Kind: nft.AddElements, Table: table, Set: set, Elements: chunk})
	}
	remembered := func() map[nft.Tuple]int {
		out := map[nft.Tuple]int{}
		if err := k.Elements(context.Background(), table, set, func(e nft.Element) { out[e.Data]++ }); err != nil {
			t.Fatal(err)
		}
		return out
	}
	k.commits = 0
	b = newBackend(testEnv(plan.IPv4), k)
	mustApply(t, b, plan.Update{Plan: p})
	before := remembered()
	if k.commits != 0 || before[all[0].Data] != clients/2 || before[all[1].Data] != clients/2 {
		t.Errorf("a restart writes %d times; remembered are %v", k.commits, before)
	}
	mustApply(t, b, plantest.Difference(p, webPlan(time.Hour, 2)))
	if after := remembered(); len(after) != 1 || after[all[1].Data] != clients/2 {
		t.Errorf("after an endpoint has gone remembered are %v", after)
	}
}
