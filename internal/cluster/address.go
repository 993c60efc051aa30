package cluster

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// ParseAddr parses an address as the Kubernetes API always has: leading zeros are
// decimal, not octal ("010.0.0.1" is 10.0.0.1), an IPv4-mapped IPv6 address is
// the IPv4 address, and a zone is an error.
func ParseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		if a, err = netip.ParseAddr(stripZeros(s)); err != nil {
			return netip.Addr{}, fmt.Errorf("%q is not an IP address", s)
		}
	}
	if a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q has a zone", s)
	}
	return a.Unmap(), nil
}

// ParsePrefix parses a CIDR with the rules of [ParseAddr]; bits beyond the prefix
// length are cleared.
func ParsePrefix(s string) (netip.Prefix, error) {
	addr, length, ok := strings.Cut(s, "/")
	if !ok {
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR: no prefix length", s)
	}
	a, err := ParseAddr(addr)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR: %w", s, err)
	}
	bits, err := strconv.ParseUint(length, 10, 8)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR: bad prefix length", s)
	}
	n := int(bits)
	if a.Is4() && strings.Contains(addr, ":") {
		n -= 96 // the length counts the mapping's own 96 bits
	}
	p, err := a.Prefix(n)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR: bad prefix length", s)
	}
	return p, nil
}

// stripZeros removes leading zeros from every group of digits in an address.
func stripZeros(s string) string {
	var b strings.Builder
	for start := true; s != ""; s = s[1:] {
		c := s[0]
		if c == '0' && start && len(s) > 1 && isHex(s[1]) {
			continue
		}
		start = !isHex(c)
		b.WriteByte(c)
	}
	return b.String()
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}
