// Package world is the small world of a scenario as data: its hosts, the addresses
// of both families that they and Services have, the words of the script that name
// them, and the Kubernetes objects in it. It makes nothing; a stage does.
package world

import (
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// Families is the set of address families that one run of a scenario uses.
type Families uint8

// The family sets, in the order in which a header line names them.
const (
	AsWritten Families = iota // no header line: addresses are what they are
	Only4                     // single-stack IPv4
	Only6                     // IPv4 literals stand for their IPv6 counterparts
	Dual                      // objects are dual-stack and every flow is checked in both families
)

func (f Families) String() string { return [...]string{"", "4", "6", "dual"}[f] }

// The IPv6 counterparts of IPv4 addresses. The ranges of the world carry the
// decimal digits of the address as they are (10.61.1.250 is 2001:db8:61:1::250);
// other addresses carry its 32 bits. Each address has a counterpart of its own.
//
//	10.61.x.y     2001:db8:61:x::y     pods
//	10.62.0.z     2001:db8:62::z       Services; 10.62.x.z for x above 2 as the number x*256+z
//	192.0.2.z     2001:db8:1::z        nodes
//	198.51.100.z  2001:db8:51::z       outside hosts, in hexadecimal
//	203.0.113.z   2001:db8:113::z      load balancers, in hexadecimal
//	a.b.c.d       2001:db8:4::a.b.c.d  anything else

// The cluster's pod range and its Service range in IPv6.
var (
	PodsV6     = netip.MustParsePrefix("2001:db8:61::/48")
	ServicesV6 = netip.MustParsePrefix("2001:db8:62::/112")
)

var (
	prefixNodes   = netip.MustParsePrefix("2001:db8:1::/64")
	prefixOutside = netip.MustParsePrefix("2001:db8:51::/120")
	prefixLB      = netip.MustParsePrefix("2001:db8:113::/120")
	prefixOther   = netip.MustParsePrefix("2001:db8:4::/96")
)

// digits is the number whose hexadecimal digits are the decimal ones of b: 250 is
// 0x250.
func digits(b byte) uint16 {
	return uint16(b/100)<<8 | uint16(b/10%10)<<4 | uint16(b%10)
}

// setGroup sets one of the eight 16-bit groups of an IPv6 address.
func setGroup(a netip.Addr, group int, v uint16) netip.Addr {
	b := a.As16()
	b[2*group], b[2*group+1] = byte(v>>8), byte(v)
	return netip.AddrFrom16(b)
}

// Counterpart returns the IPv6 address that stands for an IPv4 address.
func Counterpart(a netip.Addr) (netip.Addr, error) {
	b := a.As4()
	switch {
	case a.IsLoopback():
		return netip.IPv6Loopback(), nil
	case a.IsUnspecified():
		return netip.IPv6Unspecified(), nil
	case b[0] == 10 && b[1] == 61:
		return setGroup(setGroup(PodsV6.Addr(), 3, digits(b[2])), 7, digits(b[3])), nil
	case b[0] == 10 && b[1] == 62 && b[2] == 0:
		return setGroup(ServicesV6.Addr(), 7, digits(b[3])), nil
	case b[0] == 10 && b[1] == 62 && b[2] > 2:
		return setGroup(ServicesV6.Addr(), 7, uint16(b[2])<<8|uint16(b[3])), nil
	case b[0] == 10 && b[1] == 62:
		return netip.Addr{}, fmt.Errorf("address %s has no IPv6 counterpart: use 10.62.0.z or 10.62.3.0 and above", a)
	case b[0] == 192 && b[1] == 0 && b[2] == 2:
		return setGroup(prefixNodes.Addr(), 7, digits(b[3])), nil
	case b[0] == 198 && b[1] == 51 && b[2] == 100:
		return setGroup(prefixOutside.Addr(), 7, uint16(b[3])), nil
	case b[0] == 203 && b[1] == 0 && b[2] == 113:
		return setGroup(prefixLB.Addr(), 7, uint16(b[3])), nil
	}
	return setGroup(setGroup(prefixOther.Addr(), 6, uint16(b[0])<<8|uint16(b[1])), 7, uint16(b[2])<<8|uint16(b[3])), nil
}

// counterpartPrefix returns the IPv6 range that stands for an IPv4 range.
func counterpartPrefix(p netip.Prefix) (netip.Prefix, error) {
	bits := p.Bits()
	if bits == 0 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0), nil
	}
	p = p.Masked()
	if p.Addr().IsLoopback() {
		return netip.PrefixFrom(netip.IPv6Loopback(), 128), nil
	}
	a, err := Counterpart(p.Addr())
	if err != nil {
		return netip.Prefix{}, err
	}
	b := p.Addr().As4()
	decimal := false
	switch {
	case bits == 32:
		return netip.PrefixFrom(a, 128), nil
	case b[0] == 10 && b[1] == 61 && bits == 16:
		return PodsV6, nil
	case b[0] == 10 && b[1] == 61 && bits == 24, b[0] == 192 && b[1] == 0 && b[2] == 2 && bits == 24:
		return netip.PrefixFrom(a, 64), nil
	case b[0] == 10 && b[1] == 62 && bits == 16:
		return ServicesV6, nil
	case b[0] == 10 && (b[1] == 61 || b[1] == 62), b[0] == 192 && b[1] == 0 && b[2] == 2:
		decimal = true
	}
	if decimal {
		return netip.Prefix{}, fmt.Errorf("range %s has no IPv6 counterpart: use a whole range of the world or single addresses", p)
	}
	return netip.PrefixFrom(a, 96+bits), nil
}

// Twin returns the counterpart of a text that is one IPv4 address or range; ok is
// false if it is none.
func Twin(s string) (out string, ok bool, err error) {
	if a, e := netip.ParseAddr(s); e == nil && a.Is4() {
		a, err = Counterpart(a)
		return a.String(), true, err
	}
	if p, e := netip.ParsePrefix(s); e == nil && p.Addr().Is4() {
		p, err = counterpartPrefix(p)
		return p.String(), true, err
	}
	return s, false, nil
}

var literal = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+(/\d+|:\d+)?`)

// MapText replaces the IPv4 addresses, ranges and address:port pairs in a text by
// their counterparts.
func MapText(s string) (string, error) {
	var first error
	out := literal.ReplaceAllStringFunc(s, func(m string) string {
		host, port, hasPort := strings.Cut(m, ":")
		t, ok, err := Twin(host)
		if err != nil && first == nil {
			first = err
		}
		if !ok || err != nil {
			return m
		}
		if hasPort {
			return "[" + t + "]:" + port
		}
		return t
	})
	return out, first
}

// MapTree replaces every string of a decoded YAML document that is an IPv4 address
// or range, or names the family, by its counterpart.
func MapTree(v any) (any, error) {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			m, err := MapTree(e)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", k, err)
			}
			v[k] = m
		}
	case []any:
		for i, e := range v {
			m, err := MapTree(e)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", strconv.Itoa(i), err)
			}
			v[i] = m
		}
	case string:
		if v == "IPv4" {
			return "IPv6", nil
		}
		parts := strings.Split(v, ",") // clusterCIDR is a list in one string
		for i, p := range parts {
			t, _, err := Twin(strings.TrimSpace(p))
			if err != nil {
				return nil, err
			}
			parts[i] = t
		}
		return strings.Join(parts, ","), nil
	}
	return v, nil
}
