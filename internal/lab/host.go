package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
)

// Host is one living namespace.
type Host struct {
	name string
	lab  *Lab
	ns   *namespace
	nl   *netlink.Handle

	turnsBack bool

	ends map[string]*end // by interface; guarded by lab.mu

	mu      sync.Mutex // guards servers
	servers []*Server
}

// Name returns the host's name.
func (h *Host) Name() string { return h.name }

// quiet are the sysctls of every host: nothing is configured behind our back, and
// ICMP errors are not rationed, because they are outcomes to be seen.
var quiet = [...][2]string{
	{"ipv6/conf/default/accept_dad", "0"},
	{"ipv6/conf/all/accept_dad", "0"},
	{"ipv6/conf/default/accept_ra", "0"},
	{"ipv6/conf/default/addr_gen_mode", "1"},
	{"ipv6/conf/default/keep_addr_on_down", "1"},
	{"ipv6/conf/all/disable_ipv6", "0"},
	{"ipv4/conf/default/rp_filter", "0"},
	{"ipv4/conf/all/rp_filter", "0"},
	{"ipv4/conf/default/send_redirects", "0"},
	{"ipv4/conf/all/send_redirects", "0"},
	{"ipv4/icmp_ratemask", "0"},
	{"ipv4/icmp_msgs_per_sec", "100000"},
	{"ipv4/icmp_msgs_burst", "100000"},
	{"ipv6/icmp/ratelimit", "0"},
}

var forwarding = [...][2]string{
	{"ipv4/ip_forward", "1"},
	{"ipv6/conf/default/forwarding", "1"},
	{"ipv6/conf/all/forwarding", "1"},
}

func (h *Host) setUp(s HostSpec) error {
	err := h.ns.do(func() error {
		settings := quiet[:]
		if s.Forwards {
			settings = append(settings[:len(settings):len(settings)], forwarding[:]...)
		}
		for _, kv := range settings {
			// Kernels differ in what they have and what is per namespace.
			if err := writeSysctl(kv[0], kv[1]); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		var err error
		h.nl, err = netlink.NewHandle()
		return err
	})
	if err != nil {
		return err
	}
	lo := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "lo", Index: 1}}
	if err := h.nl.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	for _, a := range s.Addrs {
		if a.Is6() && !h.lab.ipv6 {
			continue
		}
		if err := h.nl.AddrAdd(lo, kernelAddr(single(a))); err != nil {
			return fmt.Errorf("add address %s to lo: %w", a, err)
		}
	}
	return nil
}

// writeSysctl writes a value below net of the calling thread's namespace.
func writeSysctl(key, value string) error {
	f, err := os.OpenFile(filepath.Join("/proc/sys/net", key), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// Sysctl writes a value of the host's network, such as "ipv4/ip_forward".
func (h *Host) Sysctl(key, value string) error {
	return h.ns.do(func() error { return writeSysctl(key, value) })
}

func (h *Host) close() error {
	h.mu.Lock()
	servers := h.servers
	h.servers = nil
	h.mu.Unlock()
	for _, s := range servers {
		s.shut()
	}
	h.nl.Close()
	return h.ns.close()
}

// AddAddr adds an address to an interface.
func (h *Host) AddAddr(dev string, p netip.Prefix) error {
	h.lab.mu.Lock()
	defer h.lab.mu.Unlock()
	e := h.ends[dev]
	if e == nil {
		return fmt.Errorf("host %s has no interface %q", h.name, dev)
	}
	e.addrs = append(e.addrs, p)
	return e.putAddr(p)
}

// DelAddr removes an address from an interface.
func (h *Host) DelAddr(dev string, a netip.Addr) error {
	h.lab.mu.Lock()
	defer h.lab.mu.Unlock()
	e := h.ends[dev]
	if e == nil {
		return fmt.Errorf("host %s has no interface %q", h.name, dev)
	}
	i := slices.IndexFunc(e.addrs, func(p netip.Prefix) bool { return p.Addr() == a })
	if i < 0 {
		return fmt.Errorf("interface %s of %s has no address %s", dev, h.name, a)
	}
	p := e.addrs[i]
	e.addrs = slices.Delete(e.addrs, i, i+1)
	if err := h.nl.AddrDel(e.device(), kernelAddr(p)); err != nil {
		return fmt.Errorf("remove address %s from interface %s of %s: %w", a, dev, h.name, err)
	}
	return nil
}

// Cut takes the host's interface down, without a word to anybody.
func (h *Host) Cut(dev string) error {
	h.lab.mu.Lock()
	defer h.lab.mu.Unlock()
	e := h.ends[dev]
	if e == nil {
		return fmt.Errorf("host %s has no interface %q", h.name, dev)
	}
	if err := h.nl.LinkSetDown(e.device()); err != nil {
		return fmt.Errorf("set interface %s of %s down: %w", dev, h.name, err)
	}
	return nil
}

// Join takes the interface up again, with its addresses and routes.
func (h *Host) Join(dev string) error {
	h.lab.mu.Lock()
	defer h.lab.mu.Unlock()
	e := h.ends[dev]
	if e == nil {
		return fmt.Errorf("host %s has no interface %q", h.name, dev)
	}
	if err := h.nl.LinkSetUp(e.device()); err != nil {
		return fmt.Errorf("set interface %s of %s up: %w", dev, h.name, err)
	}
	if err := e.awaitUp(); err != nil {
		return err
	}
	for _, p := range e.addrs {
		if err := e.putAddr(p); err != nil {
			return err
		}
	}
	for _, r := range e.routes {
		if err := e.putRoute(r); err != nil {
			return fmt.Errorf("route of %s to %s: %w", h.name, r.To, err)
		}
	}
	return nil
}

// DelRoute removes the routes to a destination that lead through an interface.
func (h *Host) DelRoute(dev string, to netip.Prefix) error {
	h.lab.mu.Lock()
	defer h.lab.mu.Unlock()
	e := h.ends[dev]
	if e == nil {
		return fmt.Errorf("host %s has no interface %q", h.name, dev)
	}
	e.routes = slices.DeleteFunc(e.routes, func(r RouteSpec) bool { return r.To == to })
	if to.Addr().Is6() && !h.lab.ipv6 {
		return nil
	}
	if err := h.nl.RouteDel(&netlink.Route{LinkIndex: e.index, Dst: ipNet(to), Scope: netlink.SCOPE_NOWHERE}); err != nil {
		return fmt.Errorf("remove the route of %s to %s: %w", h.name, to, err)
	}
	return nil
}
