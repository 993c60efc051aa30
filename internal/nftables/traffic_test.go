package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

// The network of traffic tests: a node with two pods that serve, and one that asks.
const (
	oldPod, newPod = 5, 6
	askPod         = 250
)

func trafficLab(t *testing.T) *lab.Lab {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	w := plantest.NewWorld(plan.IPv4)
	leaf := func(name string, n int) lab.LeafSpec {
		return lab.LeafSpec{Name: name, Behind: "node", Addrs: []netip.Addr{w.At("pod", n)}, From: w.Node[:1]}
	}
	l, err := lab.Build(lab.Topology{
		Hosts:  []lab.HostSpec{{Name: "node", Forwards: true, OwnRun: true, Addrs: w.Node}},
		Leaves: []lab.LeafSpec{leaf("old", oldPod), leaf("new", newPod), leaf("ask", askPod)},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	for _, name := range []string{"old", "new"} {
		if _, err := l.Host(name).Serve(name, lab.TCP, 8080); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// answers returns who answers a pod, or how the attempt ends.
func answers(l *lab.Lab, to netip.AddrPort) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	f, err := l.Host("ask").Dial(ctx, lab.Dialing{Proto: lab.TCP, To: to})
	if err != nil {
		return lab.OutcomeOf(err).String()
	}
	defer f.Close()
	a, err := f.Ask(5 * time.Second)
	if err != nil {
		return lab.OutcomeOf(err).String()
	}
	return a.Server
}

// observedTables calls after each commit, and fails from one on if that is set.
type observedTables struct {
	nft.Tables
	after   func()
	failing int // the number of the first commit that fails; 0: none does
	n       int
}

var errDead = errors.New("the process is dead")

func (o *observedTables) Commit(ctx context.Context, ops []nft.Op) error {
	if o.n++; o.failing > 0 && o.n >= o.failing {
		return &nft.Error{Err: errDead}
	}
	err := o.Tables.Commit(ctx, ops)
	o.after()
	return err
}

// olderTables writes tables as an earlier layout would have called them.
type olderTables struct{ nft.Tables }

func (o olderTables) Commit(ctx context.Context, ops []nft.Op) error {
	for i := range ops {
		if ops[i].Kind == nft.AddTable {
			ops[i].Comment = "svcproxy, layout 0"
		}
	}
	return o.Tables.Commit(ctx, ops)
}

// kubeProxyLike is a table as kube-proxy's nftables mode would have left it.
func kubeProxyLike(vip netip.AddrPort, to netip.Addr) string {
	return fmt.Sprintf(`table ip kube-proxy {
	chain services { type nat hook prerouting priority -100; ip daddr %s tcp dport %d dnat to %s:8080; }
}`, vip.Addr(), vip.Port(), to)
}

// A table of another layout, or kube-proxy's, carries the traffic until ours is
// complete, and then ours does: between any two commits the Service answers. It
// stays so if the process dies half-way and is started again.
func TestKernelSwitchesTables(t *testing.T) {
	for _, kind := range []string{"layout", "kube-proxy"} {
		for _, dies := range []int{0, 3} {
			t.Run(fmt.Sprintf("%s/dies-%d", kind, dies), func(t *testing.T) { switchTables(t, kind, dies) })
		}
	}
}

func switchTables(t *testing.T, kind string, dies int) {
	l := trafficLab(t)
	vip := netip.AddrPortFrom(plantest.NewWorld(plan.IPv4).At("service", 20), 80)
	old, wanted := webPlan(0, oldPod), webPlan(0, newPod)
	for n := range 3000 {
		sp := bigService(n, 2, 0)
		wanted.Services[sp.ID] = sp
	}
	err := l.Host("node").Do(func() error {
		k := &kernel.Tables{}
		defer k.Close()
		before := nft.Table{Family: nft.IPv4, Name: owned.Name}
		if kind == "layout" {
			mustApply(t, newBackend(testEnv(plan.IPv4), olderTables{k}), plan.Update{Plan: old})
		} else {
			before.Name = owned.KubeProxyName
			c := exec.Command("nft", kubeProxyLike(vip, plantest.NewWorld(plan.IPv4).At("pod", oldPod)))
			if out, err := c.CombinedOutput(); err != nil {
				return fmt.Errorf("%v: %w\n%s", c, err, out)
			}
		}
		seen := map[string]int{}
		watched := &observedTables{Tables: k, failing: dies, after: func() { seen[answers(l, vip)]++ }}
		watched.after()
		if dies > 0 {
			if err := newBackend(testEnv(plan.IPv4), watched).Apply(context.Background(), plan.Update{Plan: wanted}); !errors.Is(err, errDead) {
				t.Errorf("Apply returns %v", err)
			}
			if len(seen) != 1 || seen["old"] != dies {
				t.Errorf("before the process died the Service was answered by %v, want the old pod only", seen)
			}
			watched.failing = 0
		}
		mustApply(t, newBackend(testEnv(plan.IPv4), watched), plan.Update{Plan: wanted})
		if len(seen) != 2 || seen["old"] < 3 || seen["new"] < 1 {
			t.Errorf("the Service was answered by %v, want first the old pod, then the new one", seen)
		}
		c, err := k.Read(context.Background(), before)
		if !errors.Is(err, nft.ErrNoTable) && (err != nil || c.Comment != layout) {
			t.Errorf("the old table: %v, %v", c, err)
		}
		if who := answers(l, vip); who != "new" {
			t.Errorf("in the end %s answers", who)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A change of the Service ranges is in force with the commit that Apply makes.
func TestKernelServiceRanges(t *testing.T) {
	l := trafficLab(t)
	inRange := netip.AddrPortFrom(netip.MustParseAddr("10.70.0.9"), 80)
	err := l.Host("node").Do(func() error {
		k := &kernel.Tables{}
		defer k.Close()
		b := newBackend(testEnv(plan.IPv4), k)
		p := webPlan(0, oldPod)
		mustApply(t, b, plan.Update{Plan: p})
		if have := answers(l, inRange); have != lab.Unreachable.String() {
			t.Errorf("an address of nobody: %s, want unreachable", have)
		}
		for _, ranges := range [][]netip.Prefix{{netip.MustParsePrefix("10.70.0.0/16")}, nil} {
			q, node := *p, *p.Node
			node.ServiceCIDRs = append(append([]netip.Prefix{}, p.Node.ServiceCIDRs...), ranges...)
			q.Node = &node
			mustApply(t, b, plan.Update{Plan: &q, Node: true})
			c := mustRead(t, k, plan.IPv4)
			if have, want := len(c.Elements[setServiceRanges]), 2*(1+len(ranges)); have != want {
				t.Errorf("%d elements for %v, want %d", have, node.ServiceCIDRs, want)
			}
		}
		if have := answers(l, inRange); have != lab.Unreachable.String() {
			t.Errorf("after the range has gone: %s, want unreachable", have)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// foreignTable has what tools write that are newer than owned.Is, or that are not nft:
// user data that we do not know, types, options and expressions that we never write.
const foreignTable = `table inet foreign {
	comment "of others"
	counter hits {
	}
	set typed {
		typeof ip saddr . tcp dport . meta mark
		size 1000
		flags dynamic,timeout
		timeout 1h
		comment "kept by hand"
		counter
	}
	set ranges {
		type ipv6_addr . inet_service
		flags interval
		auto-merge
		elements = { 2001:db8::-2001:db8::ff . 80-90 comment "some" }
	}
	map limits {
		type mark : verdict
		elements = { 7 comment "seven" : jump more, 9 : drop }
	}
	chain more {
		ct mark set meta mark and 0xff limit rate 10/second counter name hits comment "many things"
	}
	chain forward {
		type filter hook forward priority filter + 5; policy accept
		meta mark vmap @limits
		add @typed { ip saddr . tcp dport . meta mark }
	}
}
table ip6 kube-proxy-not {
	chain svcproxy {
	}
}
`

// foreignDump is everything in other tables as the kernel tells it, byte for byte.
func foreignDump(t *testing.T) []byte {
	t.Helper()
	var all []byte
	for _, kind := range []uint16{unix.NFT_MSG_GETTABLE, unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_GETRULE, unix.NFT_MSG_GETSET, unix.NFT_MSG_GETOBJ} {
		all = append(all, rawDump(t, kind, "", "")...)
	}
	for _, set := range []string{"typed", "ranges", "limits"} {
		all = append(all, rawDump(t, unix.NFT_MSG_GETSETELEM, "foreign", set)...)
	}
	return all
}

// tables of others do not disturb us, whatever is in them, and stay as they are
// to the byte. The table is made by whichever nft is installed.
func TestKernelLeavesForeignTables(t *testing.T) {
	nstest.Enter(t)
	if out, err := exec.Command("nft", foreignTable).CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	before := foreignDump(t)
	if len(before) < 1000 {
		t.Fatalf("the dump has %d bytes only", len(before))
	}
	k := newKernel(t)
	env := testEnv(plan.Families[:]...)
	b := newBackend(env, k)
	last := (*plan.Plan)(nil)
	for _, p := range []*plan.Plan{webPlan(time.Hour, 1, 2), webPlan(0, 1, 2, 3, 4), webPlan(0)} {
		mustApply(t, b, plantest.Difference(last, p))
		last = p
	}
	mustApply(t, newBackend(env, k), plan.Update{Plan: last})
	if out := listing(t); len(out) == 0 {
		t.Error("nft lists nothing")
	}
	if err := owned.Remove(context.Background(), env.Log, k, owned.All); err != nil {
		t.Error(err)
	}
	if after := foreignDump(t); string(after) != string(before) {
		t.Errorf("the other tables have changed:\nbefore %x\nafter  %x", before, after)
	}
}
