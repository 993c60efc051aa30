package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

var bothStores = []sys.Store{sys.Legacy, sys.NFT}

// Whatever way a plan is reached, by small steps, with lost writes, with restarts,
// the rules are those of a fresh start.
func TestEndStateDoesNotDependOnThePath(t *testing.T) {
	for _, store := range bothStores {
		t.Run(store.String(), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(7, uint64(store)))
			b, fakes := onFakes(t, store, plan.IPv4, plan.IPv6)
			many := manyEndpoints
			var last, applied *plan.Plan
			for step := range 60 {
				last = randomPlan(rng, last, plan.IPv4, plan.IPv6)
				switch rng.IntN(8) {
				case 0: // a restart
					b, applied = withFakes(fakes, plan.IPv4, plan.IPv6), nil
					setMany(t, b, many)
				case 4: // the cluster becomes a large one, or a small one again
					many = map[int]int{always: manyEndpoints, manyEndpoints: always}[many]
					setMany(t, b, many)
					b.Invalidate()
				case 1:
					b.Invalidate()
				case 2: // somebody flushes a table
					mustMeddle(t, fakes[plan.IPv4], "*nat\n-F PREROUTING\n-F KUBE-SERVICES\nCOMMIT\n")
					b.Invalidate()
				case 3: // a write is lost
					lose(fakes)
					if err := b.Apply(context.Background(), plantest.Difference(applied, last)); err == nil && !fakesIdle(fakes) {
						t.Fatal("Apply returns nil although the write failed")
					}
					keep(fakes)
				}
				mustApply(t, b, plantest.Difference(applied, last))
				applied = last
				fresh, want := onFakes(t, store, plan.IPv4, plan.IPv6)
				setMany(t, fresh, many)
				mustApply(t, fresh, plan.Update{Plan: last})
				if state(fakes) != state(want) {
					t.Fatalf("step %d: %s", step, plantest.FirstDifference(state(fakes), state(want)))
				}
				if lines, err := b.Diff(context.Background(), last); err != nil || len(lines) > 0 {
					t.Fatalf("step %d: Diff finds %q, %v", step, lines, err)
				}
			}
		})
	}
}

func mustMeddle(t *testing.T, f *sys.Fake, input string) {
	t.Helper()
	if err := f.Meddle(input); err != nil {
		t.Fatal(err)
	}
}

var errLost = errors.New("resource temporarily unavailable")

func lose(fakes map[plan.Family]*sys.Fake) {
	for _, f := range fakes {
		f.Inputs()
		f.Refuse(func(sys.Table, string) error { return &sys.RestoreError{Busy: true, Err: errLost} })
	}
}

func keep(fakes map[plan.Family]*sys.Fake) {
	for _, f := range fakes {
		f.Refuse(nil)
	}
}

func fakesIdle(fakes map[plan.Family]*sys.Fake) bool {
	for _, f := range fakes {
		if len(f.Inputs()) > 0 {
			return false
		}
	}
	return true
}

// twoServices is a plan with a TCP and a UDP Service.
func twoServices() *plan.Plan {
	w := testWorld(plan.IPv4)
	p := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{}, Health: map[plan.HealthID]plan.HealthPort{}, Node: &plan.Node{
		Name: "alder", Addrs: w.node, NodePorts: map[plan.Family]plan.NodePorts{plan.IPv4: {All: true, Addrs: w.node}},
		Local: map[plan.Family]plan.LocalTraffic{plan.IPv4: {Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{w.pods}}},
	}}
	for i, name := range []string{"web", "dns"} {
		sp := clusterService(w, name, i+1, w.at("pod", 10+i), w.at("remote", 20+i))
		p.Services[sp.ID] = sp
	}
	return p
}

// clusterService makes a Service port with one ClusterIP.
func clusterService(w world, name string, n int, eps ...netip.Addr) *plan.ServicePort {
	sp := &plan.ServicePort{
		ID:        plan.ID{Namespace: "default", Name: name, Port: "p", Protocol: plan.TCP, Family: w.family},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: w.at("service", n), Port: 80, Route: [3]plan.Route{toCluster, toClusterSNAT, toClusterSNAT}}},
	}
	for _, a := range eps {
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: netip.AddrPortFrom(a, 8080), Weight: 1, OnNode: w.pods.Contains(a)})
	}
	return sp
}

