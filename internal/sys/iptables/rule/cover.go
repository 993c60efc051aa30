package rule

import (
	"net/netip"
	"slices"
)

// Cover is a set of addresses by few prefixes: exactly, as long as there are few of
// them, else by ever shorter prefixes. The result depends on the set only.
type Cover struct {
	Most int // prefixes
	bits int // of the prefixes in set; 0 for an empty set
	set  map[netip.Prefix]struct{}
}

// Add adds an address; all have to be of one family.
func (c *Cover) Add(a netip.Addr) {
	if c.set == nil {
		c.set, c.bits = map[netip.Prefix]struct{}{}, a.BitLen()
	}
	c.set[prefixOf(a, c.bits)] = struct{}{}
	for len(c.set) > c.Most && c.bits > 4 {
		c.bits -= 4
		shorter := make(map[netip.Prefix]struct{}, len(c.set))
		for p := range c.set {
			shorter[prefixOf(p.Addr(), c.bits)] = struct{}{}
		}
		c.set = shorter
	}
}

// Prefixes returns the prefixes in order.
func (c *Cover) Prefixes() []netip.Prefix {
	out := make([]netip.Prefix, 0, len(c.set))
	for p := range c.set {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return out
}

// CoverPorts returns at most so many ranges that cover the entries' ports; exactly, if
// there are few ports.
func CoverPorts(entries []Entry, most int) []PortRange {
	for bits := 16; ; bits -= 4 {
		set := map[PortRange]struct{}{}
		for i := range entries {
			set[rangeOf(&entries[i], bits)] = struct{}{}
		}
		if len(set) > most && bits > 4 {
			continue
		}
		out := make([]PortRange, 0, len(set))
		for in := range set {
			out = append(out, in)
		}
		slices.SortFunc(out, func(a, b PortRange) int {
			return (int(a.Proto)<<16 | int(a.Port)) - (int(b.Proto)<<16 | int(b.Port))
		})
		return out
	}
}

// Bits returns the length of the prefixes; 0 for an empty set.
func (c *Cover) Bits() int { return c.bits }
