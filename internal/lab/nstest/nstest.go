// Package nstest gives a test of kernel seams a network namespace of its own. The lab is
// for networks of several hosts.
package nstest

import (
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Enter moves the test's thread into a new network namespace, in which only the loopback
// device is, and up. The thread ends with the test. Without root the test is skipped.
func Enter(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to make a network namespace")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		t.Fatalf("bring the loopback device up: %v", err)
	}
}