func TestRestartWritesNothing(t *testing.T) {
	for _, many := range []int{manyEndpoints, always} {
		testRestartWritesNothing(t, many)
	}
}

func testRestartWritesNothing(t *testing.T, many int) {
	p := twoServices()
	b, fakes := onFakes(t, sys.NFT, plan.IPv4)
	setMany(t, b, many)
	mustApply(t, b, plan.Update{Plan: p})
	f := fakes[plan.IPv4]
	before := f.Restores()
	again := withFakes(fakes, plan.IPv4)
	setMany(t, again, many)
	mustApply(t, again, plan.Update{Plan: p, Partial: true})
	mustApply(t, again, plan.Update{Plan: p})
	mustApply(t, again, plan.Update{Plan: p})
	if n := f.Restores() - before; n != 0 {
		t.Errorf("a restart with the state intact writes %d times: %s", n, f.Inputs())
	}
}

// A part of the plan must not tear down what an earlier run left in force.
func TestPartialLeavesEarlierState(t *testing.T) {
	p := twoServices()
	b, fakes := onFakes(t, sys.Legacy, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: p})
	before := state(fakes)
	part := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{}, Node: p.Node}
	again := withFakes(fakes, plan.IPv4)
	mustApply(t, again, plan.Update{Plan: part, Partial: true})
	if state(fakes) != before {
		t.Error("a partial update changed the state of an earlier run")
	}
	mustApply(t, again, plan.Update{Plan: p})
	if state(fakes) != before {
		t.Errorf("the whole plan after a partial one: %s", plantest.FirstDifference(state(fakes), before))
	}
	fresh, empty := onFakes(t, sys.Legacy, plan.IPv4)
	mustApply(t, fresh, plan.Update{Plan: part, Partial: true})
	if !strings.Contains(state(empty), chainServices) {
		t.Error("a partial update is not carried out on an empty node")
	}
}

// one Service whose rule the kernel refuses does not stop the others.
func TestRefusedServiceIsNamed(t *testing.T) {
	for _, line := range []bool{true, false} {
		for _, store := range bothStores {
			t.Run(fmt.Sprintf("%s, line named %v", store, line), func(t *testing.T) {
				w := testWorld(plan.IPv4)
				p := twoServices()
				for i := range 50 {
					sp := clusterService(w, fmt.Sprintf("svc-%d", i), 10+i, w.at("remote", 50+i))
					p.Services[sp.ID] = sp
				}
				b, fakes := onFakes(t, store, plan.IPv4)
				f := fakes[plan.IPv4]
				mustApply(t, b, plan.Update{Plan: p})
				odd := clusterService(w, "odd", 200, netip.MustParseAddr("10.61.3.3"))
				good := p.Services[plan.ID{Namespace: "default", Name: "web", Port: "p", Protocol: plan.TCP, Family: plan.IPv4}]
				changed := *good
				changed.Pools[plan.Cluster] = changed.Pools[plan.Cluster][:1]
				refuse(f, "--to-destination 10.61.3.3", line)
				p.Services[odd.ID], p.Services[good.ID] = odd, &changed
				err := b.Apply(context.Background(), plan.Update{Plan: p, Changed: []plan.Change{{ID: good.ID, Old: good, New: &changed}, {ID: odd.ID, New: odd}}})
				var oe *dataplane.ObjectError
				if !errors.As(err, &oe) || oe.ID != odd.ID {
					t.Fatalf("Apply: %v, want an error of %s", err, odd.ID)
				}
				delete(p.Services, odd.ID)
				fresh, want := onFakes(t, store, plan.IPv4)
				mustApply(t, fresh, plan.Update{Plan: p})
				if state(fakes) != state(want) {
					t.Errorf("the others: %s", plantest.FirstDifference(state(fakes), state(want)))
				}
				mustApply(t, b, plan.Update{Plan: p, Changed: []plan.Change{{ID: odd.ID, Old: odd}}})
				f.Refuse(nil)
				p.Services[odd.ID] = odd
				mustApply(t, b, plan.Update{Plan: p, Changed: []plan.Change{{ID: odd.ID, New: odd}}})
				if !strings.Contains(f.String(), "10.61.3.3:8080") {
					t.Error("odd is not programmed once the kernel takes it")
				}
			})
		}
	}
}

