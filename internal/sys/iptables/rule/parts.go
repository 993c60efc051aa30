package rule

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// Join joins the parts of a rule that are not empty.
func Join(parts ...string) string {
	return strings.Join(slices.DeleteFunc(slices.Clone(parts), func(p string) bool { return p == "" }), " ")
}

// The functions below return parts of rules, as iptables-save prints them.

// Proto is a transport protocol by its IANA number.
type Proto uint8

// The protocols whose ports can be matched.
const (
	TCP  Proto = 6
	UDP  Proto = 17
	SCTP Proto = 132
)

// String returns the protocol's name in iptables' language.
func (p Proto) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return strconv.Itoa(int(p))
}

func From(p netip.Prefix) string   { return "-s " + p.String() }
func To(p netip.Prefix) string     { return "-d " + p.String() }
func ToAddr(a netip.Addr) string   { return To(netip.PrefixFrom(a, a.BitLen())) }
func FromAddr(a netip.Addr) string { return From(netip.PrefixFrom(a, a.BitLen())) }
func Protocol(p Proto) string      { return "-p " + p.String() }
func Jump(chain string) string     { return "-j " + chain }
func Goto(chain string) string     { return "-g " + chain }

// DPort matches a destination port; the protocol has to be matched too.
func DPort(p Proto, port uint16) string {
	return "-m " + p.String() + " --dport " + strconv.Itoa(int(port))
}

// DPorts matches a range of destination ports.
func DPorts(p Proto, first, last uint16) string {
	return fmt.Sprintf("-m %s --dport %d:%d", p.String(), first, last)
}

// Comment is a rule's remark. What could end it early or is not printable is
// replaced, so that no name can become a rule.
func Comment(text string) string {
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

// Host is how the conntrack match prints an address.
func Host(p netip.Prefix) string {
	return strings.TrimSuffix(p.String(), fmt.Sprintf("/%d", p.Addr().BitLen()))
}

// CheckInterface says what keeps a name, or the beginning of one, from being matched.
func CheckInterface(name string) error {
	const longest = 15
	if name == "" || len(name) > longest || strings.ContainsAny(name, " \t\n\"'\\/!+") {
		return fmt.Errorf("%q is no interface name: give 1 to %d characters without spaces, quotes, '/', '!' and '+'", name, longest)
	}
	return nil
}

// Chance matches with the probability part/whole, as a number that the kernel
// keeps: it has 31 bits.
func Chance(part, whole uint64) string {
	const bits = 1 << 31
	n := math.Round(float64(part) / float64(whole) * bits)
	return "-m statistic --mode random --probability " + strconv.FormatFloat(n/bits, 'f', 11, 64)
}

// Seen matches clients that the list of an endpoint has had within d.
func Seen(f iptables.Family, endpoint string, d time.Duration) string {
	return "-m recent --rcheck --seconds " + strconv.FormatInt(int64(max(d/time.Second, 1)), 10) +
		" --reap --name " + endpoint + " " + recentMask(f)
}

// Remember puts the client on an endpoint's list.
func Remember(f iptables.Family, endpoint string) string {
	return "-m recent --set --name " + endpoint + " " + recentMask(f)
}

func recentMask(f iptables.Family) string {
	if f == iptables.IPv6 {
		return "--mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource"
	}
	return "--mask 255.255.255.255 --rsource"
}

// DNAT translates the destination; the protocol has to be matched.
func DNAT(to netip.AddrPort) string { return "-j DNAT --to-destination " + to.String() }

// Masquerade gives packets an address of the interface on which they leave, and a
// random port.
const Masquerade = "-j MASQUERADE --random-fully"

// ToItself matches packets whose source and destination address are the same. No
// match of iptables compares two fields of a packet but a program of classic BPF
// does: for each word of the addresses "load it from the source; keep it; load it from
// the destination; compare" (kernel option NETFILTER_XT_MATCH_BPF).
func ToItself(f iptables.Family) string {
	src, dst, words := 12, 16, 1
	if f == iptables.IPv6 {
		src, dst, words = 8, 24, 4
	}
	code := []string{strconv.Itoa(4*words + 2)}
	for w := range words {
		miss := 4*(words-w-1) + 1 // instructions up to the one that says no
		code = append(code, fmt.Sprintf("32 0 0 %d,7 0 0 0,32 0 0 %d,29 0 %d 0", src+4*w, dst+4*w, miss))
	}
	code = append(code, "6 0 0 65535", "6 0 0 0")
	return `-m bpf --bytecode "` + strings.Join(code, ",") + `"`
}

// Reject answers with port unreachable.
func Reject(f iptables.Family) string {
	if f == iptables.IPv6 {
		return "-j REJECT --reject-with icmp6-port-unreachable"
	}
	return "-j REJECT --reject-with icmp-port-unreachable"
}

// Targets and matches without arguments.
const (
	Drop     = "-j DROP"
	Accept   = "-j ACCEPT"
	Return   = "-j RETURN"
	SrcLocal = "-m addrtype --src-type LOCAL"
	DstLocal = "-m addrtype --dst-type LOCAL"
)
