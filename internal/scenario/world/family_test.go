package world

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func TestCounterpart(t *testing.T) {
	tests := []struct{ four, six string }{
		{"10.61.1.250", "2001:db8:61:1::250"},
		{"10.61.3.8", "2001:db8:61:3::8"},
		{"10.62.0.20", "2001:db8:62::20"},
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
		have, err := Counterpart(netip.MustParseAddr(tt.four))
		if err != nil || have != netip.MustParseAddr(tt.six) {
			t.Errorf("%s: have %s, %v, want %s", tt.four, have, err, tt.six)
		}
	}
}

// TestCounterpartIsOneToOne goes over all addresses of the world's own ranges.
func TestCounterpartIsOneToOne(t *testing.T) {
	from := map[netip.Addr]netip.Addr{}
	add := func(s string) {
		a := netip.MustParseAddr(s)
		c, err := Counterpart(a)
		if err != nil {
			return // none is not another's
		}
		if other, ok := from[c]; ok {
			t.Fatalf("%s and %s both have the counterpart %s", other, a, c)
		}
		from[c] = a
	}
	for x := range 256 {
		for y := range 256 {
			add(fmt.Sprintf("10.61.%d.%d", x, y))
			add(fmt.Sprintf("10.62.%d.%d", x, y))
		}
		for _, r := range []string{"192.0.2", "198.51.100", "203.0.113", "10.9.9"} {
			add(fmt.Sprintf("%s.%d", r, x))
		}
	}
}

// TestCounterpartOfRangesHoldsThoseOfAddresses: membership must be the same in both
// families, or a source range would mean something else.
func TestCounterpartOfRangesHoldsThoseOfAddresses(t *testing.T) {
	ranges := []string{"0.0.0.0/0", "10.61.0.0/16", "10.61.1.0/24", "10.62.0.0/16", "192.0.2.0/24", "192.0.2.11/32",
		"198.51.100.0/24", "198.51.100.0/25", "198.51.100.128/25", "198.51.100.7/32", "203.0.113.16/28", "10.9.9.0/24"}
	addrs := []string{"10.61.1.5", "10.61.2.200", "10.62.0.20", "10.62.7.1", "192.0.2.11", "192.0.2.111", "198.51.100.7",
		"198.51.100.127", "198.51.100.128", "198.51.100.200", "203.0.113.20", "203.0.113.40", "10.9.9.9", "10.9.8.9"}
	for _, r := range ranges {
		p := netip.MustParsePrefix(r)
		p6, err := counterpartPrefix(p)
		if err != nil {
			t.Errorf("%s: %v", r, err)
			continue
		}
		for _, s := range addrs {
			a := netip.MustParseAddr(s)
			a6, err := Counterpart(a)
			if err != nil {
				t.Fatal(err)
			}
			if p.Contains(a) != p6.Contains(a6) {
				t.Errorf("%s in %s is %t, but %s in %s is %t", a, p, p.Contains(a), a6, p6, p6.Contains(a6))
			}
		}
	}
}

func TestNoCounterpart(t *testing.T) {
	if _, err := Counterpart(netip.MustParseAddr("10.62.1.1")); err == nil {
		t.Error("10.62.1.1 has a counterpart, but it would be another's")
	}
	for _, r := range []string{"192.0.2.0/25", "10.61.1.0/28", "10.62.0.0/24"} {
		if _, err := counterpartPrefix(netip.MustParsePrefix(r)); err == nil {
			t.Errorf("%s has a counterpart, but no range holds just its addresses'", r)
		}
	}
}

func TestMapText(t *testing.T) {
	in := ` pod:probe tcp 10.62.0.20:80 -> web src=192.0.2.11 dst=10.62.0.40:53 10.61.0.0/16 version 1.37.2`
	want := ` pod:probe tcp [2001:db8:62::20]:80 -> web src=2001:db8:1::11 dst=[2001:db8:62::40]:53 2001:db8:61::/48 version 1.37.2`
	have, err := MapText(in)
	if err != nil || have != want {
		t.Errorf("have %q, %v\nwant %q", have, err, want)
	}
	if _, err := MapText("10.62.1.1:80"); err == nil || !strings.Contains(err.Error(), "10.62.1.1") {
		t.Errorf("error %v, want one that names the address", err)
	}
}