// refuse makes the fake refuse every table that has a rule with text: at the rule's
// line, or like a legacy kernel at the commit.
func refuse(f *sys.Fake, text string, line bool) {
	bad := false
	f.Refuse(func(_ sys.Table, rule string) error {
		if rule == "COMMIT" {
			was := bad
			bad = false
			if was {
				return &sys.RestoreError{Line: -1, Err: errors.New("invalid argument")}
			}
			return nil
		}
		if strings.Contains(rule, text) {
			if line {
				return &sys.RestoreError{Err: errors.New("bad rule")}
			}
			bad = true
		}
		return nil
	})
}

// A Service port that cannot be written as rules is named before anything is tried.
func TestImpossibleServiceIsNamed(t *testing.T) {
	p := twoServices()
	sp := clusterService(testWorld(plan.IPv4), "odd", 9, netip.MustParseAddr("2001:db8::1"))
	p.Services[sp.ID] = sp
	b, fakes := onFakes(t, sys.NFT, plan.IPv4)
	err := b.Apply(context.Background(), plan.Update{Plan: p})
	var oe *dataplane.ObjectError
	if !errors.As(err, &oe) || oe.ID != sp.ID || !strings.Contains(err.Error(), "2001:db8::1") {
		t.Errorf("Apply: %v, want an error that names the endpoint", err)
	}
	if !strings.Contains(state(fakes), poolChain(plan.ID{Namespace: "default", Name: "web", Port: "p", Protocol: plan.TCP, Family: plan.IPv4}, plan.Cluster)) {
		t.Error("the others are not programmed")
	}
}

// what a failed write lost is made up for by the next one, without a change.
func TestFailedWriteIsRepeated(t *testing.T) {
	p := twoServices()
	b, fakes := onFakes(t, sys.Legacy, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: p})
	var web, dns plan.ID
	for id := range p.Services {
		if id.Name == "web" {
			web = id
		} else {
			dns = id
		}
	}
	old, gone := p.Services[web], p.Services[dns]
	less := *old
	less.Pools[plan.Cluster] = less.Pools[plan.Cluster][1:]
	p.Services[web] = &less
	delete(p.Services, dns)
	lose(fakes)
	u := plan.Update{Plan: p, Changed: []plan.Change{{ID: web, Old: old, New: &less}, {ID: dns, Old: gone}}}
	err := b.Apply(context.Background(), u)
	if !errors.Is(err, errLost) {
		t.Fatalf("Apply: %v", err)
	}
	var oe *dataplane.ObjectError
	if errors.As(err, &oe) {
		t.Errorf("a lock that was not available is blamed on %s", oe.ID)
	}
	keep(fakes)
	mustApply(t, b, plan.Update{Plan: p})
	fresh, want := onFakes(t, sys.Legacy, plan.IPv4)
	mustApply(t, fresh, plan.Update{Plan: p})
	if state(fakes) != state(want) {
		t.Error(plantest.FirstDifference(state(fakes), state(want)))
	}
	if n := b.env.Stats.(*plantest.Counts).Get("sync_proxy_rules_iptables_restore_failures_total", "IPv4"); n != 1 {
		t.Errorf("%v failures counted, want 1", n)
	}
}

