// Package lab builds small networks out of network namespaces and sends real
// packets through them: a node under test, pods, other nodes, outside hosts.
//
// Namespaces are joined by veth pairs and routes only, never by bridges, so that
// every packet crosses the IP stack (and the netfilter hooks) of each host on its
// way. Neighbour entries are permanent: nothing waits for ARP, neighbour discovery
// or duplicate address detection, and a link that is cut loses packets silently.
//
// A namespace has no name: it is held by a thread of this process and ends with
// it, by a kill too, together with the programs started in it. Labs therefore run
// side by side and leave nothing behind. [Lab.Keep] gives names on request.
//
// Scope: IPv4 and IPv6; TCP, UDP and, where the kernel has it, SCTP. It needs
// root (CAP_SYS_ADMIN and CAP_NET_ADMIN) and Linux.
package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
)

// Topology is a network as data. Build makes hosts, links, routes and leaves in
// this order; all can be added to a living Lab too.
type Topology struct {
	Hosts  []HostSpec
	Links  []LinkSpec
	Routes []RouteSpec
	Leaves []LeafSpec
}

// HostSpec is one network namespace.
type HostSpec struct {
	Name     string
	Forwards bool // routes packets of others, both families
	// TurnsBack, with Forwards: a packet that would leave by the interface that it
	// came in by, because nobody has its destination, is answered with ICMP host
	// unreachable.
	TurnsBack bool
	// OwnRun gives the host's programs a mount namespace with a private /run and
	// a /sys that shows the host's interfaces, so that lock files such as
	// xtables.lock are not shared with the machine or with other labs.
	OwnRun bool
	// Addrs are held by lo, with global scope. Use them for hosts that have no
	// interface of their own to carry an address, such as a router.
	Addrs []netip.Addr
}

// LinkSpec is a veth pair. Both ends may be on one host.
type LinkSpec struct{ A, B EndSpec }

// EndSpec is one end of a LinkSpec.
type EndSpec struct {
	Host, Interface string
	Addrs           []netip.Prefix // with the length that the interface shows
}

// RouteSpec is a route of one host; it replaces an earlier one through the same
// interface to the same destination. Without Via the destination is a single
// address behind the link.
type RouteSpec struct {
	Host string
	To   netip.Prefix
	Dev  string
	Via  netip.Addr // need not be in a subnet of Dev
	Src  netip.Addr // preferred source address; may be unset
}

// LeafSpec is a host with one interface, eth0, behind another host, which gets a
// route to each of its addresses.
type LeafSpec struct {
	Name   string
	Behind string
	// Interface is the name of the link's end on Behind; Build picks one if empty.
	Interface string
	Addrs     []netip.Addr
	// From are the addresses from which Behind itself talks to the leaf; at most
	// one of each family counts.
	From []netip.Addr
}

// Lab is a living network.
type Lab struct {
	ipv6 bool // immutable

	mu    sync.Mutex // guards all below
	hosts map[string]*Host
	order []*Host
	links int // made so far; numbers interfaces and hardware addresses
}

// Supported returns nil if labs can be built here, else what is missing.
func Supported() error {
	n, err := newNamespace(false)
	if err != nil {
		return err
	}
	n.close()
	return nil
}

// Build makes the network. On an error nothing is left.
func Build(t Topology) (*Lab, error) {
	_, err := os.Stat("/proc/sys/net/ipv6")
	l := &Lab{ipv6: err == nil, hosts: map[string]*Host{}}
	if err := l.Extend(t); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Extend adds hosts, links, routes and leaves to the network. What was added
// before an error stays until Close.
func (l *Lab) Extend(t Topology) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range t.Hosts {
		if _, err := l.addHost(h); err != nil {
			return fmt.Errorf("host %s: %w", h.Name, err)
		}
	}
	for _, k := range t.Links {
		if err := l.addLink(k); err != nil {
			return fmt.Errorf("link from %s to %s: %w", k.A.Host, k.B.Host, err)
		}
	}
	for _, r := range t.Routes {
		if err := l.addRoute(r); err != nil {
			return fmt.Errorf("route of %s to %s: %w", r.Host, r.To, err)
		}
	}
	for _, f := range t.Leaves {
		if err := l.addLeaf(f); err != nil {
			return fmt.Errorf("host %s: %w", f.Name, err)
		}
	}
	return nil
}

