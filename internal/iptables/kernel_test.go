package iptables

import (
	"bufio"
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// inNamespace runs the rest of the test in a process of its own, in a new network
// namespace; it returns false in the process that has to do nothing more.
func inNamespace(t *testing.T) bool {
	t.Helper()
	const inside = "IPTABLES_TEST_NAMESPACE"
	if os.Getenv(inside) == t.Name() {
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root for a network namespace")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return false
}

// counted are tables of the kernel, and how often they were written.
type counted struct {
	sys.Tables
	restores atomic.Int32
}

func (c *counted) Restore(ctx context.Context, input func(*bufio.Writer) error) error {
	c.restores.Add(1)
	return c.Tables.Restore(ctx, input)
}

// kernelTables returns the tables of a store for both families.
func kernelTables(t *testing.T, store sys.Store) map[plan.Family]*counted {
	t.Helper()
	out := map[plan.Family]*counted{}
	for _, f := range plan.Families {
		all, err := sys.NewFinder(ours, nil).All(t.Context(), sys.Family(f))
		if err != nil {
			t.Fatal(err)
		}
		for _, tables := range all {
			if tables.Store() == store {
				out[f] = &counted{Tables: tables}
			}
		}
		if out[f] == nil {
			t.Fatalf("no programs for the %s store and %s: install the package iptables", store, f)
		}
	}
	return out
}

func onKernel(tables map[plan.Family]*counted) *backend {
	return newBackend(testEnv(plan.IPv4, plan.IPv6), func(_ context.Context, f plan.Family) (sys.Tables, sys.Tables, error) {
		return tables[f], nil, nil
	})
}

// listing prints nat and filter without counters and policies.
func listing(t *testing.T, tables sys.Tables) string {
	t.Helper()
	var b strings.Builder
	for _, table := range []sys.Table{sys.Filter, sys.NAT} {
		err := tables.Save(t.Context(), table, func(line []byte) error {
			text, _, _ := strings.Cut(string(line), " [")
			b.WriteString(text + "\n")
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// Both stores of the kernel take every rule that is rendered, and print it as it is
// rendered; a restart writes nothing.
func TestKernelPrintsWhatIsRendered(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	for _, store := range bothStores {
		tables := kernelTables(t, store)
		rng := rand.New(rand.NewPCG(3, uint64(store)))
		b := onKernel(tables)
		shadow, fakes := onFakes(t, store, plan.IPv4, plan.IPv6)
		var last, next *plan.Plan
		for step := range 25 {
			if step == 15 { // the cluster becomes a large one
				setMany(t, b, always)
				setMany(t, shadow, always)
			}
			next = randomPlan(rng, last, plan.IPv4, plan.IPv6)
			u := plantest.Difference(last, next)
			mustApply(t, b, u)
			mustApply(t, shadow, u)
			for _, f := range plan.Families {
				if have, want := listing(t, tables[f]), listing(t, fakes[f]); have != want {
					t.Fatalf("%s, step %d: %s", store, step, plantest.FirstDifference(have, want))
				}
			}
			last = next
		}
		before := tables[plan.IPv4].restores.Load() + tables[plan.IPv6].restores.Load()
		b = onKernel(tables)
		setMany(t, b, always)
		mustApply(t, b, plan.Update{Plan: last})
		if n := tables[plan.IPv4].restores.Load() + tables[plan.IPv6].restores.Load() - before; n != 0 {
			t.Errorf("%s: a restart with the state intact writes %d times", store, n)
		}
		if lines, err := b.Diff(t.Context(), last); err != nil || len(lines) > 0 {
			t.Errorf("%s: Diff finds %q, %v", store, lines, err)
		}
	}
}

// what others destroy is noticed, and repaired by the next Apply.
func TestKernelInterferenceIsNoticed(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	for _, store := range bothStores {
		t.Run(store.String(), func(t *testing.T) {
			tables := kernelTables(t, store)
			b := onKernel(tables)
			p := twoServices()
			p.Node.Local[plan.IPv6] = plan.LocalTraffic{}
			mustApply(t, b, plan.Update{Plan: p})
			want := listing(t, tables[plan.IPv4])
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			told := make(chan string, 100)
			go func() { _ = b.Watch(ctx, func(what string) { told <- what }) }()
			iptables := "iptables-" + store.String()
			destroy := map[string][]string{
				"flush of nat":    {iptables, "-t", "nat", "-F"},
				"deleted jump":    {iptables, "-t", "nat", "-D", "PREROUTING", "1"},
				"flush of filter": {iptables, "-t", "filter", "-F", "KUBE-SERVICES"},
			}
			if store == sys.NFT {
				destroy["flush of everything"] = []string{"nft", "flush", "ruleset"}
			}
			for name, command := range destroy {
				noticed := false
				for !noticed { // until Watch has begun
					if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
						t.Fatalf("%s: %v: %s", name, err, out)
					}
					select {
					case <-told:
						noticed = true
					case <-time.After(4 * time.Second):
						b.Invalidate()
						mustApply(t, b, plan.Update{Plan: p})
					case <-ctx.Done():
						t.Fatalf("%s: not noticed", name)
					}
				}
				b.Invalidate()
				mustApply(t, b, plan.Update{Plan: p})
				if have := listing(t, tables[plan.IPv4]); have != want {
					t.Fatalf("after %s: %s", name, plantest.FirstDifference(have, want))
				}
			}
			// Our own repairs are not interference.
			found, err := b.look(ctx, b.families[0], "suspicion")
			if err != nil || found != "" {
				t.Errorf("after our own repair: %q, %v", found, err)
			}
		})
	}
}

// clean-up leaves nothing of ours in either store and touches nothing else;
// it works without a plan, and twice.
func TestKernelCleanup(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	foreign := "*nat\n:FOREIGN - [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\n-A PREROUTING -j FOREIGN\n-A FOREIGN -j RETURN\nCOMMIT\n" +
		"*filter\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\n-A KUBE-FIREWALL -j RETURN\n-P FORWARD DROP\nCOMMIT\n"
	rng := rand.New(rand.NewPCG(11, 12))
	p := randomPlan(rng, nil, plan.IPv4, plan.IPv6)
	for range 10 {
		p = randomPlan(rng, p, plan.IPv4, plan.IPv6)
	}
	before := map[sys.Store]map[plan.Family]string{}
	for _, store := range bothStores {
		tables := kernelTables(t, store)
		before[store] = map[plan.Family]string{}
		for _, f := range plan.Families {
			err := tables[f].Restore(t.Context(), func(w *bufio.Writer) error {
				_, err := w.WriteString(strings.ReplaceAll(foreign, "-P FORWARD DROP\n", ":FORWARD DROP [0:0]\n"))
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			before[store][f] = listing(t, tables[f])
		}
		mustApply(t, onKernel(tables), plan.Update{Plan: p})
	}
	for round := range 2 {
		if err := Mode().Cleanup(t.Context(), testEnv()); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		for _, store := range bothStores {
			for f, tables := range kernelTables(t, store) {
				if have := listing(t, tables); have != before[store][f] {
					t.Errorf("round %d, %s %s: %s", round, store, f, plantest.FirstDifference(have, before[store][f]))
				}
			}
		}
	}
}

// A kube-proxy's rules are taken over: same names are rewritten, old names go, and
// the other store is left.
func TestKernelTakeOver(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	old := "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-RL3JAE4GN7VOGDGP - [0:0]\n:KUBE-PORTALS-HOST - [0:0]\n:KUBE-MARK-DROP - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n" +
		"-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n" +
		"-A OUTPUT -m comment --comment \"handle ClusterIPs; NOTE: this must be before the NodePort rules\" -j KUBE-PORTALS-HOST\n" +
		"-A KUBE-SERVICES -d 10.99.129.90/32 -p tcp -m tcp --dport 8080 -j KUBE-SVC-RL3JAE4GN7VOGDGP\n" +
		"-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000\n" +
		"-A KUBE-SVC-RL3JAE4GN7VOGDGP -s 10.0.0.1/32 -j KUBE-MARK-MASQ\nCOMMIT\n"
	p := reference()
	p.Node.Local[plan.IPv6] = plan.LocalTraffic{}
	_, fakes := onFakes(t, sys.NFT, plan.IPv4, plan.IPv6)
	mustApply(t, withFakes(fakes, plan.IPv4, plan.IPv6), plan.Update{Plan: p})
	for _, store := range bothStores {
		use, other := kernelTables(t, store), kernelTables(t, 1-store)
		for _, f := range plan.Families {
			for _, tables := range []*counted{use[f], other[f]} {
				in := old
				if f == plan.IPv6 {
					in = strings.NewReplacer("10.99.129.90/32", "2001:db8::90/128", "10.0.0.1/32", "2001:db8::1/128").Replace(old)
				}
				err := tables.Restore(t.Context(), func(w *bufio.Writer) error {
					_, err := w.WriteString(in)
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		b := newBackend(testEnv(plan.IPv4, plan.IPv6), func(_ context.Context, f plan.Family) (sys.Tables, sys.Tables, error) {
			return use[f], other[f], nil
		})
		mustApply(t, b, plan.Update{Plan: p})
		for _, f := range plan.Families {
			have, want := sorted(listing(t, use[f])), sorted(listing(t, fakes[f]))
			if have != want {
				t.Errorf("%s %s: %s", store, f, plantest.FirstDifference(have, want))
			}
			if left := listing(t, other[f]); strings.Contains(left, "KUBE-") {
				t.Errorf("%s %s: the other store still has %s", store, f, left)
			}
		}
		if err := cleanup(t.Context(), testEnv(), hostStores(testEnv()), false); err != nil {
			t.Fatal(err)
		}
	}
}

// Whether rules are there is found out without executing anything where no store has
// tables: another mode asks at its start.
func TestKernelLooksWithoutPrograms(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	nft, err := exec.LookPath("nft")
	if err != nil {
		t.Skip("needs nft")
	}
	dir := t.TempDir()
	for _, name := range []string{"iptables-save", "iptables-restore", "ip6tables-save", "ip6tables-restore"} {
		program := "#!/bin/sh\necho $0 $* >>" + dir + "/executed\necho 'iptables v1.8.9 (nf_tables)'\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(program), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":/usr/bin:/bin")
	executed := func() string {
		b, _ := os.ReadFile(filepath.Join(dir, "executed")) // none: nothing was
		return string(b)
	}
	for _, f := range plan.Families {
		if all, err := hostStores(testEnv())(t.Context(), f); err != nil || len(all) > 0 || executed() != "" {
			t.Errorf("%s: %d stores, %v; executed were %q", f, len(all), err, executed())
		}
	}
	if out, err := exec.Command(nft, "add table ip nat").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	all, err := hostStores(testEnv())(t.Context(), plan.IPv4)
	if err != nil || len(all) != 1 || all[0].Store() != sys.NFT || executed() == "" {
		t.Errorf("%d stores, %v; executed were %q", len(all), err, executed())
	}
}

// sorted sorts lines: jumps that were there before keep their place.
func sorted(text string) string {
	lines := strings.Split(text, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
