package host

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tree writes files under a directory that stands for /proc or /sys.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestSysctl(t *testing.T) {
	k := Kernel{Proc: tree(t, map[string]string{
		"sys/net/ipv4/ip_forward":                "0\n",
		"sys/net/ipv4/conf/eth0.100/rp_filter":   "1\n",
		"sys/net/netfilter/nf_conntrack_max":     "65536\n",
		"sys/net/ipv4/ip_local_port_range":       "32768\t60999\n",
		"sys/net/ipv6/conf/all/disable_ipv6":     "0\n",
		"net/if_inet6":                           "",
		"sys/net/ipv4/conf/all/route_localnet/x": "",
	})}
	for name, want := range map[string]string{
		"net.ipv4.ip_forward": "0", "net.ipv4.conf.eth0/100.rp_filter": "1", "net.ipv4.ip_local_port_range": "32768\t60999",
	} {
		if have, err := k.Sysctl(name); err != nil || have != want {
			t.Errorf("%s is %q, %v; want %q", name, have, err, want)
		}
	}
	if err := k.SetSysctl("net.ipv4.ip_forward", "1"); err != nil {
		t.Error(err)
	}
	if have, err := k.Sysctl("net.ipv4.ip_forward"); err != nil || have != "1" {
		t.Errorf("after the write: %q, %v", have, err)
	}
	_, err := k.Sysctl("net.ipv4.no_such")
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "net.ipv4.no_such") {
		t.Errorf("error %v", err)
	}
	if err := k.SetSysctl("net.ipv4.no_such", "1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v; a write must not create a file", err)
	}
	if err := k.IPv6(); err != nil {
		t.Error(err)
	}
}

func TestNoIPv6(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"not in the kernel": {"sys/net/ipv6/conf/all/disable_ipv6": "0\n"},
		"switched off":      {"net/if_inet6": "", "sys/net/ipv6/conf/all/disable_ipv6": "1\n"},
	} {
		if err := (Kernel{Proc: tree(t, files)}).IPv6(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestModules(t *testing.T) {
	k := Kernel{Sys: tree(t, map[string]string{"module/nf_conntrack/parameters/hashsize": "16384\n", "module/ip_vs/refcnt": "0\n"})}
	if have, err := k.Parameter("nf_conntrack", "hashsize"); err != nil || have != "16384" {
		t.Errorf("have %q, %v", have, err)
	}
	if err := k.SetParameter("nf_conntrack", "hashsize", "32768"); err != nil {
		t.Error(err)
	}
	if have, _ := k.Parameter("nf_conntrack", "hashsize"); have != "32768" {
		t.Errorf("after the write: %q", have)
	}
	if err := k.Module("ip-vs"); err != nil { // as modprobe, either spelling
		t.Error(err)
	}
	if err := k.Module("ip_vs_rr"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	if err := k.Load(t.Context(), "ip_vs"); err != nil {
		t.Error(err)
	}
}

func TestCPUs(t *testing.T) {
	for list, want := range map[string]int{"0": 1, "0-3": 4, "0-3,8,10-11": 7} {
		k := Kernel{Sys: tree(t, map[string]string{"devices/system/cpu/online": list + "\n"})}
		if n, err := k.OnlineCPUs(); err != nil || n != want {
			t.Errorf("%q: %d, %v; want %d", list, n, err, want)
		}
	}
	for _, list := range []string{"", "a", "3-1", "0-", "1,,2"} {
		if n, err := countCPUs(list); err == nil {
			t.Errorf("%q: %d CPUs and no error", list, n)
		}
	}
}

// Both kinds of host behave the same: what is reported at once, after changes, and
// not without one.
func TestFakeWatch(t *testing.T) {
	f := &Fake{}
	watchSteps(t, f, func(t *testing.T, add bool, addr string) {
		have, _ := f.Addrs()
		a := netip.MustParseAddr(addr)
		if add {
			f.SetAddrs(append(have, a)...)
		} else {
			f.SetAddrs(slices.DeleteFunc(have, func(o netip.Addr) bool { return o == a })...)
		}
	}, func(_ *testing.T, f func()) { go f() })
}

func TestKernelWatch(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: a network namespace of its own")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	ns := unshare(t)
	ip := func(t *testing.T, args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	watchSteps(t, Kernel{}, func(t *testing.T, add bool, addr string) {
		bits := "/32"
		if strings.Contains(addr, ":") {
			bits = "/128"
		}
		verb := "del"
		if add {
			verb = "add"
		}
		ip(t, "addr", verb, addr+bits, "dev", "lo")
	}, func(t *testing.T, f func()) {
		go func() {
			runtime.LockOSThread()
			if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
				t.Errorf("enter the namespace: %v", err)
				return
			}
			f()
		}()
	})
}

// unshare puts the calling thread into a new network namespace.
func unshare(t *testing.T) int {
	t.Helper()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	ns, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(ns) })
	return ns
}

func watchSteps(t *testing.T, h Host, edit func(t *testing.T, add bool, addr string), start func(*testing.T, func())) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	seen := make(chan []netip.Addr, 100)
	done := make(chan error, 1)
	start(t, func() { done <- h.Watch(ctx, func(a []netip.Addr) { seen <- a }) })
	await := func(want ...string) {
		t.Helper()
		var last []netip.Addr
		limit := time.After(30 * time.Second)
		for {
			select {
			case last = <-seen:
			case <-limit:
				t.Fatalf("have %v, want %v", last, want)
			}
			var have []string
			for _, a := range last {
				have = append(have, a.String())
			}
			if slices.Equal(have, want) {
				return
			}
		}
	}
	await()
	edit(t, true, "192.0.2.11")
	await("192.0.2.11")
	edit(t, true, "2001:db8:1::11")
	edit(t, true, "10.9.9.9")
	await("10.9.9.9", "192.0.2.11", "2001:db8:1::11")
	edit(t, false, "192.0.2.11")
	await("10.9.9.9", "2001:db8:1::11")
	if have, err := h.Addrs(); err != nil || len(have) != 2 {
		t.Errorf("Addrs: %v, %v", have, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Watch: %v", err)
	}
}

func TestFakeRefuses(t *testing.T) {
	f := &Fake{Values: map[string]string{"a": "1"}, ReadOnly: map[string]bool{"a": true}, Loadable: map[string]bool{"ip_vs": true}}
	if err := f.SetSysctl("a", "2"); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("error %v", err)
	}
	if err := f.SetSysctl("b", "2"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	if err := errors.Join(f.Load(t.Context(), "ip_vs"), f.Module("ip_vs")); err != nil {
		t.Error(err)
	}
	if err := f.Load(t.Context(), "no_such"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	f.SetAddrs(netip.MustParseAddr("192.0.2.11"))
	if have, want := f.String(), "addr 192.0.2.11\nvalue a 1\nmodule ip_vs\n"; have != want {
		t.Errorf("prints %q, want %q", have, want)
	}
}
