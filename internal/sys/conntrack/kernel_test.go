package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	ct "github.com/ti-mo/conntrack"
	"golang.org/x/sys/unix"
)

// inNamespace runs f on a thread in a network namespace of its own, which ends
// with the thread.
func inNamespace(tb testing.TB, f func(tb testing.TB)) {
	tb.Helper()
	if os.Getuid() != 0 {
		tb.Skip("needs root: a network namespace of its own")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			tb.Errorf("make a network namespace: %v", err)
			return
		}
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			tb.Errorf("bring lo up: %v: %s", err, out)
			return
		}
		f(tb)
	}()
	<-done
}

// table is what the fake and the kernel have in common.
type table interface {
	DeleteUDP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort) bool) (int, error)
}

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// create puts a flow into the kernel's table; an endpoint other than f.Dst makes
// it a translated one.
func create(tb testing.TB, c *ct.Conn, proto uint8, f Flow) {
	tb.Helper()
	k := ct.NewFlow(proto, ct.StatusConfirmed, f.Src.Addr(), f.Dst.Addr(), f.Src.Port(), f.Dst.Port(), 300, 0)
	k.TupleReply.IP.SourceAddress, k.TupleReply.Proto.SourcePort = f.From.Addr(), f.From.Port()
	k.TupleReply.IP.DestinationAddress, k.TupleReply.Proto.DestinationPort = f.To.Addr(), f.To.Port()
	k.Zone = f.Zone
	if f.From != f.Dst {
		k.Status |= ct.StatusDstNAT | ct.StatusDstNATDone
	}
	if f.To != f.Src {
		k.Status |= ct.StatusSrcNAT | ct.StatusSrcNATDone
	}
	if f.Answered {
		k.Status |= ct.StatusSeenReply
	}
	if proto == unix.IPPROTO_TCP {
		k.ProtoInfo.TCP = &ct.ProtoInfoTCP{State: 3}
	}
	if err := c.Create(k); err != nil {
		tb.Fatalf("create %s: %v", f, err)
	}
}

func flow(src, dst, from string) Flow {
	return Flow{Src: ap(src), Dst: ap(dst), From: ap(from), To: ap(src)}
}

// sample is a table with flows of two Services and of nobody.
func sample() []Flow {
	masqueraded := flow("10.61.1.9:1005", "10.62.0.10:53", "10.61.2.5:5353")
	masqueraded.To = ap("192.0.2.11:40000")
	zoned := flow("10.61.1.9:1006", "10.62.0.10:53", "10.61.2.5:5353")
	zoned.Zone = 7
	return []Flow{
		flow("10.61.1.9:1001", "10.62.0.10:53", "10.61.2.5:5353"), // to A
		flow("10.61.1.9:1002", "10.62.0.10:53", "10.61.2.6:5353"), // to B
		flow("10.61.1.9:1003", "10.62.0.10:53", "10.62.0.10:53"),  // not translated
		flow("10.61.1.9:1004", "10.62.0.10:54", "10.61.2.5:5353"), // another port
		masqueraded, // to A, masqueraded
		flow("198.51.100.7:2000", "192.0.2.11:30514", "10.61.2.5:53"), // node port
		flow("198.51.100.7:2001", "192.0.2.11:30515", "10.61.2.5:53"), // somebody else's
		flow("[2001:db8:61::9]:1001", "[2001:db8:62::10]:53", "[2001:db8:61::5]:5353"),
		flow("[2001:db8:61::9]:1002", "[2001:db8:62::10]:53", "[2001:db8:61::6]:5353"),
		zoned, // to A, in a zone of somebody's rules
	}
}

type deletion struct {
	to      []string
	serving []string
	want    []int // indices of sample that go
}

