package ipvs

import (
	"context"
	"errors"
	"fmt"

	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// probeTable is never there: see nft.Probe.
const probeTable = "svcproxy-ipvs-probe"

// needs lists what is tried of nf_tables, so that the first that fails is the one that
// is missing.
func needs(s table.Settings) []nft.Need {
	whole := func() []nft.Op {
		var ops []nft.Op
		for _, set := range s.Sets() {
			ops = append(ops, nft.Op{Kind: nft.AddSet, Set: set})
		}
		objects := append(s.Inner(), s.Base()...)
		for i := range objects {
			ops = append(ops, nft.Op{Kind: nft.AddChain, Chain: objects[i].Chain})
		}
		for i := range objects {
			for _, r := range objects[i].Rules() {
				ops = append(ops, nft.Op{Kind: nft.AddRule, Name: objects[i].Chain.Name, Rule: r})
			}
		}
		return ops
	}
	one := func(typ string, num nft.HookNum, priority int32, statements ...nft.Statement) []nft.Op {
		o := nft.NewHooked("probe", typ, num, priority, s.Rule(statements...))
		return o.Steps(false)
	}
	return []nft.Need{
		{What: "tables", Option: "CONFIG_NF_TABLES, CONFIG_NF_TABLES_IPV4 and CONFIG_NF_TABLES_IPV6", Since: "3.13"},
		{What: "sets whose keys have several fields", Option: "CONFIG_NF_TABLES", Since: "4.1",
			Steps: []nft.Op{{Kind: nft.AddSet, Set: table.Servers.Set(s.Family)}}},
		{What: "masquerade fully-random", Option: "CONFIG_NFT_MASQ", Since: "3.18",
			Steps: one("nat", nft.Postrouting, table.PrioritySNAT, nft.Masquerade{})},
		{What: "dnat", Option: "CONFIG_NFT_NAT", Since: "3.13", Steps: one("nat", nft.Prerouting, table.PriorityKeep, nft.KeepDst{})},
		{What: "ct state and reject", Option: "CONFIG_NFT_CT and CONFIG_NFT_REJECT", Since: "3.14",
			Steps: one("filter", nft.Input, table.PriorityInput, table.IsNew, nft.Reject{})},
		{What: "fib saddr type", Option: "CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6", Since: "4.10",
			Steps: one("filter", nft.Output, table.PriorityOutput, nft.SrcIsLocal{})},
		{What: "the whole table", Option: "CONFIG_NF_TABLES", Since: "4.10", Steps: whole()},
	}
}

// Supports returns nil if this host can carry out the mode for a family; else what is
// missing, and the remedy. Kernel modules are loaded if need be.
func Supports(ctx context.Context, f plan.Family) error {
	k := newKernel()
	return errors.Join(supports(ctx, f, k), k.close())
}

func supports(ctx context.Context, f plan.Family, k kernel) error {
	if err := k.servers.Probe(ctx, table.ServerFamilyOf(f), scheduler.Default); err != nil {
		return fmt.Errorf("ipvs for %s: %w", f, err)
	}
	s := table.Settings{Family: f, Bit: 14, Local: plan.LocalTraffic{Kind: plan.LocalPrefix}}
	t, all := nft.Table{Family: table.FamilyOf(f), Name: probeTable}, needs(s)
	// The parts are tried one by one only to name the one that is missing.
	if nft.Probe(ctx, k.tables, t, all[len(all)-1:]) == nil {
		return nil
	}
	if err := nft.Probe(ctx, k.tables, t, all); err != nil {
		return fmt.Errorf("nftables for %s: %w", f, err)
	}
	return nil
}

// limits says which schedulers the kernel lacks.
func limits(ctx context.Context, k kernel) []string {
	var out []string
	for _, s := range scheduler.Missing(ctx, k.servers) {
		out = append(out, fmt.Sprintf("no scheduler %s, for which %s is used: install or load the kernel module ip_vs_%[1]s", s, scheduler.Default))
	}
	return out
}
