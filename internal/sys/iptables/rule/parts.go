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