var deletions = map[string]deletion{
	"nothing asked for":  {},
	"one of two left":    {to: []string{"10.62.0.10:53"}, serving: []string{"10.61.2.6:5353"}, want: []int{0, 2, 4, 9}},
	"all serving":        {to: []string{"10.62.0.10:53"}, serving: []string{"10.61.2.6:5353", "10.61.2.5:5353", "10.62.0.10:53"}},
	"none left":          {to: []string{"10.62.0.10:53", "192.0.2.11:30514"}, want: []int{0, 1, 2, 4, 5, 9}},
	"no such frontend":   {to: []string{"10.62.0.99:53"}},
	"more than exact":    {to: []string{"10.62.0.10:53", "10.62.0.10:54", "10.62.0.1:1", "10.62.0.1:2", "10.62.0.1:3"}, want: []int{0, 1, 2, 3, 4, 9}},
	"IPv6":               {to: []string{"[2001:db8:62::10]:53"}, serving: []string{"[2001:db8:61::6]:5353"}, want: []int{7}},
	"IPv6, nothing left": {to: []string{"[2001:db8:62::10]:53"}, want: []int{7, 8}},
}

func (d deletion) run(tb testing.TB, t table) int {
	tb.Helper()
	var to []netip.AddrPort
	for _, s := range d.to {
		to = append(to, ap(s))
	}
	n, err := t.DeleteUDP(tb.Context(), to, func(dst, from netip.AddrPort) bool {
		if !slices.Contains(to, dst) {
			tb.Errorf("asked about a flow to %s", dst)
		}
		return !slices.Contains(d.serving, from.String())
	})
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// left is the sample without what is to go, as the fake prints it.
func (d deletion) left() string {
	var f Fake
	for i, fl := range sample() {
		if !slices.Contains(d.want, i) {
			f.Add(fl)
		}
	}
	return f.String()
}

func TestFakeDeletes(t *testing.T) {
	for name, d := range deletions {
		t.Run(name, func(t *testing.T) {
			var f Fake
			f.Add(sample()...)
			n := d.run(t, &f)
			if n != len(d.want) || f.String() != d.left() {
				t.Errorf("deleted %d, want %d; left:\n%swant:\n%s", n, len(d.want), &f, d.left())
			}
		})
	}
}

// The kernel does what the fake does, and UDP means UDP.
func TestKernelDeletes(t *testing.T) {
	for _, unfiltered := range []bool{false, true} {
		for name, d := range deletions {
			t.Run(fmt.Sprintf("%s, unfiltered %t", name, unfiltered), func(t *testing.T) {
				inNamespace(t, func(tb testing.TB) { kernelDeletes(tb, d, unfiltered) })
			})
		}
	}
}

func kernelDeletes(tb testing.TB, d deletion, unfiltered bool) {
	c, err := ct.Dial(nil)
	if err != nil {
		tb.Error(err)
		return
	}
	defer c.Close()
	tcp := flow("10.61.1.9:1001", "10.62.0.10:53", "10.61.2.5:5353")
	create(tb, c, unix.IPPROTO_TCP, tcp)
	for _, f := range sample() {
		create(tb, c, unix.IPPROTO_UDP, f)
	}
	k := &Kernel{}
	k.unfiltered.Store(unfiltered)
	n := d.run(tb, k)
	if have := listed(tb, k); n != len(d.want) || have != d.left() {
		tb.Errorf("deleted %d, want %d; left:\n%swant:\n%s", n, len(d.want), have, d.left())
	}
	all, err := c.Dump(nil)
	if err != nil {
		tb.Error(err)
		return
	}
	if !slices.ContainsFunc(all, func(f ct.Flow) bool { return f.TupleOrig.Proto.Protocol == unix.IPPROTO_TCP }) {
		tb.Error("the TCP flow is gone")
	}
	if !unfiltered && k.unfiltered.Load() {
		tb.Error("the kernel refused the filter")
	}
}

// listed returns the kernel's UDP flows as the fake prints them.
func listed(tb testing.TB, k *Kernel) string {
	tb.Helper()
	var f Fake
	for _, v6 := range []bool{false, true} {
		if err := k.List(tb.Context(), v6, func(fl Flow) { f.Add(fl) }); err != nil {
			tb.Error(err)
		}
	}
	return f.String()
}

// More stale flows than fit into one chunk go while the listing runs.
func TestKernelDeletesManyChunks(t *testing.T) {
	inNamespace(t, func(tb testing.TB) {
		c, err := ct.Dial(nil)
		if err != nil {
			tb.Error(err)
			return
		}
		defer c.Close()
		const stale, kept = 2*chunk + 100, 50
		fill(tb, c, stale, "10.62.0.10:53", "10.61.2.5:5353")
		fill(tb, c, kept, "10.62.0.10:54", "10.61.2.5:5354")
		k := &Kernel{}
		n, err := k.DeleteUDP(tb.Context(), []netip.AddrPort{ap("10.62.0.10:53")}, func(_, _ netip.AddrPort) bool { return true })
		if err != nil || n != stale {
			tb.Errorf("deleted %d, error %v; want %d", n, err, stale)
		}
		left := 0
		if err := k.List(tb.Context(), false, func(Flow) { left++ }); err != nil || left != kept {
			tb.Errorf("%d flows left, error %v; want %d", left, err, kept)
		}
	})
}

// fill creates n flows from different sources.
func fill(tb testing.TB, c *ct.Conn, n int, dst, from string) {
	tb.Helper()
	for i := range n {
		src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 61, byte(i >> 16), byte(i >> 8)}), uint16(i&0xff)+1000)
		create(tb, c, unix.IPPROTO_UDP, Flow{Src: src, Dst: ap(dst), From: ap(from), To: src})
	}
}

