package userspace

import (
	"context"
	"fmt"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Diff implements dataplane.Differ: it does what an Apply at start does, with writes
// that only go onto a list, and without listening. Port 0 stands for one that would be
// chosen then.
func (b *backend) Diff(ctx context.Context, p *plan.Plan) ([]string, error) {
	out, err := b.diffRouting(ctx)
	if err != nil {
		return nil, err
	}
	for _, fam := range b.env.Families {
		dry := &nft.DryRun{Tables: b.host.tables}
		f := newFamily(&backend{env: b.env, opts: b.opts, refused: map[plan.Name]bool{}}, fam)
		f.tables, f.sockets = dry, noSockets{}
		if err := f.carryOut(ctx, plan.Update{Plan: p, Node: true}); err != nil {
			return nil, fmt.Errorf("compare the %s table: %w", fam, err)
		}
		out = append(out, dry.Lines...)
	}
	return out, nil
}

func (b *backend) diffRouting(ctx context.Context) ([]string, error) {
	have, err := b.host.routing.List(ctx)
	if err != nil {
		return nil, err
	}
	want := routing(b.env.Families, b.opts.Blocks, 1<<b.opts.RouteBit)
	var out []string
	for _, e := range have {
		if !slices.Contains(want, e) {
			out = append(out, "- "+e.String())
		}
	}
	for _, e := range want {
		if !slices.Contains(have, e) {
			out = append(out, "+ "+e.String())
		}
	}
	slices.Sort(out)
	return out, nil
}
