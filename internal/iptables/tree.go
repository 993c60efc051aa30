package iptables

import (
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
)

const (
	// rootRules is how many entries the chain at the root of a tree holds before it
	// branches; leafRules is the same for the chains below.
	rootRules = 32
	leafRules = 16
)

// entry is one address and port of a dispatch, or one port alone, and what to do
// with its packets.
type entry struct {
	addr  netip.Addr    // invalid in a tree of ports
	proto plan.Protocol // 0: any, after all others of the address
	port  uint16
	owner plan.ID
	rules []string // without "-A CHAIN "
}

func (e *entry) compare(o *entry) int {
	return cmp.Or(e.addr.Compare(o.addr), cmp.Compare(e.proto-1, o.proto-1), cmp.Compare(e.port, o.port), e.owner.Compare(o.owner))
}

// tree writes a dispatch: chains that branch by address, four bits at a time, and
// below one address by protocol and port, so that a packet meets few rules however
// many entries there are. It is a pure function of the set of entries, and one
// entry more or less only changes the chains on its path: a chain's name is the
// prefix that it serves.
type tree struct {
	*rules
	id   func(name string) chainID
	addr string // prefix of the names of chains by address
	port string // prefix of the names of chains by port
}

// write appends the entries to the chain begun last and adds the chains below it.
// The entries are sorted in place.
func (t *tree) write(entries []entry) {
	slices.SortFunc(entries, func(a, b entry) int { return a.compare(&b) })
	t.branch(entries, rootRules, 0)
}

// branch writes entries that agree in the first depth bits of their address.
func (t *tree) branch(entries []entry, most, depth int) {
	if len(entries) == 0 {
		return
	}
	first, last := entries[0].addr, entries[len(entries)-1].addr
	if len(entries) <= most {
		t.all(entries)
		return
	}
	if first == last {
		t.ports(entries, most, -1)
		return
	}
	depth = max(depth, commonBits(first, last)&^3)
	groups := groupBy(entries, func(e *entry) netip.Prefix { return prefixOf(e.addr, depth+4) })
	jump := goTo
	if most == rootRules {
		jump = jumpTo // what no chain below knows comes back
	}
	for _, g := range groups {
		if len(g) == 1 {
			t.all(g)
			continue
		}
		p := prefixOf(g[0].addr, depth+4)
		t.add(to(p), jump(t.addr+prefixName(p)))
	}
	for _, g := range groups {
		if len(g) > 1 {
			t.begin(t.id(t.addr + prefixName(prefixOf(g[0].addr, depth+4))))
			t.branch(g, leafRules, depth+4)
		}
	}
}

// ports writes entries of one address, or of none, that agree in the first depth
// bits of their port; below 0 not even in their protocol.
func (t *tree) ports(entries []entry, most, depth int) {
	if len(entries) <= most || depth >= 16 {
		t.all(entries)
		return
	}
	jump := goTo
	if most == rootRules || entries[len(entries)-1].proto == 0 {
		jump = jumpTo
	}
	var dst string
	if entries[0].addr.IsValid() {
		dst = toAddr(entries[0].addr)
	}
	if depth < 0 && entries[0].proto == entries[len(entries)-1].proto {
		depth = 0
	}
	if depth >= 0 {
		a, b := entries[0].port, entries[len(entries)-1].port
		for depth < 12 && a>>(12-depth) == b>>(12-depth) {
			depth += 4
		}
	}
	next := depth + 4
	if depth < 0 {
		next = 0
	}
	groups := groupBy(entries, func(e *entry) portRange { return rangeOf(e, next) })
	for _, g := range groups {
		in := rangeOf(&g[0], next)
		if len(g) == 1 || in.proto == 0 {
			t.all(g)
			continue
		}
		t.add(dst, proto(in.proto), in.match(), jump(t.portName(&g[0], in)))
	}
	for _, g := range groups {
		if in := rangeOf(&g[0], next); len(g) > 1 && in.proto != 0 {
			t.begin(t.id(t.portName(&g[0], in)))
			t.ports(g, leafRules, next)
		}
	}
}

func (t *tree) all(entries []entry) {
	for i := range entries {
		for _, r := range entries[i].rules {
			t.add(r)
		}
	}
}

// groupBy cuts entries, sorted by the key, where the key changes.
func groupBy[K comparable](entries []entry, key func(*entry) K) [][]entry {
	var out [][]entry
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

// portRange is a protocol and the first bits of a port.
type portRange struct {
	proto plan.Protocol
	port  uint16
	bits  int
}

// rangeOf returns the range of e's port with that many leading bits; below 4 it is
// the protocol alone.
func rangeOf(e *entry, bits int) portRange {
	if bits < 4 {
		return portRange{proto: e.proto}
	}
	return portRange{proto: e.proto, port: e.port &^ (0xffff >> bits), bits: bits}
}

func (p portRange) match() string {
	if p.bits == 0 {
		return ""
	}
	if p.bits == 16 {
		return dport(p.proto, p.port)
	}
	return dports(p.proto, p.port, p.port|0xffff>>p.bits)
}

// portName names the chain of a range of ports: "T" for all of TCP, "T75" for TCP
// ports 0x7500 to 0x75ff.
func (t *tree) portName(e *entry, in portRange) string {
	name := map[plan.Protocol]string{plan.TCP: "T", plan.UDP: "U", plan.SCTP: "S"}[in.proto]
	name += fmt.Sprintf("%04X", in.port)[:in.bits/4]
	if e.addr.IsValid() {
		return shortened(t.port, prefixName(prefixOf(e.addr, e.addr.BitLen()))+name)
	}
	return t.port + name
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
