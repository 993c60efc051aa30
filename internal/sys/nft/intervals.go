package nft

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"slices"
	"strings"
)

// Intervals are the elements of an interval set that covers the prefixes: where
// each range begins, and the first address behind it. Ranges that overlap or touch
// become one.
func Intervals(prefixes []netip.Prefix) []Element {
	sorted := slices.Clone(prefixes)
	slices.SortFunc(sorted, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	var out []Element
	var end netip.Addr // behind the current range; invalid if it ends with the last address
	open := false
	for _, p := range sorted {
		next := behind(p)
		if open && (!end.IsValid() || p.Addr().Compare(end) <= 0) {
			if end.IsValid() && (!next.IsValid() || next.Compare(end) > 0) {
				end = next
			}
			continue
		}
		if open {
			out = append(out, Element{Key: AddrTuple(end), End: true})
		}
		out = append(out, Element{Key: AddrTuple(p.Addr())})
		end, open = next, true
	}
	if open && end.IsValid() {
		out = append(out, Element{Key: AddrTuple(end), End: true})
	}
	return out
}

// behind is the first address after a prefix; invalid if there is none.
func behind(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := range b {
		host := min(max(8*(i+1)-p.Bits(), 0), 8) // bits of the byte that vary
		b[i] |= byte(1<<host - 1)
	}
	last, _ := netip.AddrFromSlice(b)
	return last.Next()
}

// SortIntervals returns the elements of an interval set in the order of [Intervals].
func SortIntervals(elements []Element) []Element {
	out := slices.Clone(elements)
	slices.SortFunc(out, func(a, b Element) int {
		switch {
		case a.Key != b.Key && a.Key < b.Key, a.Key == b.Key && a.End && !b.End:
			return -1
		case a.Key != b.Key || a.End != b.End:
			return 1
		}
		return 0
	})
	return out
}

// ReplaceIntervals are the steps that give an interval set other elements; none if
// they are the same. The table is left to the caller.
func ReplaceIntervals(s *Set, have, want []Element) []Op {
	var ops []Op
	if slices.Equal(want, have) {
		return nil
	}
	if len(have) > 0 {
		ops = append(ops, Op{Kind: FlushSet, Name: s.Name})
	}
	if len(want) > 0 {
		ops = append(ops, Op{Kind: AddElements, Set: s, Elements: want})
	}
	return ops
}

// PrefixesName is a short name that follows from prefixes, whatever their order.
func PrefixesName(prefixes []netip.Prefix) string {
	sorted := make([]string, len(prefixes))
	for i, p := range prefixes {
		sorted[i] = p.Masked().String()
	}
	slices.Sort(sorted)
	sum := sha256.Sum256([]byte(strings.Join(slices.Compact(sorted), ",")))
	const length = 16
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:length])
}
