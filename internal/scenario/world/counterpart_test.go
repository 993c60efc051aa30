package world

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
)

func TestCounterpart(t *testing.T) {
	tests := []struct{ four, six string }{
		{"10.61.1.250", "2001:db8:61:1::250"},
		{"10.61.3.8", "2001:db8:61:3::8"},
		{"10.62.0.20", "2001:db8:62::20"},
		{"10.62.1.0", "2001:db8:62::a"},
		{"10.62.2.255", "2001:db8:62::2ff"},
		{"10.62.3.0", "2001:db8:62::300"},
		{"10.62.255.254", "2001:db8:62::fffe"},
		{"192.0.2.11", "2001:db8:1::11"},
		{"198.51.100.7", "2001:db8:51::7"},
		{"198.51.100.200", "2001:db8:51::c8"},
		{"203.0.113.20", "2001:db8:113::14"},
		{"10.9.9.9", "2001:db8:4::a09:909"},
		{"127.0.0.1", "::1"},
		{"0.0.0.0", "::"},
	}
	for _, tt := range tests {
		if have := Counterpart(netip.MustParseAddr(tt.four)); have != netip.MustParseAddr(tt.six) {
			t.Errorf("%s: have %s, want %s", tt.four, have, tt.six)
		}
	}
}

// everyone is all addresses of the world's own ranges, and some beside them.
func everyone() []netip.Addr {
	var out []netip.Addr
	add := func(format string, args ...any) { out = append(out, netip.MustParseAddr(fmt.Sprintf(format, args...))) }
	for x := range 256 {
		for y := range 256 {
			add("10.61.%d.%d", x, y)
			add("10.62.%d.%d", x, y)
		}
		for _, r := range []string{"192.0.2", "198.51.100", "203.0.113", "10.9.9", "10.60.255", "192.0.3", "203.0.112"} {
			add("%s.%d", r, x)
		}
	}
	return out
}

func TestCounterpartIsOneToOne(t *testing.T) {
	from := map[netip.Addr]netip.Addr{}
	for _, a := range everyone() {
		c := Counterpart(a)
		if other, ok := from[c]; ok {
			t.Fatalf("%s and %s both have the counterpart %s", other, a, c)
		}
		from[c] = a
	}
}

// TestCounterpartsOfRangesHoldThoseOfAddresses: membership must be the same in both
// families, or a source range would mean something else.
func TestCounterpartsOfRangesHoldThoseOfAddresses(t *testing.T) {
	all := everyone()
	for _, tt := range []struct {
		four string
		n    int // ranges that stand for it, 0: any number
	}{
		{"0.0.0.0/0", 1}, {"10.61.0.0/16", 1}, {"10.61.1.0/24", 1}, {"10.62.0.0/16", 1}, {"192.0.2.0/24", 1}, {"192.0.2.11/32", 1},
		{"198.51.100.0/24", 1}, {"198.51.100.0/25", 1}, {"198.51.100.128/25", 1}, {"198.51.100.7/32", 1}, {"203.0.113.16/28", 1},
		{"10.9.9.0/24", 1}, {"10.9.9.9/28", 1},
		{"10.0.0.0/8", 3}, {"10.60.0.0/14", 3}, {"192.0.0.0/16", 2}, {"203.0.112.0/23", 2}, {"128.0.0.0/1", 4},
		{"192.0.2.0/25", 0}, {"192.0.2.8/29", 0}, {"10.61.1.0/28", 0}, {"10.61.250.0/23", 0}, {"10.61.0.0/20", 0}, {"10.62.0.0/24", 0},
		{"10.62.1.0/24", 0}, {"10.62.3.0/24", 1}, {"10.62.0.0/22", 0}, {"10.62.128.0/17", 1},
	} {
		p := netip.MustParsePrefix(tt.four)
		six := counterparts(p)
		if tt.n > 0 && len(six) != tt.n {
			t.Errorf("%s: have %v, want %d", p, six, tt.n)
		}
		for i, a := range all {
			if i%16 != 0 && !(a.As4()[0] != 10 || a.As4()[2] < 4) {
				continue // those in the rest of the large ranges are alike
			}
			c := Counterpart(a)
			if in := slices.ContainsFunc(six, func(r netip.Prefix) bool { return r.Contains(c) }); in != p.Contains(a) {
				t.Errorf("%s in %s is %t, but %s in %v is %t", a, p, p.Contains(a), c, six, in)
				break
			}
		}
	}
}
