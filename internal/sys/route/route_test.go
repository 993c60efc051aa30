package route

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
)

func entries() []Entry {
	return []Entry{
		{Local: netip.MustParsePrefix("169.254.247.0/30"), Table: LocalTable},
		{Local: netip.MustParsePrefix("fd73::/126"), Table: LocalTable},
		{Local: netip.MustParsePrefix("0.0.0.0/0"), Table: 7372},
		{Local: netip.MustParsePrefix("::/0"), Table: 7372},
		{Mark: 0x8000, Priority: 99, Table: 7372},
		{V6: true, Mark: 0x8000, Priority: 99, Table: 7372},
		{Mark: 0x8000, Priority: 98, In: "lo", Goto: 100},
		{Priority: 100, Nop: true},
		{V6: true, Mark: 0x8000, Priority: 98, In: "lo", Goto: 100},
		{V6: true, Priority: 100, Nop: true},
	}
}

// Kernel and fake list the same after the same calls.
func TestFakeIsHonest(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	both := []Routing{Kernel{}, &Fake{}}
	all := entries()
	compare := func(want []Entry) {
		t.Helper()
		for _, r := range both {
			have, err := r.List(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if !sameEntries(have, want) {
				t.Fatalf("%T lists %v, want %v", r, have, want)
			}
		}
	}
	for _, r := range both {
		for range 2 { // twice is no error
			for _, e := range all {
				if err := r.Add(ctx, e); err != nil {
					t.Fatalf("%T: %v", r, err)
				}
			}
		}
	}
	compare(all)
	for _, r := range both {
		for range 2 {
			for _, e := range all[:3] {
				if err := r.Delete(ctx, e); err != nil {
					t.Fatalf("%T: %v", r, err)
				}
			}
		}
	}
	compare(all[3:])
	for _, r := range both {
		changes, err := Settle(ctx, r, all[1:5])
		if err != nil || len(changes) != 7 {
			t.Fatalf("%T: Settle did %q, %v, want two additions and five deletions", r, changes, err)
		}
	}
	compare(all[1:5])
}

func sameEntries(a, b []Entry) bool {
	if len(a) != len(b) {
		return false
	}
	for _, e := range a {
		if !slices.Contains(b, e) {
			return false
		}
	}
	return true
}

// A socket can be bound to an address of a local prefix that no interface has.
func TestAddressesOfALocalPrefixAreOwn(t *testing.T) {
	nstest.Enter(t)
	if err := (Kernel{}).Add(context.Background(), entries()[0]); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp4", "169.254.247.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestForeignRoutesAreNotOurs(t *testing.T) {
	nstest.Enter(t)
	r, err := Entry{Local: netip.MustParsePrefix("192.0.2.7/32"), Table: LocalTable}.route()
	if err != nil {
		t.Fatal(err)
	}
	r.Protocol = unix.RTPROT_STATIC
	if err := netlink.RouteAdd(r); err != nil {
		t.Fatal(err)
	}
	have, err := (Kernel{}).List(context.Background())
	if err != nil || len(have) != 0 {
		t.Fatalf("lists %v, %v, want nothing", have, err)
	}
}

// inside runs f on a thread that is in a network namespace.
func inside(ns *os.File, f func() error) error {
	runtime.LockOSThread() // never unlocked, as above
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return err
	}
	return f()
}

// Whoever deletes something of ours is noticed, but for routes with a source, which
// nothing depends on.
func TestWatch(t *testing.T) {
	nstest.Enter(t)
	ns, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	for _, r := range []Routing{Kernel{}, &Fake{}} {
		ctx, cancel := context.WithCancel(context.Background())
		heard, ready, ended := make(chan string, 8), make(chan struct{}), make(chan error, 1)
		go func() {
			ended <- inside(ns, func() error { return r.Watch(ctx, ready, func(what string) { heard <- what }) })
		}()
		<-ready
		sourced := Entry{Local: netip.MustParsePrefix("10.62.0.20/32"), Table: LocalTable, Source: netip.MustParseAddr("127.0.0.1")}
		if err := errors.Join(r.Add(ctx, sourced), r.Delete(ctx, sourced)); err != nil {
			t.Fatal(err)
		}
		for _, i := range []int{0, 1, 4, 5, 6, 9} {
			e := entries()[i]
			if err := errors.Join(r.Add(ctx, e), r.Delete(ctx, e)); err != nil {
				t.Fatal(err)
			}
			select {
			case <-heard:
			case <-time.After(10 * time.Second):
				t.Fatalf("%T: nothing was heard of the end of %s", r, e)
			}
		}
		if n := len(heard); n > 0 {
			t.Errorf("%T: %d deletions too many were heard of", r, n)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("%T: Watch returned %v", r, err)
		}
	}
}

// A route with a source takes the place of the kernel's own, so that new connections of
// the host begin elsewhere while those that began at the address go on.
func TestSource(t *testing.T) {
	nstest.Enter(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ own, vip netip.Addr }{
		{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("10.62.0.20")},
		{netip.MustParseAddr("2001:db8:1::11"), netip.MustParseAddr("2001:db8:62::20")},
	} {
		for _, a := range []netip.Addr{c.own, c.vip} {
			flags := 0
			if a.Is6() {
				flags = unix.IFA_F_NODAD
			}
			ip := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
			if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: ip, Flags: flags}); err != nil {
				t.Fatal(err)
			}
		}
		l, err := net.Listen("tcp", netip.AddrPortFrom(c.vip, 80).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		from := func() (netip.Addr, net.Conn, net.Conn) {
			t.Helper()
			// To an IPv6 address that has just come a connection may fail.
			var client net.Conn
			for limit := time.Now().Add(time.Minute); ; {
				if client, err = net.DialTimeout("tcp", l.Addr().String(), time.Second/10); err == nil {
					break
				} else if time.Now().After(limit) {
					t.Fatal(err)
				}
			}
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			return netip.MustParseAddrPort(client.LocalAddr().String()).Addr(), client, server
		}
		old, client, server := from()
		if old != c.vip {
			t.Errorf("without a route of ours connections begin at %s, want %s", old, c.vip)
		}
		if have, err := (Kernel{}).From(c.vip); err != nil || have != c.vip {
			t.Errorf("From: %s, %v", have, err)
		}
		e := Entry{Local: netip.PrefixFrom(c.vip, c.vip.BitLen()), Table: LocalTable, Source: c.own}
		for range 2 {
			if err := (Kernel{}).Add(t.Context(), e); err != nil {
				t.Fatal(err)
			}
		}
		if have, _, _ := from(); have != c.own {
			t.Errorf("connections begin at %s, want %s", have, c.own)
		}
		if _, err := client.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		if n, err := server.Read(make([]byte, 1)); n != 1 {
			t.Errorf("an open connection ended: %v", err)
		}
		if have, err := (Kernel{}).List(t.Context()); err != nil || !slices.Equal(have, []Entry{e}) {
			t.Errorf("listed are %v, %v", have, err)
		}
		if err := (Kernel{}).Delete(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
}

// What ipvs mode has is left alone when another mode settles its own.
func TestSettleLeavesIPVS(t *testing.T) {
	r := &Fake{}
	all := []Entry{
		{Local: netip.MustParsePrefix("0.0.0.0/0"), Table: SteerTable},
		{Mark: 0x8000, Priority: 114, Table: MainTable, In: "lo"},
		{Mark: 0x8000, Priority: 115, Table: SteerTable},
		{Local: netip.MustParsePrefix("10.62.0.20/32"), Table: LocalTable, Source: netip.MustParseAddr("192.0.2.11")},
	}
	for _, e := range append(all, entries()...) {
		if err := r.Add(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	changes, err := Settle(t.Context(), r, entries()[:1])
	if left, _ := r.List(t.Context()); err != nil || len(changes) != len(entries())-1 || !sameEntries(left, append(all, entries()[0])) {
		t.Errorf("Settle did %q, %v; left are %v", changes, err, left)
	}
}
