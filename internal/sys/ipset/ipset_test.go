package ipset

import (
	"errors"
	"os/exec"
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
)

// The kernel and the fake destroy what is there, know what is not, and refuse what is
// in use.
func TestKernelDestroy(t *testing.T) {
	t.Helper()
	nstest.Enter(t)
	for _, args := range [][]string{
		{"ipset", "create", "plain", "hash:ip"}, {"ipset", "create", "inner", "hash:ip"}, {"ipset", "create", "outer", "list:set"}, {"ipset", "add", "outer", "inner"},
		{"ipset", "create", "ports", "bitmap:port", "range", "0-65535"}, {"ipset", "add", "ports", "31080"}, {"ipset", "add", "ports", "32000"},
		{"ipset", "create", "pairs", "hash:ip,port"}, {"ipset", "add", "pairs", "192.0.2.11,sctp:31900"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	for name, sets := range map[string]Sets{"kernel": Kernel{}, "fake": &Fake{
		Set:     map[string]bool{"plain": false, "inner": true, "ports": false, "pairs": false},
		Entries: map[string][]uint16{"ports": {31080, 32000}, "pairs": {31900}},
	}} {
		for set, want := range map[string][]uint16{"ports": {31080, 32000}, "pairs": {31900}, "plain": nil, "none": nil} {
			if have, err := sets.Ports(set); err != nil || !slices.Equal(have, want) {
				t.Errorf("%s: ports of %s: %v, %v; want %v", name, set, have, err, want)
			}
		}
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