// IPv6 reports whether the kernel has IPv6. Without it addresses and routes of
// that family are left out.
func (l *Lab) IPv6() bool { return l.ipv6 }

// Host returns the host of that name, nil if there is none.
func (l *Lab) Host(name string) *Host {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hosts[name]
}

// Close ends servers, programs and namespaces.
func (l *Lab) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, h := range l.order {
		errs = append(errs, h.close())
	}
	l.hosts, l.order = map[string]*Host{}, nil
	return errors.Join(errs...)
}

// Keep gives every namespace the name prefix plus the host's, for `ip netns`,
// with which it outlives the Lab. It returns the names.
func (l *Lab) Keep(prefix string) ([]string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var names []string
	for _, h := range l.order {
		name := prefix + h.name
		if err := h.ns.pin("/run/netns/" + name); err != nil {
			return names, fmt.Errorf("keep namespace %s: %w", name, err)
		}
		names = append(names, name)
	}
	return names, nil
}

func (l *Lab) addHost(s HostSpec) (*Host, error) {
	if l.hosts[s.Name] != nil {
		return nil, errors.New("there is a host of this name already")
	}
	ns, err := newNamespace(s.OwnRun)
	if err != nil {
		return nil, err
	}
	h := &Host{name: s.Name, lab: l, ns: ns, turnsBack: s.TurnsBack, ends: map[string]*end{}}
	if err := h.setUp(s); err != nil {
		ns.close()
		return nil, err
	}
	l.hosts[s.Name] = h
	l.order = append(l.order, h)
	return h, nil
}

func (l *Lab) host(name string) (*Host, error) {
	if h := l.hosts[name]; h != nil {
		return h, nil
	}
	return nil, fmt.Errorf("there is no host %q", name)
}

// gateways are the next hops of leaves; no interface carries them, the permanent
// neighbour entry is all that a next hop needs.
var gateways = [...]netip.Addr{
	netip.AddrFrom4([4]byte{169, 254, 1, 1}),
	netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: 1}),
}

var defaults = [...]netip.Prefix{
	netip.PrefixFrom(netip.IPv4Unspecified(), 0),
	netip.PrefixFrom(netip.IPv6Unspecified(), 0),
}

func (l *Lab) addLeaf(s LeafSpec) error {
	if _, err := l.addHost(HostSpec{Name: s.Name}); err != nil {
		return err
	}
	if s.Interface == "" {
		s.Interface = fmt.Sprintf("veth%d", l.links+1)
	}
	k := LinkSpec{A: EndSpec{Host: s.Name, Interface: "eth0"}, B: EndSpec{Host: s.Behind, Interface: s.Interface}}
	for _, a := range s.Addrs {
		k.A.Addrs = append(k.A.Addrs, single(a))
	}
	if err := l.addLink(k); err != nil {
		return err
	}
	for i, gw := range gateways {
		if err := l.addRoute(RouteSpec{Host: s.Name, To: defaults[i], Dev: "eth0", Via: gw}); err != nil {
			return fmt.Errorf("default route: %w", err)
		}
	}
	for _, a := range s.Addrs {
		r := RouteSpec{Host: s.Behind, To: single(a), Dev: s.Interface}
		for _, src := range s.From {
			if src.Is4() == a.Is4() {
				r.Src = src
				break
			}
		}
		if err := l.addRoute(r); err != nil {
			return fmt.Errorf("route of %s to %s: %w", s.Behind, a, err)
		}
	}
	return nil
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
