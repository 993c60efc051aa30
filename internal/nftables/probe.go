package nftables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

// probeTable is never there: see nft.Probe.
const probeTable = "svcproxy-probe"

// needs lists what is tried, so that the first that fails is the one that is missing.
func needs(s settings) []nft.Need {
	rule := func(typ string, num nft.HookNum, priority int32, statements ...nft.Statement) []nft.Op {
		probe := nft.NewHooked("probe", typ, num, priority, s.rule(statements...))
		return probe.Steps(false)
	}
	set := func(set *nft.Set) []nft.Op { return []nft.Op{{Kind: nft.AddSet, Set: set}} }
	core := s.coreSets()
	return []nft.Need{
		{What: "tables", Option: "CONFIG_NF_TABLES, CONFIG_NF_TABLES_IPV4 and CONFIG_NF_TABLES_IPV6", Since: "3.13"},
		{What: "maps whose keys have several fields", Option: "CONFIG_NF_TABLES", Since: "4.1", Steps: set(core[setEndpoints])},
		{What: "interval sets", Option: "CONFIG_NF_TABLES", Since: "4.1", Steps: set(core[setServiceRanges])},
		{What: "dynamic maps with a timeout", Option: "CONFIG_NF_TABLES", Since: "4.3",
			Steps: set(s.affinitySet(plan.ID{Name: "probe"}, plan.Cluster))},
		{What: "chains of type nat", Option: "CONFIG_NFT_NAT", Since: "3.13",
			Steps: rule("nat", nft.Prerouting, priorityDNAT, nft.Do{Code: nft.Accept})},
		{What: "masquerade fully-random", Option: "CONFIG_NFT_MASQ", Since: "3.18",
			Steps: rule("nat", nft.Postrouting, prioritySNAT, nft.Masquerade{})},
		{What: "reject in prerouting", Option: "CONFIG_NFT_REJECT", Since: "5.9",
			Steps: rule("nat", nft.Prerouting, priorityDNAT, nft.Reject{})},
		{What: "fib saddr type", Option: "CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6", Since: "4.10",
			Steps: rule("nat", nft.Output, priorityDNAT, nft.SrcIsLocal{})},
		{What: "ct state and ct original proto-dst", Option: "CONFIG_NFT_CT", Since: "4.17",
			Steps: rule("filter", nft.Forward, priorityFilter, nft.Has{Field: nft.State, Bits: nft.StateNew},
				nft.Is{Field: nft.OrigDstPort, Value: nft.PortTuple(1)})},
		{What: "numgen and dnat to a map", Option: "CONFIG_NFT_NUMGEN and CONFIG_NFT_NAT", Since: "4.12", Steps: probeDNAT(s)},
	}
}

// probeDNAT tries the whole way of a flow with affinity.
func probeDNAT(s settings) []nft.Op {
	id := plan.ID{Name: "probe", Protocol: plan.TCP, Family: s.family}
	svc := &service{sp: &plan.ServicePort{ID: id, Affinity: time.Hour}}
	few := slots.Places(1)
	c := &class{places: [2]int{few, few}}
	c.routes[plan.FromPod] = plan.Route{Pool: plan.Local}
	c.routes[plan.FromNode].SNAT = true
	var ops []nft.Op
	for _, set := range s.coreSets() {
		ops = append(ops, nft.Op{Kind: nft.AddSet, Set: set})
	}
	objects := append(s.inner(), s.base(true)...)
	objects = append(objects, nft.Object{Set: s.affinitySet(id, plan.Cluster)}, nft.Object{Set: s.affinitySet(id, plan.Local)},
		s.draw(false, plan.Cluster, few), s.draw(false, plan.Local, few),
		nft.Object{Chain: &nft.Chain{Name: c.name()}, Rules: func() []*nft.Rule { return s.classRules(svc.sp, c) }}, s.recordChain(svc, c))
	for _, o := range objects {
		ops = append(ops, o.Steps(false)...)
	}
	return ops
}

// Supports returns nil if this host can carry out the mode for a family; else what
// is missing, and the remedy.
func Supports(ctx context.Context, f plan.Family) error {
	k := &kernel.Tables{}
	return errors.Join(supports(ctx, f, k), k.Close())
}

func supports(ctx context.Context, f plan.Family, t nft.Tables) error {
	s := settings{family: f, mark: 1, local: plan.LocalTraffic{Kind: plan.LocalPrefix}}
	if err := nft.Probe(ctx, t, nft.Table{Family: owned.Family(f), Name: probeTable}, needs(s)); err != nil {
		return fmt.Errorf("nftables for %s: %w", f, err)
	}
	return nil
}
