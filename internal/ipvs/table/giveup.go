package table

import (
	"maps"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// GiveUp are the steps that leave new flows to another mode, in one commit. What stays
// of the table c is the record of our virtual servers, and of what the kernel calls:
// the way to them of open connections to addresses that are on no interface, and the
// refusal of new ones to addresses on the device that the other mode did not translate,
// for which a daemon of the node might answer.
func GiveUp(f plan.Family, masqueradeBit int, c *nft.Contents) []nft.Op {
	s := Settings{Family: f, Bit: masqueradeBit}
	stay := map[string][]*nft.Rule{
		chainSteer: {
			s.Rule(IsNew, toReturn),
			s.Rule(nft.Has{Field: nft.Status, Bits: nft.StatusDNAT}, toReturn), // the other mode's
			s.Rule(isIn(External, front...), nft.ReplaceMark(MarkOf(SteerID, s.Bit))),
		},
		chainInput: {s.Rule(isIn(ClusterIPs, nft.DstAddr), IsNew, toReject)},
	}
	var ops []nft.Op
	add := func(o nft.Op) {
		o.Table = Of(f)
		ops = append(ops, o)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Chains)) {
		rules := stay[name]
		switch {
		case rules != nil:
			add(nft.Op{Kind: nft.FlushChain, Name: name})
			for _, r := range rules {
				add(nft.Op{Kind: nft.AddRule, Name: name, Rule: r})
			}
		case c.Chains[name].Hook != nil:
			add(nft.Op{Kind: nft.DeleteChain, Name: name})
		}
	}
	if !IsGivenUp(c) {
		o := nft.NewChain(chainGivenUp, "new flows are another mode's")
		add(nft.Op{Kind: nft.AddChain, Chain: o.Chain})
	}
	return ops
}

// IsGivenUp reports whether new flows do not pass a table any more.
func IsGivenUp(c *nft.Contents) bool { return c.Chains[chainGivenUp] != nil }
