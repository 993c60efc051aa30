// Package steering is what the host's routing has to have so that packets come to the
// relay's sockets.
package steering

import (
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// table is where marked packets are looked up, priority the place of the first of our
// rules: before the main table and before what others usually have.
const (
	table    = 0x7370 // "sp"
	priority = 88
)

// Entries are the routes and rules for the families: the listening addresses are the
// host's own, and packets with the mark come to its sockets whatever their
// destination. Those that the host itself sends need the mark own too: without it the
// rule would hold for checks of source addresses, where they are made with the mark
// (src_valid_mark), and no source would be valid.
func Entries(families []plan.Family, listening func(plan.Family) netip.Prefix, mark, own uint32) []route.Entry {
	var out []route.Entry
	for _, f := range families {
		everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if f == plan.IPv6 {
			everything = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		v6 := f == plan.IPv6
		out = append(out,
			route.Entry{Local: listening(f), Table: route.LocalTable},
			route.Entry{Local: everything, Table: table},
			route.Entry{V6: v6, Mark: mark | own, Priority: priority, Table: table},
			route.Entry{V6: v6, Mark: mark, In: "lo", Priority: priority + 1, Goto: priority + 3},
			route.Entry{V6: v6, Mark: mark, Priority: priority + 2, Table: table},
			route.Entry{V6: v6, Priority: priority + 3, Nop: true})
	}
	return out
}