func TestKernelRefusesMixedFamilies(t *testing.T) {
	for _, k := range []table{&Kernel{}, &Fake{}} {
		_, err := k.DeleteUDP(t.Context(), []netip.AddrPort{ap("10.62.0.10:53"), ap("[2001:db8:62::10]:53")}, nil)
		if err == nil {
			t.Errorf("%T: no error", k)
		}
	}
}

// BenchmarkDelete finds 1,000 stale flows among the given number of others.
func BenchmarkDelete(b *testing.B) {
	for _, size := range []int{10_000, 100_000} {
		for _, unfiltered := range []bool{false, true} {
			b.Run(fmt.Sprintf("%d/unfiltered=%t", size, unfiltered), func(b *testing.B) {
				inNamespace(b, func(tb testing.TB) {
					c, err := ct.Dial(nil)
					if err != nil {
						tb.Error(err)
						return
					}
					defer c.Close()
					fill(tb, c, size, "10.62.0.99:53", "10.61.2.5:5354")
					k := &Kernel{}
					k.unfiltered.Store(unfiltered)
					b.ReportAllocs()
					for b.Loop() {
						b.StopTimer()
						fill(tb, c, 1000, "10.62.0.10:53", "10.61.2.5:5353")
						b.StartTimer()
						n, err := k.DeleteUDP(b.Context(), []netip.AddrPort{ap("10.62.0.10:53")}, func(_, _ netip.AddrPort) bool { return true })
						if err != nil || n != 1000 {
							tb.Errorf("deleted %d, error %v", n, err)
							return
						}
					}
				})
			})
		}
	}
}

