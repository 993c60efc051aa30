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
	return []route.Entry{
		{Local: all, Table: route.SteerTable},
		{V6: f.fam == plan.IPv6, Mark: table.MarkOf(table.SteerID, f.env.MasqueradeBit), Priority: table.RoutePriority, Table: route.SteerTable},
	}
}
