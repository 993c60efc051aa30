// Package ipset is the seam to the kernel's IP sets as far as cleaning up after others
// needs it: sets are read and destroyed by name. [Kernel] is the running kernel, [Fake] one in
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
	// Ports lists the ports of a set's entries; a set that does not exist has none.
	Ports(name string) ([]uint16, error)
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
	case isNone(err):
		return false, nil
	}
	if n, ok := errors.AsType[nl.IPSetError](err); ok && (n == nl.IPSET_ERR_BUSY || n == nl.IPSET_ERR_REFERENCED) || errors.Is(err, unix.EBUSY) {
		err = ErrBusy
	}
	return true, fmt.Errorf("destroy IP set %s: %w", name, err)
}

// isNone reports whether an error says that there is no such set, or that the kernel has
// no IP sets.
func isNone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// Ports implements Sets.
func (Kernel) Ports(name string) ([]uint16, error) {
	set, err := netlink.IpsetList(name)
	if err != nil {
		if isNone(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("list IP set %s: %w", name, err)
	}
	var out []uint16
	for i := range set.Entries {
		if p := set.Entries[i].Port; p != nil {
			out = append(out, *p)
		}
	}
	return out, nil
}

// Fake is IP sets in memory: those that exist, by name, and whether each is in use; and
// the ports of their entries.
type Fake struct {
	mu      sync.Mutex // guards all below once it is used
	Set     map[string]bool
	Entries map[string][]uint16
}

// Ports implements Sets.
func (f *Fake) Ports(name string) ([]uint16, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, exists := f.Set[name]; !exists {
		return nil, nil
	}
	return f.Entries[name], nil
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