// BenchmarkMillionFlows is R-42: 50,000 stale flows go among a million. It needs
// net.netfilter.nf_conntrack_max above 1,100,000 and runs with -bench MillionFlows.
func BenchmarkMillionFlows(b *testing.B) {
	const others, stale = 1_000_000, 50_000
	if raw, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max"); err != nil {
		b.Skipf("needs connection tracking: %v", err)
	} else if most, _ := strconv.Atoi(strings.TrimSpace(string(raw))); most < others+2*stale {
		b.Skipf("needs net.netfilter.nf_conntrack_max of %d, it is %d", others+2*stale, most)
	}
	inNamespace(b, func(tb testing.TB) {
		c, err := ct.Dial(nil)
		if err != nil {
			tb.Error(err)
			return
		}
		defer c.Close()
		fill(tb, c, others, "10.62.0.99:53", "10.61.2.5:5354")
		k := &Kernel{}
		b.ReportAllocs()
		var worked time.Duration
		for b.Loop() {
			b.StopTimer()
			fill(tb, c, stale, "10.62.0.10:53", "10.61.2.5:5353")
			before := cpu(tb)
			b.StartTimer()
			n, err := k.DeleteUDP(b.Context(), []netip.AddrPort{ap("10.62.0.10:53")}, func(_, _ netip.AddrPort) bool { return true })
			if err != nil || n != stale {
				tb.Errorf("deleted %d, error %v", n, err)
				return
			}
			worked += cpu(tb) - before
		}
		b.ReportMetric(float64(worked.Microseconds())/1000/float64(b.N), "cpu-ms/op")
	})
}

// cpu is the processor time of this process.
func cpu(tb testing.TB) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		tb.Error(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// FuzzDecode: whatever a kernel may send, decoding does not panic.
func FuzzDecode(f *testing.F) {
	for _, fl := range sample() {
		family := uint8(unix.AF_INET)
		if fl.Src.Addr().Is6() {
			family = unix.AF_INET6
		}
		f.Add(deleteRequest(family, &fl))
		f.Add(listRequest(family, tcp, fl.Dst, true))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if fl, ok, err := decode(b); ok && err == nil && !fl.Dst.IsValid() {
			t.Errorf("a flow without a destination: %v", fl)
		}
	})
}

// TestDeletesTCP: TCP flows are told apart by whether the endpoint answered; those of
// UDP with the same addresses stay.
func TestDeletesTCP(t *testing.T) {
	flows := func() []Flow {
		var out []Flow
		for i, from := range []string{"10.61.2.5:8080", "10.61.2.6:8080", "[2001:db8:61::5]:8080"} {
			for _, answered := range []bool{false, true} {
				f := flow(fmt.Sprintf("10.61.1.9:%d", 1000+len(out)), "10.62.0.20:80", from)
				if i == 2 {
					f = flow(fmt.Sprintf("[2001:db8:61::9]:%d", 1000+len(out)), "[2001:db8:62::20]:80", from)
				}
				f.TCP, f.Answered = true, answered
				out = append(out, f)
			}
		}
		return append(out, flow("10.61.1.9:1000", "10.62.0.20:80", "10.61.2.5:8080"))
	}
	type tcpTable interface {
		DeleteTCP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort, answered bool) bool, instead func(netip.AddrPort) netip.AddrPort) (int, error)
	}
	// The first deletion takes what did not answer, the second all of one endpoint,
	// the third the other family's.
	check := func(tb testing.TB, table tcpTable, left func() int) {
		tb.Helper()
		for i, step := range []struct {
			to, from  string
			answered  bool
			gone, now int
		}{
			{"10.62.0.20:80", "10.61.2.5:8080", false, 1, 6},
			{"10.62.0.20:80", "10.61.2.5:8080", true, 1, 5},
			{"10.62.0.20:80", "10.61.2.5:8080", true, 0, 5},
			{"10.62.0.21:80", "10.61.2.6:8080", true, 0, 5},
			{"[2001:db8:62::20]:80", "[2001:db8:61::5]:8080", true, 2, 3},
		} {
			n, err := table.DeleteTCP(tb.Context(), []netip.AddrPort{ap(step.to)}, func(_, from netip.AddrPort, answered bool) bool {
				return from == ap(step.from) && (step.answered || !answered)
			}, func(netip.AddrPort) netip.AddrPort { return netip.AddrPort{} })
			if have := left(); err != nil || n != step.gone || have != step.now {
				tb.Errorf("step %d: deleted %d, error %v, left %d; want %d and %d", i, n, err, have, step.gone, step.now)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		var f Fake
		f.Add(flows()...)
		check(t, &f, func() int { return len(f.Flows()) })
	})
	t.Run("kernel", func(t *testing.T) {
		inNamespace(t, func(tb testing.TB) {
			c, err := ct.Dial(nil)
			if err != nil {
				tb.Error(err)
				return
			}
			defer c.Close()
			for _, f := range flows() {
				proto := uint8(unix.IPPROTO_UDP)
				if f.TCP {
					proto = unix.IPPROTO_TCP
				}
				create(tb, c, proto, f)
			}
			check(tb, &Kernel{}, func() int {
				all, err := c.Dump(nil)
				if err != nil {
					tb.Error(err)
				}
				return len(all)
			})
		})
	})
}

