package ipvs

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

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// inKernel puts the test on a thread in a network namespace of its own, and returns
// the table there.
func inKernel(t *testing.T) *Kernel {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: a network namespace of its own")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	// Without lo there is no table of local addresses, and then no address counts as
	// one of a host.
	runIP(t, "link", "set", "lo", "up")
	k := &Kernel{}
	t.Cleanup(func() { k.Close() })
	if err := k.Probe(context.Background(), IPv4, "rr"); errors.Is(err, ErrMissing) {
		t.Skip("needs ip_vs in the kernel")
	} else if err != nil {
		t.Fatal(err)
	}
	return k
}

// runIP runs ip(8) in the namespace of the calling thread.
func runIP(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func dump(t *testing.T, v IPVS) []Entry {
	t.Helper()
	all, err := v.Dump(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestKernelProbe(t *testing.T) {
	k := inKernel(t)
	for _, f := range []Family{IPv4, IPv6} {
		for _, scheduler := range []string{"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh", "fo", "ovf"} {
			if err := k.Probe(context.Background(), f, scheduler); err != nil {
				t.Error(err)
			}
		}
		err := k.Probe(context.Background(), f, "nosuch")
		if !errors.Is(err, ErrNoScheduler) || !strings.Contains(err.Error(), "modprobe ip_vs_nosuch") {
			t.Errorf("a scheduler that does not exist: %v", err)
		}
	}
	var asked []string
	k.Load = func(_ context.Context, module string) error {
		asked = append(asked, module)
		return errors.New("there is none")
	}
	if err := k.Probe(context.Background(), IPv4, "nosuch"); !errors.Is(err, ErrNoScheduler) {
		t.Errorf("a scheduler that cannot be loaded: %v", err)
	}
	if want := []string{"ip_vs_nosuch"}; !slices.Equal(asked, want) {
		t.Errorf("asked for modules %v, want %v", asked, want)
	}
	if all := dump(t, k); len(all) != 0 {
		t.Errorf("left behind:\n%s", Text(all))
	}
}

// call is a call that fake and kernel must answer alike.
type call struct {
	name string
	do   func(IPVS) error
}

// errorsOf are those that callers tell apart.
var errorsOf = []error{ErrMissing, ErrFamily, ErrNoScheduler, ErrNoServer, ErrNoReal, ErrExist}

// kindOf is the text of the error that err is, as callers see it.
func kindOf(err error) string {
	if err == nil {
		return "done"
	}
	for _, e := range errorsOf {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	return "other"
}

// randomCalls returns calls over few enough objects that many meet what exists.
func randomCalls(r *rand.Rand, n int) []call {
	keys := []Key{
		ByAddr(TCP, ap("10.96.0.1:443")), ByAddr(UDP, ap("10.96.0.1:443")), ByAddr(SCTP, ap("10.96.0.1:443")),
		ByAddr(TCP, ap("[fd00::1]:443")), ByAddr(UDP, ap("[fd00::1]:53")), ByAddr(TCP, ap("10.96.0.1:0")),
		ByMark(IPv4, 7), ByMark(IPv6, 7), ByMark(IPv4, 0xfffffffe),
	}
	schedulers := []string{"rr", "wrr", "lc", "wlc", "sh", "mh", "nosuch"}
	pick := func(n int) int { return r.IntN(n) }
	var out []call
	for range n {
		k := keys[pick(len(keys))]
		v := VirtualServer{Key: k, Scheduler: schedulers[pick(len(schedulers))], ClientBits: k.Family.bits()}
		if pick(2) == 0 || k.Addr.IsValid() && k.Addr.Port() == 0 {
			v.Flags |= Persistent
			v.Timeout = time.Duration(1+pick(3)*5400) * time.Second
			v.ClientBits -= uint8(pick(9))
		}
		if pick(4) == 0 {
			v.Flags |= SHPort << pick(2)
		}
		if pick(4) == 0 && k.Protocol == UDP {
			v.Flags |= OnePacket
		}
		addr := []string{"10.0.0.1:80", "10.0.0.2:80", "10.0.0.2:8080"}[pick(3)]
		if (k.Family == IPv6) != (pick(20) == 0) { // now and then the wrong family
			addr = []string{"[fd01::1]:80", "[fd01::2]:80", "[fd01::2]:8080"}[pick(3)]
		}
		real := RealServer{Addr: ap(addr), Weight: []uint32{0, 1, 2, 65535, 1 << 30, 1 << 31}[pick(6)], Forwarding: Forwarding(pick(4))}
		out = append(out, []call{
			{"create " + v.String(), func(t IPVS) error { return t.CreateServer(v) }},
			{"create " + v.String(), func(t IPVS) error { return t.CreateServer(v) }},
			{"update " + v.String(), func(t IPVS) error { return t.UpdateServer(v) }},
			{"delete " + k.String(), func(t IPVS) error { return t.DeleteServer(k) }},
			{"create " + real.String() + " of " + k.String(), func(t IPVS) error { return t.CreateReal(k, real) }},
			{"create " + real.String() + " of " + k.String(), func(t IPVS) error { return t.CreateReal(k, real) }},
			{"update " + real.String() + " of " + k.String(), func(t IPVS) error { return t.UpdateReal(k, real) }},
			{"delete " + addr + " of " + k.String(), func(t IPVS) error { return t.DeleteReal(k, real.Addr) }},
			{"list " + k.String(), func(t IPVS) error { _, err := t.RealServers(k); return err }},
		}[pick(9)])
	}
	return out
}

// The fake answers as the kernel does, and lists the same after every call.
func TestKernelAndFakeAgree(t *testing.T) {
	k := inKernel(t)
	f := &Fake{NoScheduler: []string{"nosuch"}}
	r := rand.New(rand.NewPCG(1, 2))
	var trace []string
	done := 0
	for _, c := range randomCalls(r, 600) {
		trace = append(trace, c.name)
		have, want := c.do(k), c.do(f)
		if kindOf(have) != kindOf(want) {
			t.Fatalf("%s:\nkernel: %v\nfake:   %v\nafter:\n%s", c.name, have, want, strings.Join(last(trace, 20), "\n"))
		}
		if have != nil {
			continue
		}
		done++
		if diff := cmp.Diff(dump(t, f), dump(t, k), equalAddrs...); diff != "" {
			t.Fatalf("%s: kernel (+) and fake (-) differ:\n%s\nafter:\n%s", c.name, diff, strings.Join(last(trace, 20), "\n"))
		}
	}
	if done < 150 {
		t.Errorf("only %d calls succeeded", done)
	}
}

func last(s []string, n int) []string { return s[max(0, len(s)-n):] }

var equalAddrs = []cmp.Option{
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	cmp.Comparer(func(a, b Key) bool { return a == b }),
}

func TestKernelTimeouts(t *testing.T) {
	k := inKernel(t)
	f := &Fake{}
	for _, set := range []Timeouts{
		{},
		{TCP: 2 * time.Hour},
		{TCPFin: 30 * time.Second, UDP: 10 * time.Second},
		{TCP: 1500 * time.Millisecond},
		{UDP: -time.Second},
		{TCP: 1 << 40 * time.Microsecond * 1000},
	} {
		have, want := k.SetTimeouts(set), f.SetTimeouts(set)
		if kindOf(have) != kindOf(want) {
			t.Errorf("set %s: kernel %v, fake %v", set, have, want)
		}
		kernel, err1 := k.Timeouts()
		inFake, err2 := f.Timeouts()
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		if kernel != inFake {
			t.Errorf("after set %s: kernel %s, fake %s", set, kernel, inFake)
		}
	}
}

// What is created here is what an administrator's program lists.
func TestKernelListedByIpvsadm(t *testing.T) {
	k := inKernel(t)
	api := ByAddr(TCP, ap("10.96.0.1:443"))
	dns := ByAddr(UDP, ap("[fd00::a]:53"))
	for _, err := range []error{
		k.CreateServer(VirtualServer{Key: api, Scheduler: "rr", Flags: Persistent, Timeout: 3 * time.Hour, ClientBits: 32}),
		k.CreateReal(api, RealServer{Addr: ap("172.16.65.180:6443"), Weight: 1}),
		k.CreateServer(VirtualServer{Key: dns, Scheduler: "mh", Flags: MHPort | MHFallback, ClientBits: 128}),
		k.CreateReal(dns, RealServer{Addr: ap("[fd01::2]:53"), Weight: 5}),
		k.CreateServer(VirtualServer{Key: ByMark(IPv6, 12), Scheduler: "wlc", ClientBits: 128}),
		k.CreateServer(VirtualServer{Key: ByAddr(SCTP, ap("10.96.0.2:9")), Scheduler: "sed", ClientBits: 32}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command("ipvsadm", "--save", "--numeric").CombinedOutput()
	if err != nil {
		t.Fatalf("ipvsadm --save: %v: %s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(lines)
	want := []string{
		"-A --sctp-service 10.96.0.2:9 -s sed",
		"-A -f 12 -6 -s wlc",
		"-A -t 10.96.0.1:443 -s rr -p 10800",
		"-A -u [fd00::a]:53 -s mh -b mh-fallback,mh-port",
		"-a -t 10.96.0.1:443 -r 172.16.65.180:6443 -m -w 1",
		"-a -u [fd00::a]:53 -r [fd01::2]:53 -m -w 5",
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("ipvsadm lists (+), want (-):\n%s", diff)
	}
}

// What an administrator makes is listed here, and what is not understood of it does
// no harm.
func TestKernelListsForeign(t *testing.T) {
	k := inKernel(t)
	for _, args := range []string{
		"-A -t 192.0.2.1:80 -s wlc -p 60 -M 255.255.0.0",
		"-a -t 192.0.2.1:80 -r 198.51.100.1:80 -i -w 3 -x 10 -y 5",
		"-a -t 192.0.2.1:80 -r [2001:db8::1]:80 -i",
		"-A -u [2001:db8::2]:53 -s rr -o",
		"-A -f 3 -s sh -b sh-port",
	} {
		if out, err := exec.Command("ipvsadm", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ipvsadm %s: %v: %s", args, err, out)
		}
	}
	const want = `TCP 192.0.2.1:80 wlc persistent 60 clients /16
  -> 198.51.100.1:80 Tunnel 3
  -> [2001:db8::1]:80 Tunnel 1
UDP [2001:db8::2]:53 rr ops
FWM 3 IPv4 sh flag-2
`
	if diff := cmp.Diff(want, Text(dump(t, k))); diff != "" {
		t.Errorf("listed (+), want (-):\n%s", diff)
	}
}
