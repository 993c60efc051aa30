package ipset

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// The kernel and the fake destroy what is there, know what is not, and refuse what is
// in use.
func TestKernelDestroy(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to make a network namespace")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	for _, args := range [][]string{
		{"ipset", "create", "plain", "hash:ip"}, {"ipset", "create", "inner", "hash:ip"}, {"ipset", "create", "outer", "list:set"}, {"ipset", "add", "outer", "inner"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	for name, sets := range map[string]Sets{"kernel": Kernel{}, "fake": &Fake{Set: map[string]bool{"plain": false, "inner": true}}} {
		if existed, err := sets.Destroy("plain"); !existed || err != nil {
			t.Errorf("%s: destroy one: %t, %v", name, existed, err)
		}
		if existed, err := sets.Destroy("plain"); existed || err != nil {
			t.Errorf("%s: destroy it again: %t, %v", name, existed, err)
		}
		if _, err := sets.Destroy("inner"); !errors.Is(err, ErrBusy) {
			t.Errorf("%s: destroy one in use: %v", name, err)
		}
	}
}