// TestStrict: where the kernel takes up no connection in its middle, an answered flow
// that is deleted leads to another endpoint from then on, masqueraded as before.
func TestStrict(t *testing.T) {
	masqueraded := flow("198.51.100.7:2000", "192.0.2.11:30080", "10.61.2.5:8080")
	masqueraded.To = ap("192.0.2.11:40000")
	silent := flow("10.61.1.9:1001", "10.62.0.20:80", "10.61.2.5:8080")
	zoned := flow("10.61.1.9:1002", "10.62.0.20:80", "10.61.2.5:8080")
	zoned.Zone = 7
	for _, c := range []struct {
		flow          Flow
		answered      bool
		instead, want string
	}{
		{flow("10.61.1.9:1000", "10.62.0.20:80", "10.61.2.5:8080"), true, "10.61.3.6:9090", "10.61.3.6:9090"},
		{flow("[2001:db8:61::9]:1000", "[2001:db8:62::20]:80", "[2001:db8:61::5]:8080"), true, "[2001:db8:61::6]:9090", "[2001:db8:61::6]:9090"},
		{masqueraded, true, "10.61.3.6:9090", "10.61.3.6:9090"},
		{zoned, true, "10.61.3.6:9090", "10.61.3.6:9090"},
		{silent, false, "10.61.3.6:9090", ""},
		{silent, true, "", ""},
	} {
		c.flow.TCP, c.flow.Answered = true, c.answered
		var instead netip.AddrPort
		want := "" // what is left
		if c.instead != "" {
			instead = ap(c.instead)
		}
		if c.want != "" {
			f := c.flow
			f.From = instead
			want = f.String()
		}
		all := func(_, _ netip.AddrPort, _ bool) bool { return true }
		other := func(netip.AddrPort) netip.AddrPort { return instead }
		fake := &Fake{Strict: true}
		fake.Add(c.flow)
		if n, err := fake.DeleteTCP(t.Context(), []netip.AddrPort{c.flow.Dst}, all, other); n != 1 || err != nil || strings.TrimSpace(fake.String()) != want {
			t.Errorf("%s, fake: deleted %d, error %v, left %q, want %q", c.flow, n, err, fake, want)
		}
		inNamespace(t, func(tb testing.TB) {
			conn, err := ct.Dial(nil)
			if err != nil {
				tb.Error(err)
				return
			}
			defer conn.Close()
			create(tb, conn, unix.IPPROTO_TCP, c.flow)
			if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_loose", []byte("0"), 0); err != nil {
				tb.Error(err)
				return
			}
			n, err := (&Kernel{}).DeleteTCP(tb.Context(), []netip.AddrPort{c.flow.Dst}, all, other)
			left := ""
			family := uint8(unix.AF_INET)
			if c.flow.Dst.Addr().Is6() {
				family = unix.AF_INET6
			}
			if _, lerr := (&Kernel{}).list(tb.Context(), family, tcp, netip.AddrPort{}, func(f *Flow) error { left += f.String(); return nil }); lerr != nil {
				tb.Error(lerr)
			}
			if n != 1 || err != nil || left != want {
				tb.Errorf("%s: deleted %d, error %v, left %q, want %q", c.flow, n, err, left, want)
			}
		})
	}
}
