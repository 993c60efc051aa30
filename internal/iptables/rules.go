package iptables

import (
	"fmt"
	"hash/maphash"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// rules are chains under construction: the text of each is what iptables-save
// prints of it, one line per rule. The text is valid until reset.
type rules struct {
	buf    []byte
	chains []span
}

// span is one chain's part of a rules' text.
type span struct {
	id         chainID
	start, end int
	rules      int
}

func (r *rules) reset() { r.buf, r.chains = r.buf[:0], r.chains[:0] }

// begin starts the chain to which the following rules belong.
func (r *rules) begin(id chainID) {
	r.chains = append(r.chains, span{id: id, start: len(r.buf), end: len(r.buf)})
}

// add appends a rule to the chain begun last. Parts are joined by spaces; empty
// ones are left out.
func (r *rules) add(parts ...string) {
	c := &r.chains[len(r.chains)-1]
	r.buf = append(r.buf, "-A "...)
	r.buf = append(r.buf, c.id.String()...)
	for _, p := range parts {
		if p != "" {
			r.buf = append(r.buf, ' ')
			r.buf = append(r.buf, p...)
		}
	}
	r.buf = append(r.buf, '\n')
	c.end = len(r.buf)
	c.rules++
}

// text returns the lines of a chain.
func (r *rules) text(s span) []byte { return r.buf[s.start:s.end] }

// clone returns a copy that stays valid.
func (r *rules) clone() *rules {
	return &rules{buf: slices.Clone(r.buf), chains: slices.Clone(r.chains)}
}

// hasAll reports whether r has every one of the chains that f accepts.
func (r *rules) hasAll(chains []chainID, f func(chainID) bool) bool {
	have := make(map[chainID]struct{}, len(r.chains))
	for _, c := range r.chains {
		have[c.id] = struct{}{}
	}
	for _, c := range chains {
		if _, ok := have[c]; !ok && f(c) {
			return false
		}
	}
	return true
}

// hasher makes short sums of chains' texts, of the same value within a process.
type hasher struct{ seed maphash.Seed }

func (h hasher) sum(text []byte) uint64 { return maphash.Bytes(h.seed, text) }

// The parts of a rule, as iptables-save prints them.

func from(p netip.Prefix) string   { return "-s " + p.String() }
func to(p netip.Prefix) string     { return "-d " + p.String() }
func toAddr(a netip.Addr) string   { return to(netip.PrefixFrom(a, a.BitLen())) }
func fromAddr(a netip.Addr) string { return from(netip.PrefixFrom(a, a.BitLen())) }
func proto(p plan.Protocol) string { return "-p " + protoName(p) }
func jumpTo(chain string) string   { return "-j " + chain }
func goTo(chain string) string     { return "-g " + chain }

// dport matches a destination port; the protocol has to be matched too.
func dport(p plan.Protocol, port uint16) string {
	return "-m " + protoName(p) + " --dport " + strconv.Itoa(int(port))
}

// dports matches a range of destination ports.
func dports(p plan.Protocol, first, last uint16) string {
	return fmt.Sprintf("-m %s --dport %d:%d", protoName(p), first, last)
}

// comment is a rule's remark. What could end it early or is not printable is
// replaced, so that no name can become a rule.
func comment(text string) string {
	const longest = 255
	b := make([]byte, 0, len(text)+len(`-m comment --comment ""`))
	b = append(b, `-m comment --comment "`...)
	for i := 0; i < len(text) && i < longest; i++ {
		c := text[i]
		if c < ' ' || c > '~' || c == '"' || c == '\'' || c == '\\' {
			c = '?'
		}
		b = append(b, c)
	}
	return string(append(b, '"'))
}

// chance matches with the probability part/whole, as a number that the kernel
// keeps: it has 31 bits.
func chance(part, whole uint64) string {
	const bits = 1 << 31
	n := math.Round(float64(part) / float64(whole) * bits)
	return "-m statistic --mode random --probability " + strconv.FormatFloat(n/bits, 'f', 11, 64)
}

// seen matches clients that the list of an endpoint has had within d.
func seen(f plan.Family, endpoint string, d time.Duration) string {
	return "-m recent --rcheck --seconds " + strconv.FormatInt(int64(max(d/time.Second, 1)), 10) +
		" --reap --name " + endpoint + " " + recentMask(f)
}

// remember puts the client on an endpoint's list.
func remember(f plan.Family, endpoint string) string {
	return "-m recent --set --name " + endpoint + " " + recentMask(f)
}

func recentMask(f plan.Family) string {
	if f == plan.IPv6 {
		return "--mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource"
	}
	return "--mask 255.255.255.255 --rsource"
}

// reject answers with port unreachable.
func reject(f plan.Family) string {
	if f == plan.IPv6 {
		return "-j REJECT --reject-with icmp6-port-unreachable"
	}
	return "-j REJECT --reject-with icmp-port-unreachable"
}

const (
	markMasq = "-j " + chainMarkMasq
	drop     = "-j DROP"
	accept   = "-j ACCEPT"
	leave    = "-j RETURN"
	srcLocal = "-m addrtype --src-type LOCAL"
	dstLocal = "-m addrtype --dst-type LOCAL"
)
