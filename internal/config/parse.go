package config

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"

	netutils "k8s.io/utils/net"
)

// parseAddr accepts what Kubernetes accepts, leading zeros included, and returns
// IPv4 addresses as such.
func parseAddr(s string) (netip.Addr, error) {
	a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(s))
	if !ok {
		return netip.Addr{}, fmt.Errorf("not an IP address")
	}
	return a.Unmap(), nil
}

// parsePrefix is parseAddr for a range; host bits are cleared.
func parsePrefix(s string) (netip.Prefix, error) {
	_, n, err := netutils.ParseCIDRSloppy(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("not a CIDR")
	}
	ones, bits := n.Mask.Size()
	a, _ := netip.AddrFromSlice(n.IP)
	if bits == 32 {
		a = a.Unmap()
	}
	return netip.PrefixFrom(a, ones), nil
}

// parseAddrPort parses IP:port with a port from 1 to 65535.
func parseAddrPort(s string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("not of the form IP:port")
	}
	a, err := parseAddr(host)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q is not an IP address", host)
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil || p == 0 {
		return netip.AddrPort{}, fmt.Errorf("%q is not a port from 1 to 65535", port)
	}
	return netip.AddrPortFrom(a, uint16(p)), nil
}
