package host

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
)

// FakeDevice is a device in memory, not there at first. It is safe for concurrent
// use.
type FakeDevice struct {
	// Fail, if set, is asked before each of Create, Addrs, Add, Remove and Delete and
	// may return an error for it, which then changes nothing; n counts them from 1.
	// Op is as in "add 10.96.0.1".
	Fail func(n int, op string) error

	mu       sync.Mutex // guards all below
	exists   bool
	addrs    []netip.Addr
	ops      []string
	calls    int
	watchers map[*func(string)]struct{}
}

var _ Device = (*FakeDevice)(nil)

// Ops returns the operations since the last call, failed ones included.
func (d *FakeDevice) Ops() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	ops := d.ops
	d.ops = nil
	return ops
}

func (d *FakeDevice) begin(op string) error {
	d.ops = append(d.ops, op)
	d.calls++
	if d.Fail != nil {
		return d.Fail(d.calls, op)
	}
	return nil
}

func (d *FakeDevice) Create(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.begin("create"); err != nil {
		return fmt.Errorf("create device: %w", err)
	}
	d.exists = true
	return nil
}

func (d *FakeDevice) Addrs() ([]netip.Addr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.begin("list")
	if err == nil && !d.exists {
		err = ErrNoDevice
	}
	if err != nil {
		return nil, fmt.Errorf("list the addresses of the device: %w", err)
	}
	return slices.Clone(d.addrs), nil
}

func (d *FakeDevice) Add(a netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.begin("add " + a.String())
	if err == nil && !d.exists {
		err = ErrNoDevice
	}
	if err != nil {
		return fmt.Errorf("add address %s to the device: %w", a, err)
	}
	if i, found := slices.BinarySearchFunc(d.addrs, a, netip.Addr.Compare); !found {
		d.addrs = slices.Insert(d.addrs, i, a)
	}
	return nil
}

func (d *FakeDevice) Remove(a netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.begin("remove " + a.String()); err != nil {
		return fmt.Errorf("remove address %s from the device: %w", a, err)
	}
	d.addrs = slices.DeleteFunc(d.addrs, func(o netip.Addr) bool { return o == a })
	return nil
}

func (d *FakeDevice) Delete() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.begin("delete"); err != nil {
		return fmt.Errorf("delete the device: %w", err)
	}
	d.exists, d.addrs = false, nil
	return nil
}

// Lose removes an address as somebody else does; watchers hear of it.
func (d *FakeDevice) Lose(a netip.Addr) {
	d.mu.Lock()
	d.addrs = slices.DeleteFunc(d.addrs, func(o netip.Addr) bool { return o == a })
	d.mu.Unlock()
	d.tell("address " + a.String() + " was removed")
}

// LoseAll deletes the device as somebody else does; watchers hear of it.
func (d *FakeDevice) LoseAll() {
	d.mu.Lock()
	d.exists, d.addrs = false, nil
	d.mu.Unlock()
	d.tell("the device was deleted")
}

func (d *FakeDevice) tell(what string) {
	d.mu.Lock()
	var all []func(string)
	for w := range d.watchers {
		all = append(all, *w)
	}
	d.mu.Unlock()
	for _, gone := range all {
		gone(what)
	}
}

func (d *FakeDevice) Watch(ctx context.Context, ready chan<- struct{}, gone func(what string)) error {
	d.mu.Lock()
	if d.watchers == nil {
		d.watchers = map[*func(string)]struct{}{}
	}
	d.watchers[&gone] = struct{}{}
	d.mu.Unlock()
	close(ready)
	<-ctx.Done()
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.watchers, &gone)
	return nil
}

// String lists the addresses, one a line; "" if there is no device.
func (d *FakeDevice) String() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.exists {
		return ""
	}
	var b strings.Builder
	b.WriteString("device\n")
	for _, a := range d.addrs {
		fmt.Fprintln(&b, "addr", a)
	}
	return b.String()
}