// an outsider deletes a chain, then the Service changes.
func TestDeletedChainIsRepairedWithTheNextChange(t *testing.T) {
	p := twoServices()
	b, fakes := onFakes(t, sys.NFT, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: p})
	mustMeddle(t, fakes[plan.IPv4], "*nat\n-F KUBE-SERVICES\n-F KUBE-MARK-MASQ\n"+
		":KUBE-SEP-X - [0:0]\nCOMMIT\n")
	id := plan.ID{Namespace: "default", Name: "web", Port: "p", Protocol: plan.TCP, Family: plan.IPv4}
	chain := poolChain(id, plan.Cluster)
	mustMeddle(t, fakes[plan.IPv4], "*nat\n-F "+chain+"\n-X "+chain+"\nCOMMIT\n")
	old := p.Services[id]
	more := *old
	more.Pools[plan.Cluster] = append(more.Pools[plan.Cluster][:1:1], plan.Endpoint{Addr: netip.MustParseAddrPort("10.61.2.99:80"), Weight: 1})
	p.Services[id] = &more
	mustApplyTwice(t, b, plan.Update{Plan: p, Changed: []plan.Change{{ID: id, Old: old, New: &more}}})
	fresh, want := onFakes(t, sys.NFT, plan.IPv4)
	mustApply(t, fresh, plan.Update{Plan: p})
	if state(fakes) != state(want) {
		t.Error(plantest.FirstDifference(state(fakes), state(want)))
	}
}

// an outsider deletes a chain on which a Service's rules rely, then the Service
// changes. The write that fails of it puts nobody into quarantine.
func TestDeletedChainIsNobodysFault(t *testing.T) {
	for _, store := range bothStores {
		t.Run(store.String(), func(t *testing.T) {
			p := twoServices()
			b, fakes := onFakes(t, store, plan.IPv4)
			mustApply(t, b, plan.Update{Plan: p})
			mustMeddle(t, fakes[plan.IPv4], withoutNAT(t, fakes[plan.IPv4]))
			id := plan.ID{Namespace: "default", Name: "web", Port: "p", Protocol: plan.TCP, Family: plan.IPv4}
			old := p.Services[id]
			more := *old
			more.Pools[plan.Cluster] = append(more.Pools[plan.Cluster][:1:1], plan.Endpoint{Addr: netip.MustParseAddrPort("10.61.2.99:80"), Weight: 1})
			p.Services[id] = &more
			mustApply(t, b, plan.Update{Plan: p, Changed: []plan.Change{{ID: id, Old: old, New: &more}}})
			fresh, want := onFakes(t, store, plan.IPv4)
			mustApply(t, fresh, plan.Update{Plan: p})
			if state(fakes) != state(want) {
				t.Error(plantest.FirstDifference(state(fakes), state(want)))
			}
		})
	}
}

