package nftables

import (
	"context"
	"fmt"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Diff implements dataplane.Differ: it does what an Apply at start does, with writes
// that only go onto a list.
func (b *backend) Diff(ctx context.Context, p *plan.Plan) ([]string, error) {
	var out []string
	for _, fam := range b.env.Families {
		dry := &nft.DryRun{Tables: b.tables}
		if err := newFamily(b.env, fam, dry).carryOut(ctx, plan.Update{Plan: p, Node: true}); err != nil {
			return nil, fmt.Errorf("compare the %s table: %w", fam, err)
		}
		out = append(out, dry.Lines...)
	}
	return out, nil
}
