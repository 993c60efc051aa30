package ipvs

import (
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// Names of what is ours are in package table; the device is host.VIPDevice.

// Name is the mode's name in kube-proxy's configuration.
const Name = "ipvs"

// routes are what makes packets with our mark the host's own.
func (f *family) routes() []route.Entry {
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if f.fam == plan.IPv6 {
		all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	steered := table.MarkOf(table.SteerID, f.env.MasqueradeBit)
	v6 := f.fam == plan.IPv6
	return []route.Entry{
		{Local: all, Table: route.SteerTable},
		// Else the check of sources, where it looks at marks, would find all of them here.
		{V6: v6, Mark: steered, Priority: table.RoutePriority - 1, Table: route.MainTable, In: "lo"},
		{V6: v6, Mark: steered, Priority: table.RoutePriority, Table: route.SteerTable},
	}
}
