package rule

import (
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

const (
	// RootRules is how many entries the chain at the root of a tree holds before it
	// branches; LeafRules is the same for the chains below.
	RootRules = 32
	LeafRules = 16
)

// Entry is one address and port of a dispatch, or one port alone, and what to do
// with its packets.
type Entry struct {
	Addr  netip.Addr // invalid in a tree of ports
	Proto Proto      // 0: any, after all others of the address
	Port  uint16
	Owner string   // decides the order of entries that are alike
	Rules []string // without "-A CHAIN "
}

func (e *Entry) Compare(o *Entry) int {
	return cmp.Or(e.Addr.Compare(o.Addr), cmp.Compare(e.Proto-1, o.Proto-1), cmp.Compare(e.Port, o.Port), strings.Compare(e.Owner, o.Owner))
}

// Tree writes a dispatch: chains that branch by address, four bits at a time, and
// below one address by protocol and port, so that a packet meets few rules however
// many entries there are. It is a pure function of the set of entries, and one
// entry more or less only changes the chains on its path: a chain's name is the
// prefix that it serves.
type Tree struct {
	*Set
	Chain func(name string) Chain // NAT or Filter
	// Prefix begins the names of all chains below.
	Prefix string
}

// Write appends the entries to the chain begun last and adds the chains below it.
// The entries are sorted in place.
func (t *Tree) Write(entries []Entry) {
	slices.SortFunc(entries, func(a, b Entry) int { return a.Compare(&b) })
	t.branch(entries, RootRules, 0)
}

// branch writes entries that agree in the first depth bits of their address.
func (t *Tree) branch(entries []Entry, most, depth int) {
	if len(entries) == 0 {
		return
	}
	first, last := entries[0].Addr, entries[len(entries)-1].Addr
	if len(entries) <= most {
		t.all(entries)
		return
	}
	if first == last {
		t.ports(entries, most, -1)
		return
	}
	depth = max(depth, commonBits(first, last)&^3)
	groups := groupBy(entries, func(e *Entry) netip.Prefix { return prefixOf(e.Addr, depth+4) })
	jump := Goto
	if most == RootRules {
		jump = Jump // what no chain below knows comes back
	}
	for _, g := range groups {
		if len(g) == 1 {
			t.all(g)
			continue
		}
		p := prefixOf(g[0].Addr, depth+4)
		t.Add(To(p), jump(t.Prefix+prefixName(p)))
	}
	for _, g := range groups {
		if len(g) > 1 {
			t.Begin(t.Chain(t.Prefix + prefixName(prefixOf(g[0].Addr, depth+4))))
			t.branch(g, LeafRules, depth+4)
		}
	}
}

// ports writes entries of one address, or of none, that agree in the first depth
// bits of their port; below 0 not even in their protocol.
func (t *Tree) ports(entries []Entry, most, depth int) {
	if len(entries) <= most || depth >= 16 {
		t.all(entries)
		return
	}
	jump := Goto
	if most == RootRules || entries[len(entries)-1].Proto == 0 {
		jump = Jump
	}
	var dst string
	if entries[0].Addr.IsValid() {
		dst = ToAddr(entries[0].Addr)
	}
	if depth < 0 && entries[0].Proto == entries[len(entries)-1].Proto {
		depth = 0
	}
	if depth >= 0 {
		a, b := entries[0].Port, entries[len(entries)-1].Port
		for depth < 12 && a>>(12-depth) == b>>(12-depth) {
			depth += 4
		}
	}
	next := depth + 4
	if depth < 0 {
		next = 0
	}
	groups := groupBy(entries, func(e *Entry) PortRange { return rangeOf(e, next) })
	for _, g := range groups {
		in := rangeOf(&g[0], next)
		if len(g) == 1 || in.Proto == 0 {
			t.all(g)
			continue
		}
		t.Add(dst, Protocol(in.Proto), in.match(), jump(t.portName(&g[0], in)))
	}
	for _, g := range groups {
		if in := rangeOf(&g[0], next); len(g) > 1 && in.Proto != 0 {
			t.Begin(t.Chain(t.portName(&g[0], in)))
			t.ports(g, LeafRules, next)
		}
	}
}

func (t *Tree) all(entries []Entry) {
	for i := range entries {
		for _, r := range entries[i].Rules {
			t.Add(r)
		}
	}
}

// groupBy cuts entries, sorted by the key, where the key changes.
func groupBy[K comparable](entries []Entry, key func(*Entry) K) [][]Entry {
	var out [][]Entry
	for start := 0; start < len(entries); {
		end := start + 1
		for end < len(entries) && key(&entries[end]) == key(&entries[start]) {
			end++
		}
		out = append(out, entries[start:end])
		start = end
	}
	return out
}

// PortRange is a protocol and the first bits of a port.
type PortRange struct {
	Proto Proto
	Port  uint16
	Bits  int
}

// rangeOf returns the range of e's port with that many leading bits; below 4 it is
// the protocol alone.
func rangeOf(e *Entry, bits int) PortRange {
	if bits < 4 {
		return PortRange{Proto: e.Proto}
	}
	return PortRange{Proto: e.Proto, Port: e.Port &^ (0xffff >> bits), Bits: bits}
}

func (p PortRange) match() string {
	if p.Bits == 0 {
		return ""
	}
	if p.Bits == 16 {
		return DPort(p.Proto, p.Port)
	}
	return DPorts(p.Proto, p.Port, p.Port|0xffff>>p.Bits)
}

// portName names the chain of a range of ports: "T" for all of TCP, "T75" for TCP
// ports 0x7500 to 0x75ff.
func (t *Tree) portName(e *Entry, in PortRange) string {
	name := map[Proto]string{TCP: "T", UDP: "U", SCTP: "S"}[in.Proto]
	name += fmt.Sprintf("%04X", in.Port)[:in.Bits/4]
	if e.Addr.IsValid() {
		return shortened(t.Prefix, prefixName(prefixOf(e.Addr, e.Addr.BitLen()))+name)
	}
	return t.Prefix + name
}

// prefixName writes a prefix of whole hexadecimal digits as those digits.
func prefixName(p netip.Prefix) string {
	digits := hex.EncodeToString(p.Addr().AsSlice())[:p.Bits()/4]
	return shortened("", upper(digits))
}

// shortened returns prefix+name, with a hash for a name that does not fit: IPv6
// prefixes have up to 32 digits.
func shortened(prefix, name string) string {
	const longest = 16
	if len(name) <= longest {
		return prefix + name
	}
	sum := sha256.Sum256([]byte(name))
	return prefix + base32.StdEncoding.EncodeToString(sum[:])[:longest]
}

func upper(hexDigits string) string {
	b := []byte(hexDigits)
	for i, c := range b {
		if c >= 'a' {
			b[i] = c - 'a' + 'A'
		}
	}
	return string(b)
}

func prefixOf(a netip.Addr, bits int) netip.Prefix {
	p, err := a.Prefix(bits)
	if err != nil {
		panic("a prefix longer than its address: " + err.Error())
	}
	return p
}

// commonBits returns how many leading bits two addresses of one family share.
func commonBits(a, b netip.Addr) int {
	x, y := a.AsSlice(), b.AsSlice()
	n := 0
	for i := range x {
		d := x[i] ^ y[i]
		if d == 0 {
			n += 8
			continue
		}
		for d&0x80 == 0 {
			d <<= 1
			n++
		}
		break
	}
	return n
}

// WithoutRepeats keeps one entry for the ports that a ClusterIP does not have, for
// each address. Entries without rules go.
func WithoutRepeats(entries []Entry) []Entry {
	slices.SortFunc(entries, func(a, b Entry) int { return a.Compare(&b) })
	out := entries[:0]
	for i, e := range entries {
		repeats := e.Proto == 0 && i > 0 && entries[i-1].Proto == 0 && entries[i-1].Addr == e.Addr
		if !repeats && len(e.Rules) > 0 {
			out = append(out, e)
		}
	}
	return out
}
