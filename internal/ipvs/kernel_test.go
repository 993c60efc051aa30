package ipvs

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	nftkernel "github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

func run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// contents lists the table of a family.
func contents(t *testing.T, tables nft.Tables, f plan.Family) string {
	t.Helper()
	c, err := tables.Read(context.Background(), table.Of(f))
	if errors.Is(err, nft.ErrNoTable) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return c.String()
}

// The kernel takes the table as the one in memory does, through changes and restarts,
// and the program nft can list it.
func TestKernelTakesTheTable(t *testing.T) {
	nstest.Enter(t)
	k := &nftkernel.Tables{}
	t.Cleanup(func() { _ = k.Close() })
	rng := rand.New(rand.NewPCG(7, 7))
	r := newRig()
	on := r.kernel()
	on.tables = k
	families := plan.Families[:]
	b := newBackend(testEnv(families...), Options{}, on)
	var p, applied *plan.Plan
	for step := range 40 {
		p = plantest.RandomPlan(rng, p, families...)
		if rng.IntN(6) == 0 {
			b, applied = newBackend(testEnv(families...), Options{}, on), nil
		}
		mustApply(t, b, plantest.Difference(applied, p))
		applied = p
		if step%10 != 9 {
			continue
		}
		r.settle(t, b, p)
		fresh := newRig()
		mustApply(t, fresh.backend(Options{}, families...), plan.Update{Plan: p})
		for _, f := range families {
			if have, want := contents(t, k, f), contents(t, fresh.tables, f); have != want {
				t.Fatalf("step %d, %s: %s", step, f, plantest.FirstDifference(have, want))
			}
		}
	}
	out := run(t, "nft", "list", "ruleset")
	for _, want := range []string{"map services", "dnat to ip daddr", "masquerade fully-random", "chain to-services"} {
		if !strings.Contains(out, want) {
			t.Errorf("nft does not list %q:\n%s", want, out)
		}
	}
}

// onKernel returns the running kernel, if it has ip_vs.
func onKernel(t *testing.T) kernel {
	t.Helper()
	nstest.Enter(t)
	k := newKernel()
	t.Cleanup(func() { _ = k.close() })
	if err := k.servers.Probe(context.Background(), ipvs.IPv4, scheduler.Default); errors.Is(err, ipvs.ErrMissing) {
		t.Skip("needs ip_vs in the kernel")
	} else if err != nil {
		t.Fatal(err)
	}
	return k
}

// listing is everything that a kernel has.
func listing(t *testing.T, k kernel) string {
	t.Helper()
	var b strings.Builder
	for _, f := range plan.Families {
		b.WriteString(contents(t, k.tables, f))
	}
	all, err := k.servers.Dump(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	b.WriteString(ipvs.Text(all))
	addrs, err := k.device.Addrs()
	if err != nil && !errors.Is(err, host.ErrNoDevice) {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if !a.IsLinkLocalUnicast() {
			b.WriteString("address " + a.String() + "\n")
		}
	}
	entries, err := k.routing.List(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(entries, func(a, b route.Entry) int { return strings.Compare(a.String(), b.String()) })
	for _, e := range entries {
		b.WriteString(e.String() + "\n")
	}
	return b.String()
}

// The kernel ends as the one in memory does; a restart changes nothing; clean-up leaves
// nothing but what others made.
func TestKernelEndsLikeTheFake(t *testing.T) {
	k := onKernel(t)
	ctx := context.Background()
	for _, f := range plan.Families {
		if err := Supports(ctx, f); err != nil {
			t.Fatal(err)
		}
	}
	admin := ipvs.VirtualServer{Key: ipvs.ByAddr(ipvs.TCP, netip.MustParseAddrPort("192.0.2.100:6443")), Scheduler: "rr", ClientBits: 32}
	if err := k.servers.CreateServer(admin); err != nil {
		t.Fatal(err)
	}
	before := listing(t, k)
	families := plan.Families[:]
	rng := rand.New(rand.NewPCG(9, 9))
	b := newBackend(testEnv(families...), Options{}, k)
	var p, applied *plan.Plan
	for range 12 {
		p = plantest.RandomPlan(rng, p, families...)
		if rng.IntN(6) == 0 {
			b, applied = newBackend(testEnv(families...), Options{}, k), nil
		}
		mustApply(t, b, plantest.Difference(applied, p))
		applied = p
	}
	clock := k.now()
	later := k
	later.now = func() time.Time { return clock }
	b = newBackend(testEnv(families...), Options{}, later)
	for mustApply(t, b, plan.Update{Plan: p}); !b.Due().IsZero(); mustApply(t, b, plan.Update{Plan: p}) {
		clock = b.Due()
	}
	fresh := newRig()
	if err := fresh.servers.CreateServer(admin); err != nil {
		t.Fatal(err)
	}
	mustApply(t, fresh.backend(Options{}, families...), plan.Update{Plan: p})
	have, want := listing(t, k), listing(t, fresh.kernel())
	if have != want {
		t.Fatal(plantest.FirstDifference(have, want))
	}
	if lines, err := b.Diff(ctx, p); err != nil || len(lines) > 0 {
		t.Errorf("differs from the plan: %v, %v", lines, err)
	}
	if err := cleanup(ctx, testEnv(families...), Options{}, k); err != nil {
		t.Fatal(err)
	}
	if have := listing(t, k); have != before {
		t.Errorf("after clean-up: %s", plantest.FirstDifference(have, before))
	}
}

// The kernel gives a table up and takes it back as the one in memory does.
func TestKernelHandOver(t *testing.T) {
	nstest.Enter(t)
	k := &nftkernel.Tables{}
	t.Cleanup(func() { _ = k.Close() })
	r, p := inUse(t)
	on := r.kernel()
	on.tables = k
	mustApply(t, newBackend(testEnv(plan.IPv4), Options{}, on), plan.Update{Plan: p})
	before := contents(t, k, plan.IPv4)
	h, env := &handover{}, testEnv(plan.IPv4)
	waits := func(what string, h *handover) {
		t.Helper()
		if _, ok := errors.AsType[*dataplane.Draining](h.next(t.Context(), env, Options{}, on)); !ok {
			t.Fatalf("%s: no connection is waited for", what)
		}
		fake, _ := inUse(t)
		(&handover{}).mustDrain(t, fake, 1)
		if have, want := contents(t, k, plan.IPv4), contents(t, fake.tables, plan.IPv4); have != want {
			t.Fatalf("%s: %s", what, plantest.FirstDifference(have, want))
		}
	}
	waits("given up", h)
	waits("given up again", &handover{})
	mustApply(t, newBackend(testEnv(plan.IPv4), Options{}, on), plan.Update{Plan: p})
	if have := contents(t, k, plan.IPv4); have != before {
		t.Fatalf("taken back: %s", plantest.FirstDifference(have, before))
	}
	waits("given up after that", &handover{})
	r.servers.SetLive(webKey, podA, 0, 0, 0)
	if err := h.next(t.Context(), env, Options{}, on); err != nil {
		t.Fatal(err)
	}
	if have := contents(t, k, plan.IPv4); have != "" {
		t.Errorf("left is\n%s", have)
	}
}
