package host

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// withDevice runs f on a thread in a network namespace of its own that can have dummy
// devices.
func withDevice(t *testing.T) *KernelDevice {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: a network namespace of its own")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	unshare(t)
	d := &KernelDevice{Name: VIPDevice}
	err := d.Create(t.Context())
	if errors.Is(err, unix.EOPNOTSUPP) || err != nil && strings.Contains(err.Error(), "modprobe dummy") {
		t.Skip("needs dummy devices in the kernel")
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Delete(); err != nil {
		t.Fatal(err)
	}
	return d
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
	return string(out)
}

// deviceSteps is what kernel and fake must do alike; lose removes an address, or the
// device if it is invalid, as somebody else does.
func deviceSteps(t *testing.T, d Device, lose func(netip.Addr)) {
	t.Helper()
	v4, v6, other := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1"), netip.MustParseAddr("10.96.0.2")
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	have := func(want ...netip.Addr) {
		t.Helper()
		have, err := d.Addrs()
		if err != nil || !slices.Equal(have, want) {
			t.Fatalf("addresses %v, %v; want %v", have, err, want)
		}
	}
	if _, err := d.Addrs(); !errors.Is(err, ErrNoDevice) {
		t.Errorf("Addrs of no device: %v", err)
	}
	if err := d.Add(v4); !errors.Is(err, ErrNoDevice) {
		t.Errorf("Add to no device: %v", err)
	}
	check(d.Remove(v4))
	check(d.Delete())
	check(d.Create(t.Context()))
	check(d.Create(t.Context()))
	have()

	ctx, cancel := context.WithCancel(t.Context())
	ready, heard, done := make(chan struct{}), make(chan string, 100), make(chan error, 1)
	ns, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	check(err)
	defer unix.Close(ns)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		_ = unix.Setns(ns, unix.CLONE_NEWNET)
		done <- d.Watch(ctx, ready, func(what string) { heard <- what })
	}()
	<-ready
	for _, a := range []netip.Addr{v4, v4, v6, other} {
		check(d.Add(a))
	}
	have(v4, other, v6)
	check(d.Remove(v6)) // our own removals are not heard of
	check(d.Remove(v6))
	check(d.Add(v6))
	check(d.Remove(v4))
	have(other, v6)
	hears := func(words string) {
		t.Helper()
		select {
		case what := <-heard:
			if !strings.Contains(what, words) {
				t.Errorf("heard %q, want %q", what, words)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("not heard: %q", words)
		}
	}
	lose(v6)
	hears("address fd00::1")
	lose(other)
	hears("address 10.96.0.2")
	have()
	lose(netip.Addr{})
	hears("deleted")
	if _, err := d.Addrs(); !errors.Is(err, ErrNoDevice) {
		t.Errorf("Addrs of no device: %v", err)
	}
	cancel()
	check(<-done)
	check(d.Create(t.Context()))
	check(d.Add(v6))
	have(v6)
	check(d.Delete())
	check(d.Delete())
	if n := len(heard); n != 0 {
		t.Errorf("heard %q too", <-heard)
	}
}

func TestFakeDevice(t *testing.T) {
	d := &FakeDevice{}
	deviceSteps(t, d, func(a netip.Addr) {
		if a.IsValid() {
			d.Lose(a)
		} else {
			d.LoseAll()
		}
	})
}

func TestKernelDevice(t *testing.T) {
	d := withDevice(t)
	deviceSteps(t, d, func(a netip.Addr) {
		switch {
		case !a.IsValid():
			run(t, "ip", "link", "del", d.Name)
		case a.Is4():
			run(t, "ip", "addr", "del", a.String()+"/32", "dev", d.Name)
		default:
			run(t, "ip", "addr", "del", a.String()+"/128", "dev", d.Name)
		}
	})
}

// The device is as people know it, is made so again, and is none of the node's
// addresses; packets to its addresses are the node's.
func TestKernelDeviceIsSeen(t *testing.T) {
	d := withDevice(t)
	if err := d.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"10.96.0.1", "fd00::1"} {
		if err := d.Add(netip.MustParseAddr(a)); err != nil {
			t.Fatal(err)
		}
	}
	run(t, "ip", "link", "set", "lo", "up")
	run(t, "ip", "addr", "add", "192.0.2.1/32", "dev", "lo")
	shown := run(t, "ip", "addr", "show", d.Name)
	for _, want := range []string{"<BROADCAST,NOARP>", "state DOWN", "inet 10.96.0.1/32 scope global kube-ipvs0", "inet6 fd00::1/128 scope global"} {
		if !strings.Contains(shown, want) {
			t.Errorf("ip addr shows no %q:\n%s", want, shown)
		}
	}
	if strings.Contains(shown, "tentative") {
		t.Errorf("an address waits for others that have it:\n%s", shown)
	}
	for _, a := range []string{"10.96.0.1", "fd00::1"} {
		if route := run(t, "ip", "route", "get", a); !strings.HasPrefix(route, "local "+a) {
			t.Errorf("ip route get %s: %s", a, route)
		}
	}
	have, err := Kernel{}.Addrs()
	if want := "[127.0.0.1 192.0.2.1 ::1]"; err != nil || !slices.Equal(have, []netip.Addr{
		netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("::1"),
	}) {
		t.Errorf("the node has %v, %v; want %s", have, err, want)
	}
	run(t, "ip", "link", "set", d.Name, "up", "arp", "on")
	if err := d.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	if shown := run(t, "ip", "link", "show", d.Name); !strings.Contains(shown, "<BROADCAST,NOARP>") {
		t.Errorf("the device stayed up: %s", shown)
	}
}

func TestDeviceOfAnotherType(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: a network namespace of its own")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	unshare(t)
	run(t, "ip", "link", "add", VIPDevice, "type", "veth", "peer", "name", "other")
	d := &KernelDevice{Name: VIPDevice}
	if err := d.Create(t.Context()); err == nil || !strings.Contains(err.Error(), "type veth instead of dummy") {
		t.Errorf("Create: %v", err)
	}
	if err := d.Delete(); err == nil {
		t.Error("Delete took away what is not ours")
	}
}

// A kernel without dummy devices names them, and asks for the module.
func TestDummyMissing(t *testing.T) {
	d := &KernelDevice{Name: VIPDevice}
	if err := d.loadDummy(t.Context()); err == nil || !strings.Contains(err.Error(), "modprobe dummy") {
		t.Errorf("without a loader: %v", err)
	}
	d.Load = func(_ context.Context, module string) error { return errors.New("no module " + module) }
	if err := d.loadDummy(t.Context()); err == nil || !strings.Contains(err.Error(), "no module dummy") {
		t.Errorf("a loader that fails: %v", err)
	}
}
