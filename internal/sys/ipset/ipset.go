// Package ipset is the seam to the kernel's IP sets as far as cleaning up after others
// needs it: sets are destroyed by name. [Kernel] is the running kernel, [Fake] one in
// memory.
package ipset

import (
	"errors"
	"fmt"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ErrBusy: a rule or another set still refers to the set.
var ErrBusy = errors.New("it is in use")

// Sets are the IP sets of a network namespace.
type Sets interface {
	// Destroy destroys a set with its entries and reports whether there was one. It
	// fails with ErrBusy.
	Destroy(name string) (existed bool, err error)
}

// Kernel is the IP sets of the calling thread's network namespace. The zero value is
// ready.
type Kernel struct{}

var _ Sets = Kernel{}

// Destroy implements Sets. A kernel without IP sets has none.
func (Kernel) Destroy(name string) (bool, error) {
	_, err := netlink.IpsetList(name) // destroying what is not there is no error
	if err == nil {
		err = netlink.IpsetDestroy(name)
	}
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP):
		return false, nil
	}
	if n, ok := errors.AsType[nl.IPSetError](err); ok && (n == nl.IPSET_ERR_BUSY || n == nl.IPSET_ERR_REFERENCED) || errors.Is(err, unix.EBUSY) {
		err = ErrBusy
	}
	return true, fmt.Errorf("destroy IP set %s: %w", name, err)
}

// Fake is IP sets in memory: those that exist, by name, and whether each is in use.
type Fake struct {
	mu  sync.Mutex // guards InUse once it is used
	Set map[string]bool
}

var _ Sets = (*Fake)(nil)

// Destroy implements Sets.
func (f *Fake) Destroy(name string) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	busy, exists := f.Set[name]
	if busy {
		return true, fmt.Errorf("destroy IP set %s: %w", name, ErrBusy)
	}
	delete(f.Set, name)
	return exists, nil
}