// withoutNAT is the input that takes everything out of the nat table.
func withoutNAT(t *testing.T, f *sys.Fake) string {
	t.Helper()
	var flush, remove string
	err := f.Save(context.Background(), sys.NAT, func(line []byte) error {
		if name, ok := strings.CutPrefix(string(line), ":"); ok {
			name, _, _ = strings.Cut(name, " ")
			flush += "-F " + name + "\n"
			if strings.HasPrefix(name, "KUBE-") {
				remove += "-X " + name + "\n"
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return "*nat\n" + flush + remove + "COMMIT\n"
}

// mustApplyTwice applies, reads back and applies again, as the loop does when it was
// told of interference.
func mustApplyTwice(t *testing.T, b *backend, u plan.Update) {
	t.Helper()
	mustApply(t, b, u)
	b.Invalidate()
	mustApply(t, b, plan.Update{Plan: u.Plan})
}

// The cost of one endpoint's change is its own chains and nothing of other Services.
func TestOnlyChangedChainsAreWritten(t *testing.T) {
	p := twoServices()
	b, fakes := onFakes(t, sys.Legacy, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: p})
	fakes[plan.IPv4].Inputs()
	id := plan.ID{Namespace: "default", Name: "web", Port: "p", Protocol: plan.TCP, Family: plan.IPv4}
	old := p.Services[id]
	less := *old
	less.Pools[plan.Cluster] = less.Pools[plan.Cluster][:1]
	p.Services[id] = &less
	mustApply(t, b, plan.Update{Plan: p, Changed: []plan.Change{{ID: id, Old: old, New: &less}}})
	in := fakes[plan.IPv4].Inputs()
	if len(in) != 1 {
		t.Fatalf("%d restores, want 1", len(in))
	}
	for line := range strings.Lines(in[0]) {
		chain := strings.Fields(strings.TrimLeft(line, ":"))
		if len(chain) == 0 || line[0] == '*' || chain[0] == "COMMIT" {
			continue
		}
		name := chain[0]
		if name[0] == '-' {
			name = chain[1]
		}
		if name != poolChain(id, plan.Cluster) && name != chainInvalid && name != endpointChain(id, old.Pools[plan.Cluster][1].Addr) {
			t.Errorf("unrelated: %s", line)
		}
	}
}

// Watch tells of what others changed, and of nothing else.
func TestWatchConfirms(t *testing.T) {
	p := twoServices()
	b, fakes := onFakes(t, sys.Legacy, plan.IPv4)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	told := make(chan string, 1)
	ended := make(chan error, 1)
	go func() { ended <- b.Watch(ctx, func(what string) { told <- what }) }()
	mustApply(t, b, plan.Update{Plan: p})
	f := fakes[plan.IPv4]
	for !f.Watched() { // until Watch has begun
		if ctx.Err() != nil {
			t.Fatal("Watch does not begin")
		}
		time.Sleep(time.Millisecond)
	}
	mustMeddle(t, f, "*nat\n:FOREIGN - [0:0]\nCOMMIT\n")
	found, err := b.look(ctx, b.families[0], "suspicion")
	if err != nil || found != "" {
		t.Errorf("a foreign chain is taken for interference: %q, %v", found, err)
	}
	mustMeddle(t, f, "*nat\n-F POSTROUTING\nCOMMIT\n")
	select {
	case what := <-told:
		if !strings.Contains(what, chainPostrouting) {
			t.Errorf("told %q, want the jump named", what)
		}
	case <-ctx.Done():
		t.Error("the flush of POSTROUTING was not noticed")
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Watch ended with %v", err)
	}
}

// flushedOnce are tables that somebody flushes right after they were read first.
type flushedOnce struct {
	*sys.Fake
	done bool
}

func (f *flushedOnce) Save(ctx context.Context, t sys.Table, line func([]byte) error) error {
	err := f.Fake.Save(ctx, t, line)
	if t == sys.NAT && !f.done {
		f.done = true
		err = errors.Join(err, f.Meddle("*nat\n-F POSTROUTING\nCOMMIT\n"))
	}
	return err
}

// What others change while a process starts is seen too: between its first look at the
// kernel and the end of its first Apply.
func TestWatchSeesTheStart(t *testing.T) {
	for _, late := range []bool{false, true} { // the watch begins after the first Apply
		p := twoServices()
		before, fakes := onFakes(t, sys.NFT, plan.IPv4)
		mustApply(t, before, plan.Update{Plan: p})
		b := newBackend(testEnv(plan.IPv4), func(context.Context, plan.Family) (sys.Tables, sys.Tables, error) {
			return &flushedOnce{Fake: fakes[plan.IPv4]}, nil, nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		told, ended := make(chan string, 1), make(chan error, 1)
		watch := func() { ended <- b.Watch(ctx, func(what string) { told <- what }) }
		if !late {
			go watch()
			b.vigil.Begin() // whoever calls Watch comes first
		}
		mustApply(t, b, plan.Update{Plan: p})
		if late {
			go watch()
		}
		select {
		case <-told:
		case <-ctx.Done():
			t.Errorf("late: %v: the flush was not noticed", late)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Watch ended with %v", err)
		}
	}
}

// More chains than are removed at once go in an order in which none is in use.
func TestCleanupOfManyChains(t *testing.T) {
	for _, store := range bothStores {
		w := testWorld(plan.IPv4)
		p := twoServices()
		for i := range 2 * chainsPerRestore {
			sp := clusterService(w, fmt.Sprintf("svc-%d", i), i%200, w.at("pod", i%200))
			sp.Frontends[0].Port = uint16(1000 + i)
			p.Services[sp.ID] = sp
		}
		b, fakes := onFakes(t, store, plan.IPv4)
		setMany(t, b, math.MaxInt) // with chains for endpoints
		mustApply(t, b, plan.Update{Plan: p})
		find := func(_ context.Context, f plan.Family) ([]sys.Tables, error) {
			if f != plan.IPv4 {
				return nil, sys.ErrUnsupported
			}
			return []sys.Tables{fakes[f]}, nil
		}
		for range 2 {
			if err := cleanup(t.Context(), testEnv(), find, false); err != nil {
				t.Fatal(err)
			}
			if left := state(fakes); strings.Contains(left, "KUBE-") {
				t.Errorf("%s: left behind: %s", store, left)
			}
		}
	}
}

// rival carries out what its Fake is asked for, once, before that is asked.
type rival struct {
	*sys.Fake
	done bool
}

func (r *rival) Restore(ctx context.Context, input func(*bufio.Writer) error) error {
	if !r.done {
		r.done = true
		if err := r.Fake.Restore(ctx, input); err != nil {
			return err
		}
	}
	return r.Fake.Restore(ctx, input)
}

// Two processes may clean up at the same time, as a mode that takes over and a command.
func TestCleanupBesideAnother(t *testing.T) {
	for _, store := range bothStores {
		b, fakes := onFakes(t, store, plan.IPv4)
		mustApply(t, b, plan.Update{Plan: twoServices()})
		find := func(_ context.Context, f plan.Family) ([]sys.Tables, error) {
			if f != plan.IPv4 {
				return nil, sys.ErrUnsupported
			}
			return []sys.Tables{&rival{Fake: fakes[f]}}, nil
		}
		if err := cleanup(t.Context(), testEnv(), find, false); err != nil {
			t.Error(err)
		}
		if left := state(fakes); strings.Contains(left, "KUBE-") {
			t.Errorf("%s: left behind: %s", store, left)
		}
	}
}

// A store with rules of svcproxy is spared where only kube-proxy's are to go, and both
// count as being in force.
func TestCleanupAfterKubeProxyAlone(t *testing.T) {
	const theirs = "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-PORTALS-HOST - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-PORTALS-HOST\nCOMMIT\n"
	for _, store := range bothStores {
		b, fakes := onFakes(t, store, plan.IPv4)
		find := func(_ context.Context, f plan.Family) ([]sys.Tables, error) {
			if f != plan.IPv4 {
				return nil, sys.ErrUnsupported
			}
			return []sys.Tables{fakes[f]}, nil
		}
		mustBeInForce := func(want bool) {
			t.Helper()
			if have, err := inForce(t.Context(), find); err != nil || have != want {
				t.Errorf("%s: in force: %v, %v; want %v", store, have, err, want)
			}
		}
		mustBeInForce(false)
		mustMeddle(t, fakes[plan.IPv4], theirs)
		mustBeInForce(true)
		if err := cleanup(t.Context(), testEnv(), find, true); err != nil {
			t.Fatal(err)
		}
		if left := state(fakes); strings.Contains(left, "KUBE-") {
			t.Errorf("%s: left behind: %s", store, left)
		}
		mustBeInForce(false)
		mustMeddle(t, fakes[plan.IPv4], theirs)
		for _, p := range []*plan.Plan{twoServices(), {Services: map[plan.ID]*plan.ServicePort{}, Node: twoServices().Node}} { // without Services of the family too
			b.Invalidate()
			mustApply(t, b, plan.Update{Plan: p})
			before := state(fakes)
			if err := cleanup(t.Context(), testEnv(), find, true); err != nil {
				t.Fatal(err)
			}
			if after := state(fakes); after != before {
				t.Errorf("%s, %d Services: svcproxy's rules changed: %s", store, len(p.Services), plantest.FirstDifference(after, before))
			}
			mustBeInForce(true)
		}
	}
}
