package table

import (
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Probe is a table that is never there: see nft.Probe.
func Probe(f plan.Family) nft.Table {
	return nft.Table{Family: FamilyOf(f), Name: tableName + "-probe"}
}

// Needs lists what is tried of nf_tables, so that the first that fails is the one that
// is missing.
func (s Settings) Needs() []nft.Need {
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
			Steps: []nft.Op{{Kind: nft.AddSet, Set: Servers.Set(s.Family)}}},
		{What: "masquerade fully-random", Option: "CONFIG_NFT_MASQ", Since: "3.18",
			Steps: one("nat", nft.Postrouting, PrioritySNAT, nft.Masquerade{})},
		{What: "dnat", Option: "CONFIG_NFT_NAT", Since: "3.13", Steps: one("nat", nft.Prerouting, PriorityKeep, nft.KeepDst{})},
		{What: "ct state and reject", Option: "CONFIG_NFT_CT and CONFIG_NFT_REJECT", Since: "3.14",
			Steps: one("filter", nft.Input, PriorityInput, IsNew, nft.Reject{})},
		{What: "fib saddr type", Option: "CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6", Since: "4.10",
			Steps: one("filter", nft.Output, PriorityOutput, nft.SrcIsLocal{})},
		{What: "the whole table", Option: "CONFIG_NF_TABLES", Since: "4.10", Steps: whole()},
	}
}
