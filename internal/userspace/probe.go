package userspace

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
	"github.com/svcproxy/svcproxy/internal/sys/route"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// probeTable is never there: see nft.Probe.
const probeTable = "svcproxy-userspace-probe"

// needs lists what is tried, so that the first that fails is the one that is missing.
func needs(s settings) []nft.Need {
	var sets []nft.Op
	for _, set := range s.sets() {
		sets = append(sets, nft.Op{Kind: nft.AddSet, Set: set})
	}
	rule := func(typ string, num nft.HookNum, priority int32, statements ...nft.Statement) []nft.Op {
		probe := nft.NewHooked("probe", typ, num, priority, s.rule(statements...))
		return append(sets[:len(sets):len(sets)], probe.Steps(false)...)
	}
	front := []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}
	return []nft.Need{
		{What: "tables", Option: "CONFIG_NF_TABLES, CONFIG_NF_TABLES_IPV4 and CONFIG_NF_TABLES_IPV6", Since: "3.13"},
		{What: "maps whose keys have several fields", Option: "CONFIG_NF_TABLES", Since: "4.1", Steps: sets},
		{What: "numgen and dnat to a map", Option: "CONFIG_NFT_NUMGEN and CONFIG_NFT_NAT", Since: "4.12",
			Steps: rule("nat", nft.Prerouting, priorityDNAT, nft.DNAT{Fields: front, Slots: 1, First: 1, Map: setListeners})},
		{What: "reject in prerouting", Option: "CONFIG_NFT_REJECT", Since: "5.9",
			Steps: rule("nat", nft.Prerouting, priorityDNAT, nft.Reject{})},
		{What: "ct mark, ct direction and ct status", Option: "CONFIG_NFT_CT and CONFIG_NF_CONNTRACK_MARK", Since: "4.1",
			Steps: rule("filter", nft.Prerouting, priorityMark, nft.Has{Field: nft.FlowMark, Bits: 1}, nft.Is{Field: nft.Direction, Value: nft.ToClient},
				nft.Has{Field: nft.Status, Bits: nft.StatusDNAT}, nft.SetFlowMark(1))},
		{What: "chains of type route", Option: "CONFIG_NF_TABLES", Since: "3.13",
			Steps: rule("route", nft.Output, priorityMark, nft.SetMark(1))},
	}
}

// Supports returns nil if this host can carry out the mode for a family; else what
// is missing, and the remedy. Without nf_tables routes have to do.
func Supports(ctx context.Context, f plan.Family) error {
	k := &kernel.Tables{}
	err := errors.Join(supports(ctx, f, k), k.Close())
	if err == nil || errors.Is(err, unix.EPERM) {
		return err
	}
	if _, routeErr := (route.Kernel{}).List(ctx); routeErr != nil {
		return errors.Join(err, routeErr)
	}
	return nil
}

func supports(ctx context.Context, f plan.Family, t nft.Tables) error {
	s := settings{family: f, block: listeners.DefaultBlocks().Of(f), own: 1, route: 2}
	if err := nft.Probe(ctx, t, nft.Table{Family: familyOf(f), Name: probeTable}, needs(s)); err != nil {
		return fmt.Errorf("userspace mode for %s: %w", f, err)
	}
	return nil
}
