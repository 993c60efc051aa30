package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// end is one end of a veth pair with all that must be put back after the link was
// down, because the kernel forgets it then.
type end struct {
	host   *Host
	name   string
	index  int
	peer   net.HardwareAddr // the other end's
	addrs  []netip.Prefix
	routes []RouteSpec
}

// patience bounds the waits for the kernel; none of them takes longer than
// milliseconds unless something is broken.
const patience = 5 * time.Second

func (l *Lab) addLink(s LinkSpec) error {
	a, err := l.host(s.A.Host)
	if err != nil {
		return err
	}
	b, err := l.host(s.B.Host)
	if err != nil {
		return err
	}
	l.links++
	mac := func(side byte) net.HardwareAddr {
		return net.HardwareAddr{0x02, 0, 0, byte(l.links >> 8), byte(l.links), side}
	}
	veth := &netlink.Veth{
		LinkAttrs:        netlink.LinkAttrs{Name: s.A.Interface, HardwareAddr: mac(1), MTU: 1500},
		PeerName:         s.B.Interface,
		PeerHardwareAddr: mac(2),
		PeerMTU:          1500,
		PeerNamespace:    netlink.NsFd(int(b.ns.file.Fd())),
	}
	if err := a.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("make a veth pair %s, %s: %w", s.A.Interface, s.B.Interface, err)
	}
	ends := []*end{
		{host: a, name: s.A.Interface, peer: mac(2), addrs: s.A.Addrs},
		{host: b, name: s.B.Interface, peer: mac(1), addrs: s.B.Addrs},
	}
	for _, e := range ends {
		k, err := e.host.nl.LinkByName(e.name)
		if err != nil {
			return fmt.Errorf("find interface %s of %s: %w", e.name, e.host.name, err)
		}
		e.index = k.Attrs().Index
		e.host.ends[e.name] = e
		if err := e.host.nl.LinkSetUp(k); err != nil {
			return fmt.Errorf("set interface %s of %s up: %w", e.name, e.host.name, err)
		}
	}
	for _, e := range ends {
		if err := e.awaitUp(); err != nil {
			return err
		}
		if err := e.refuseTurningBack(); err != nil {
			return err
		}
		for _, p := range e.addrs {
			if err := e.putAddr(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// awaitUp waits until the interface has a carrier and sends.
func (e *end) awaitUp() error {
	deadline := time.Now().Add(patience)
	for {
		k, err := e.host.nl.LinkByIndex(e.index)
		if err != nil {
			return fmt.Errorf("read interface %s of %s: %w", e.name, e.host.name, err)
		}
		if k.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("interface %s of %s has no carrier", e.name, e.host.name)
		}
		time.Sleep(200 * time.Microsecond)
	}
}

func (e *end) putAddr(p netip.Prefix) error {
	if p.Addr().Is6() && !e.host.lab.ipv6 {
		return nil
	}
	if err := e.host.nl.AddrReplace(e.device(), kernelAddr(p)); err != nil {
		return fmt.Errorf("add address %s to interface %s of %s: %w", p, e.name, e.host.name, err)
	}
	return e.awaitLocal(p.Addr())
}

// awaitLocal waits until the host takes packets for an address: the kernel makes
// the local route of an IPv6 address in the background, without detection of
// duplicates too.
func (e *end) awaitLocal(a netip.Addr) error {
	deadline := time.Now().Add(patience)
	for a.Is6() {
		routes, err := e.host.nl.RouteGet(a.AsSlice())
		if err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("address %s of interface %s of %s is not in force: %v", a, e.name, e.host.name, err)
		}
		time.Sleep(100 * time.Microsecond)
	}
	return nil
}

func (e *end) device() netlink.Link {
	return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: e.index, Name: e.name}}
}

func kernelAddr(p netip.Prefix) *netlink.Addr {
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	return a
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func (l *Lab) addRoute(s RouteSpec) error {
	h, err := l.host(s.Host)
	if err != nil {
		return err
	}
	if s.To.Addr().Is6() && !l.ipv6 {
		return nil
	}
	e := h.ends[s.Dev]
	if e == nil {
		return fmt.Errorf("there is no interface %q", s.Dev)
	}
	if !s.Via.IsValid() && !s.To.IsSingleIP() {
		return errors.New("a route without next hop leads to a single address")
	}
	e.routes = slices.DeleteFunc(e.routes, func(r RouteSpec) bool { return r.To == s.To })
	e.routes = append(e.routes, s)
	return e.putRoute(s)
}

// putRoute installs the route and the permanent neighbour entry of its next hop.
func (e *end) putRoute(s RouteSpec) error {
	r := &netlink.Route{LinkIndex: e.index, Dst: ipNet(s.To)}
	hop := s.To.Addr()
	if s.Via.IsValid() {
		hop = s.Via
		r.Gw = s.Via.AsSlice()
		r.SetFlag(netlink.FLAG_ONLINK)
	} else {
		r.Scope = netlink.SCOPE_LINK
	}
	if s.Src.IsValid() {
		r.Src = s.Src.AsSlice()
	}
	n := &netlink.Neigh{LinkIndex: e.index, State: netlink.NUD_PERMANENT, IP: hop.AsSlice(), HardwareAddr: e.peer}
	if err := e.host.nl.NeighSet(n); err != nil {
		return fmt.Errorf("neighbour %s: %w", hop, err)
	}
	return e.host.nl.RouteReplace(r)
}
