package nftables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// need is something that the mode needs of the kernel.
type need struct {
	what   string // in nft's language
	option string // of the kernel's configuration
	since  string // the first version of Linux that has it
	ops    func(s settings) []nft.Op
}

// probeTable is never there: see nft.Try.
const probeTable = "svcproxy-probe"

// needs lists what is tried, so that the first that fails is the one that is missing.
func needs() []need {
	probe := func(typ string, num nft.HookNum, priority int32, statements ...nft.Statement) func(settings) []nft.Op {
		return func(s settings) []nft.Op {
			return writing(s.hooked("probe", typ, num, priority, s.rule(statements...)))
		}
	}
	set := func(set func(s settings) *nft.Set) func(settings) []nft.Op {
		return func(s settings) []nft.Op { return []nft.Op{{Kind: nft.AddSet, Set: set(s)}} }
	}
	return []need{
		{"tables", "CONFIG_NF_TABLES, CONFIG_NF_TABLES_IPV4 and CONFIG_NF_TABLES_IPV6", "3.13",
			func(settings) []nft.Op { return nil }},
		{"maps whose keys have several fields", "CONFIG_NF_TABLES", "4.1",
			set(func(s settings) *nft.Set { return s.coreSets()[setEndpoints] })},
		{"interval sets", "CONFIG_NF_TABLES", "4.1",
			set(func(s settings) *nft.Set { return s.coreSets()[setServiceRanges] })},
		{"dynamic maps with a timeout", "CONFIG_NF_TABLES", "4.3",
			set(func(s settings) *nft.Set { return s.affinitySet(plan.ID{Name: "probe"}, plan.Cluster) })},
		{"chains of type nat", "CONFIG_NFT_NAT", "3.13 (5.2 without a module per family)",
			probe("nat", nft.Prerouting, priorityDNAT, nft.Do{Code: nft.Accept})},
		{"masquerade fully-random", "CONFIG_NFT_MASQ", "3.18",
			probe("nat", nft.Postrouting, prioritySNAT, nft.Masquerade{})},
		{"reject in prerouting", "CONFIG_NFT_REJECT", "5.9",
			probe("nat", nft.Prerouting, priorityDNAT, nft.Reject{})},
		{"fib saddr type", "CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6", "4.10",
			probe("nat", nft.Output, priorityDNAT, nft.SrcIsLocal{})},
		{"ct state and ct original ip daddr", "CONFIG_NFT_CT", "4.17",
			probe("filter", nft.Forward, priorityFilter, nft.Has{Field: nft.State, Bits: nft.StateNew},
				nft.Is{Field: nft.OrigDstPort, Value: nft.PortTuple(1)})},
		{"numgen and dnat to a map", "CONFIG_NFT_NUMGEN and CONFIG_NFT_NAT", "4.12 (numgen with an offset)", probeDNAT},
	}
}

func writing(o object) []nft.Op {
	ops := []nft.Op{{Kind: nft.AddChain, Chain: o.chain}}
	for _, r := range o.rules() {
		ops = append(ops, nft.Op{Kind: nft.AddRule, Name: o.chain.Name, Rule: r})
	}
	return ops
}

// probeDNAT tries the whole way of a flow with affinity.
func probeDNAT(s settings) []nft.Op {
	id := plan.ID{Name: "probe", Protocol: plan.TCP, Family: s.family}
	svc := &service{sp: &plan.ServicePort{ID: id, Affinity: time.Hour}}
	c := &class{slots: [2]int{2, 2}}
	c.routes[plan.FromPod] = plan.Route{Pool: plan.Local}
	c.routes[plan.FromNode].SNAT = true
	var ops []nft.Op
	for _, set := range s.coreSets() {
		ops = append(ops, nft.Op{Kind: nft.AddSet, Set: set})
	}
	for _, p := range [...]plan.Pool{plan.Cluster, plan.Local} {
		ops = append(ops, nft.Op{Kind: nft.AddSet, Set: s.affinitySet(id, p)})
	}
	for _, o := range append(s.inner(), s.base(true)...) {
		ops = append(ops, writing(o)...)
	}
	chain := object{chain: &nft.Chain{Name: c.name()}, rules: func() []*nft.Rule { return s.classRules(svc.sp, c) }}
	ops = append(ops, writing(chain)...)
	return append(ops, writing(s.recordChain(svc, c))...)
}

// Supports returns nil if this host can carry out the mode for a family; else what
// is missing, and the remedy.
func Supports(ctx context.Context, f plan.Family) error {
	k := &nft.Kernel{}
	return errors.Join(supports(ctx, f, k), k.Close())
}

func supports(ctx context.Context, f plan.Family, t nft.Tables) error {
	table := nft.Table{Family: familyOf(f), Name: probeTable}
	s := settings{family: f, mark: 1, pods: plan.LocalPrefix}
	for _, n := range needs() {
		err := nft.Try(ctx, t, table, n.ops(s))
		if err == nil {
			continue
		}
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("nftables needs CAP_NET_ADMIN; run as root or grant it: %w", err)
		}
		return fmt.Errorf("nftables for %s needs %s; use a kernel with %s, Linux %s or newer, or load its modules: %w",
			f, n.what, n.option, n.since, err)
	}
	return nil
}
