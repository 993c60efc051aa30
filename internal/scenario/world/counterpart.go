package world

import (
	"encoding/binary"
	"net/netip"
)

// The IPv6 counterparts of IPv4 addresses. The ranges of the world carry the
// decimal digits of the address as they are (10.61.1.250 is 2001:db8:61:1::250);
// other addresses carry its 32 bits. Each address has a counterpart of its own.
//
//	10.61.x.y     2001:db8:61:x::y     pods
//	10.62.0.z     2001:db8:62::z       Services; 10.62.x.z for x above 2 as the number x*256+z,
//	                                   for 1 and 2 as the numbers left between
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
	nodeRange   = netip.MustParsePrefix("192.0.2.0/24")
	prefixOther = netip.MustParsePrefix("2001:db8:4::/96")
)

// ranges are those of the world in both families.
var ranges = []struct{ four, six netip.Prefix }{
	{ClusterCIDR, PodsV6},
	{serviceRange, ServicesV6},
	{nodeRange, netip.MustParsePrefix("2001:db8:1::/64")},
	{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:51::/120")},
	{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:113::/120")},
}

// digits is the number whose hexadecimal digits are the decimal ones of b: 250 is
// 0x250.
func digits(b byte) uint16 {
	return uint16(b/100)<<8 | uint16(b/10%10)<<4 | uint16(b%10)
}

// undigits is the number with index n, from 0 to 511, among those below 0x300 that are
// no byte's digits.
func undigits(n uint16) uint16 {
	var taken [0x300]bool
	for b := range 256 {
		taken[digits(byte(b))] = true
	}
	for v := uint16(0); ; v++ {
		switch {
		case taken[v]:
		case n == 0:
			return v
		default:
			n--
		}
	}
}

// group returns one of the eight 16-bit groups of an IPv6 address.
func group(a netip.Addr, i int) uint16 {
	b := a.As16()
	return binary.BigEndian.Uint16(b[2*i:])
}

// setGroup sets one.
func setGroup(a netip.Addr, i int, v uint16) netip.Addr {
	b := a.As16()
	binary.BigEndian.PutUint16(b[2*i:], v)
	return netip.AddrFrom16(b)
}

// Counterpart returns the IPv6 address that stands for an IPv4 address.
func Counterpart(a netip.Addr) netip.Addr {
	switch {
	case a.IsLoopback():
		return netip.IPv6Loopback()
	case a.IsUnspecified():
		return netip.IPv6Unspecified()
	}
	b := a.As4()
	third, last := b[2], b[3]
	for _, r := range ranges {
		switch {
		case !r.four.Contains(a):
		case r.four == ClusterCIDR:
			return setGroup(setGroup(r.six.Addr(), 3, digits(third)), 7, digits(last))
		case r.four == serviceRange && (third == 1 || third == 2):
			return setGroup(r.six.Addr(), 7, undigits(uint16(third-1)<<8|uint16(last)))
		case r.four == serviceRange && third > 2:
			return setGroup(r.six.Addr(), 7, uint16(third)<<8|uint16(last))
		case r.four == serviceRange, r.four == nodeRange:
			return setGroup(r.six.Addr(), 7, digits(last))
		default:
			return setGroup(r.six.Addr(), 7, uint16(last))
		}
	}
	return bitwise(a)
}

// bitwise is the counterpart of an address that is in none of the world's ranges.
func bitwise(a netip.Addr) netip.Addr {
	b := a.As4()
	return setGroup(setGroup(prefixOther.Addr(), 6, binary.BigEndian.Uint16(b[:])), 7, binary.BigEndian.Uint16(b[2:]))
}

// counterparts returns the IPv6 ranges that stand for an IPv4 range: those that hold the
// counterparts of its addresses and of no others. There are several if it holds more
// than one of the world's ranges, or a part of one whose addresses are decimal digits.
func counterparts(p netip.Prefix) []netip.Prefix {
	p = p.Masked()
	switch {
	case p.Bits() == 0:
		return []netip.Prefix{netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	case p.Addr().IsLoopback():
		return []netip.Prefix{netip.PrefixFrom(netip.IPv6Loopback(), 128)}
	case p.IsSingleIP():
		return []netip.Prefix{netip.PrefixFrom(Counterpart(p.Addr()), 128)}
	}
	var out []netip.Prefix
	for _, r := range ranges {
		switch {
		case r.four == p:
			return []netip.Prefix{r.six}
		case r.four.Contains(p.Addr()) && r.four.Bits() < p.Bits():
			return partOf(r.four, p)
		case p.Contains(r.four.Addr()):
			out = append(out, r.six)
		}
	}
	return append(out, netip.PrefixFrom(bitwise(p.Addr()), 96+p.Bits()))
}

// partOf does that for a part p of one of the world's ranges.
func partOf(whole, p netip.Prefix) []netip.Prefix {
	// What p differs in from the rest is one group of the counterparts.
	at, among, step := 7, netip.PrefixFrom(p.Addr(), 24).Masked(), 1
	switch {
	case whole == ClusterCIDR && p.Bits() <= 24:
		at, among, step = 3, whole, 256
	case whole == serviceRange:
		among = whole
	}
	first := among.Addr().As4()
	var in, out []uint16
	for n := 0; n < 1<<(32-among.Bits()); n += step {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(first[:])+uint32(n))
		a := netip.AddrFrom4(b)
		if v := group(Counterpart(a), at); p.Contains(a) {
			in = append(in, v)
		} else {
			out = append(out, v)
		}
	}
	return cover(setGroup(Counterpart(among.Addr()), 7, 0), at, 0, in, out)
}

// cover returns the fewest ranges that hold base with each value of in, and with none of
// out, in a group, whose first bits are the same in all of these values.
func cover(base netip.Addr, at, bits int, in, out []uint16) []netip.Prefix {
	switch {
	case len(in) == 0:
		return nil
	case len(out) == 0:
		p := netip.PrefixFrom(setGroup(base, at, in[0]), 16*at+bits)
		return []netip.Prefix{p.Masked()}
	}
	halves := func(all []uint16) (h [2][]uint16) {
		for _, v := range all {
			i := v >> (15 - bits) & 1
			h[i] = append(h[i], v)
		}
		return h
	}
	i, o := halves(in), halves(out)
	return append(cover(base, at, bits+1, i[0], o[0]), cover(base, at, bits+1, i[1], o[1])...)
}
