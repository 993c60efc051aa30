package userspace

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/route"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// Diff implements dataplane.Differ: it does what an Apply at start does, with writes
// that only go onto a list, and without listening. Port 0 stands for one that would be
// chosen then.
func (b *backend) Diff(ctx context.Context, p *plan.Plan) ([]string, error) {
	want := b.steering()
	if b.opts.Interception == ByRoutes {
		want = vipRoutes(p)
	}
	out, err := b.diffRouting(ctx, want)
	if err != nil || b.opts.Interception == ByRoutes {
		return out, err
	}
	for _, fam := range b.env.Families {
		dry := &nft.DryRun{Tables: b.host.tables}
		f := newFamily(&backend{env: b.env, opts: b.opts, refused: map[plan.Name]bool{}}, fam)
		f.tables, f.sockets = dry, listeners.None{}
		if err := f.carryOut(ctx, plan.Update{Plan: p, Node: true}); err != nil {
			return nil, fmt.Errorf("compare the %s table: %w", fam, err)
		}
		out = append(out, dry.Lines...)
	}
	return out, nil
}

// vipRoutes are the routes of a plan where addresses are intercepted by them.
func vipRoutes(p *plan.Plan) []route.Entry {
	r := &routes{backend: &backend{}, services: map[plan.ID]*routed{}, vips: map[netip.Addr]int{}, node: p.Node}
	for id, sp := range p.Services {
		r.count(id, sp)
	}
	var out []route.Entry
	for a := range r.vips {
		out = append(out, vipRoute(a))
	}
	return out
}

func (b *backend) diffRouting(ctx context.Context, want []route.Entry) ([]string, error) {
	have, err := b.host.routing.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range have {
		if !slices.Contains(want, e) && !e.OfIPVS() {
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
