package ipvs

import (
	"context"
	"fmt"

	"github.com/svcproxy/svcproxy/internal/ipvs/dryrun"
	"github.com/svcproxy/svcproxy/internal/ipvs/remark"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Diff implements dataplane.Differ: it does what an Apply at start does, with writes
// that only go onto a list.
func (b *backend) Diff(ctx context.Context, p *plan.Plan) ([]string, error) {
	listed, err := b.k.servers.Dump(ctx)
	if err != nil {
		return nil, fmt.Errorf("compare the virtual servers: %w", err)
	}
	var out []string
	for _, fam := range b.env.Families {
		var lines []string
		tables := &nft.DryRun{Tables: b.k.tables}
		dry := b.k
		dry.tables = tables
		dry.servers = dryrun.Servers{IPVS: b.k.servers, Lines: &lines}
		dry.device = dryrun.Device{Device: b.k.device, Lines: &lines}
		dry.routing = dryrun.Routing{Routing: b.k.routing, Lines: &lines}
		f := newFamily(b.env, b.opts, fam, dry, remark.New())
		if err := f.carryOut(ctx, plan.Update{Plan: p, Node: true}, listed); err != nil {
			return nil, fmt.Errorf("compare %s: %w", fam, err)
		}
		out = append(append(out, tables.Lines...), lines...)
	}
	return out, nil
}
