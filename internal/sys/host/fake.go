package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
)

// Fake is a host in memory. Its maps may be filled before it is used; after that
// use the methods, which are safe for concurrent use.
type Fake struct {
	// Values holds sysctls by name and parameters as "module/name". What is absent
	// does not exist.
	Values map[string]string
	// ReadOnly lists the keys of Values whose writes fail, as in a container
	// without the privilege.
	ReadOnly map[string]bool
	CPUs     int
	Loaded   map[string]bool // modules
	Loadable map[string]bool
	NoIPv6   bool

	mu     sync.Mutex // guards the maps and all below
	addrs  []netip.Addr
	notify map[chan struct{}]struct{}
	writes []string
}

var _ Host = (*Fake)(nil)

// SetAddrs replaces the addresses.
func (f *Fake) SetAddrs(a ...netip.Addr) {
	a = slices.Clone(a)
	slices.SortFunc(a, netip.Addr.Compare)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.addrs = slices.Compact(a)
	for ch := range f.notify {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

func (f *Fake) Addrs() ([]netip.Addr, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.addrs), nil
}

func (f *Fake) Watch(ctx context.Context, changed func([]netip.Addr)) error {
	ch := make(chan struct{}, 1)
	f.mu.Lock()
	if f.notify == nil {
		f.notify = map[chan struct{}]struct{}{}
	}
	f.notify[ch] = struct{}{}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.notify, ch)
	}()
	var last []netip.Addr
	for first := true; ; first = false {
		if now, _ := f.Addrs(); first || !slices.Equal(now, last) {
			last = now
			changed(slices.Clone(now))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ch:
		}
	}
}

func (f *Fake) Sysctl(name string) (string, error) { return f.get("sysctl", name) }

func (f *Fake) SetSysctl(name, value string) error { return f.set("sysctl", name, value) }

func (f *Fake) Parameter(module, name string) (string, error) {
	return f.get("parameter", module+"/"+name)
}

func (f *Fake) SetParameter(module, name, value string) error {
	return f.set("parameter", module+"/"+name, value)
}

func (f *Fake) get(kind, key string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, ok := f.Values[key]
	if !ok {
		return "", fmt.Errorf("read %s %s: %w", kind, key, fs.ErrNotExist)
	}
	return v, nil
}

func (f *Fake) set(kind, key, value string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, exists := f.Values[key]
	switch {
	case !exists:
		return fmt.Errorf("set %s %s to %s: %w", kind, key, value, fs.ErrNotExist)
	case f.ReadOnly[key]:
		return fmt.Errorf("set %s %s to %s: %w", kind, key, value, fs.ErrPermission)
	}
	f.Values[key] = value
	f.writes = append(f.writes, key+"="+value)
	return nil
}

// Writes returns the writes that succeeded, as "key=value" in their order.
func (f *Fake) Writes() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.writes)
}

func (f *Fake) OnlineCPUs() (int, error) { return f.CPUs, nil }

func (f *Fake) Module(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.Loaded[name] {
		return fmt.Errorf("kernel module %s: %w", name, fs.ErrNotExist)
	}
	return nil
}

func (f *Fake) Load(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.Loaded[name] {
		return nil
	}
	if !f.Loadable[name] {
		return fmt.Errorf("load kernel module %s: %w", name, fs.ErrNotExist)
	}
	if f.Loaded == nil {
		f.Loaded = map[string]bool{}
	}
	f.Loaded[name] = true
	return nil
}

func (f *Fake) IPv6() error {
	if f.NoIPv6 {
		return errors.New("the kernel has no IPv6 (no /proc/net/if_inet6)")
	}
	return nil
}

// String lists the addresses, sysctls and modules, one a line.
func (f *Fake) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	for _, a := range f.addrs {
		fmt.Fprintln(&b, "addr", a)
	}
	for _, k := range slices.Sorted(maps.Keys(f.Values)) {
		fmt.Fprintln(&b, "value", k, f.Values[k])
	}
	for _, m := range slices.Sorted(maps.Keys(f.Loaded)) {
		fmt.Fprintln(&b, "module", m)
	}
	return b.String()
}
