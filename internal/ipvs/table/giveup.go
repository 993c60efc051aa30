package table

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// passage is more than a packet takes through the hooks, also on a processor that is
// emulated or has other work.
const passage = 200 * time.Millisecond

// GiveUp leaves new flows to another mode. What stays of the table c is the record of our
// virtual servers, and of what the kernel calls: the way to them of open connections to
// addresses that are on no interface, and the refusal of new ones to addresses on the
// device that the other mode did not translate, for which a daemon of the node might
// answer. It takes two commits: packets that are between the hooks when the first is made
// have to be through before the second, which would refuse them.
func GiveUp(ctx context.Context, t nft.Tables, f plan.Family, masqueradeBit int, c *nft.Contents) error {
	first, then := givingUp(f, masqueradeBit, c)
	if err := t.Commit(ctx, first); err != nil {
		return err
	}
	select {
	case <-time.After(passage):
		return t.Commit(ctx, then)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// givingUp are the steps of both commits.
func givingUp(f plan.Family, masqueradeBit int, c *nft.Contents) (first, then []nft.Op) {
	s := Settings{Family: f, Bit: masqueradeBit}
	stay := map[string][]*nft.Rule{
		chainSteer: {
			s.Rule(IsNew, toReturn),
			s.Rule(nft.Has{Field: nft.Status, Bits: nft.StatusDNAT}, toReturn), // the other mode's
			s.Rule(isIn(External, front...), nft.ReplaceMark(MarkOf(SteerID, s.Bit))),
		},
		chainInput: {s.Rule(isIn(ClusterIPs, nft.DstAddr), IsNew, toReject)},
	}
	add := func(to *[]nft.Op, o nft.Op) {
		o.Table = Of(f)
		*to = append(*to, o)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Chains)) {
		rules, step := stay[name], &first
		if name == chainInput {
			step = &then
		}
		switch {
		case rules != nil:
			add(step, nft.Op{Kind: nft.FlushChain, Name: name})
			for _, r := range rules {
				add(step, nft.Op{Kind: nft.AddRule, Name: name, Rule: r})
			}
		case c.Chains[name].Hook != nil:
			add(step, nft.Op{Kind: nft.DeleteChain, Name: name})
		}
	}
	if !IsGivenUp(c) {
		o := nft.NewChain(chainGivenUp, "new flows are another mode's")
		add(&then, nft.Op{Kind: nft.AddChain, Chain: o.Chain})
	}
	return first, then
}

// IsGivenUp reports whether new flows do not pass a table any more.
func IsGivenUp(c *nft.Contents) bool { return c.Chains[chainGivenUp] != nil }
