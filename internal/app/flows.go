package app

import (
	"context"
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/sys/conntrack"
)

// flowTable is the connection tracking that a mode wants cleaned.
func flowTable(ownFlows bool) dataplane.FlowTable {
	if ownFlows {
		return untranslated{&conntrack.Kernel{}}
	}
	return &conntrack.Kernel{}
}

// untranslated is the table for a mode that ends its flows itself: of those only such go
// that began while nothing was there to lead them to the mode.
type untranslated struct{ table dataplane.FlowTable }

func (u untranslated) DeleteUDP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort) bool) (int, error) {
	return u.table.DeleteUDP(ctx, to, func(to, from netip.AddrPort) bool { return to == from && stale(to, from) })
}

func (u untranslated) DeleteTCP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort, answered bool) bool,
	instead func(to netip.AddrPort) netip.AddrPort) (int, error) {
	return u.table.DeleteTCP(ctx, to, func(to, from netip.AddrPort, answered bool) bool {
		return to == from && !answered && stale(to, from, answered)
	}, instead)
}
