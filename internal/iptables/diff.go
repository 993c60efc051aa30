package iptables

import (
	"bytes"
	"context"
	"fmt"

	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// Diff implements dataplane.Differ. It writes nothing and forgets nothing.
func (b *backend) Diff(ctx context.Context, p *plan.Plan) ([]string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.find(ctx); err != nil {
		return nil, err
	}
	var out []string
	for _, f := range b.families {
		lines, err := f.diff(ctx, p)
		if err != nil {
			return nil, fmt.Errorf("compare %s: %w", f.family, err)
		}
		out = append(out, lines...)
	}
	return out, nil
}

// diff compares what p wants with the kernel, by rules in normal form.
func (f *family) diff(ctx context.Context, p *plan.Plan) ([]string, error) {
	have := map[rule.Chain][]byte{}
	k := newFamily(f.env, f.family, f.tables)
	k.many, k.toItself = f.many, f.toItself
	k.kernel = inKernel{surplus: map[sys.Table][]rule.Jumping{}, pinned: map[rule.Chain]struct{}{}}
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		s := newScan(t)
		s.Each = func(c rule.Chain, text []byte) error {
			have[c] = bytes.Clone(text)
			k.kernel.look(c, text)
			return nil
		}
		if err := s.Read(ctx, f.tables); err != nil {
			return nil, err
		}
		k.kernel.take(s)
	}
	k.keepLayout()
	if _, _, err := k.follow(p, nil, true); err != nil {
		return nil, err
	}
	want := map[rule.Chain][]byte{}
	keep := func(r *rule.Set) {
		for _, c := range r.Chains {
			want[c.Chain] = bytes.Clone(r.Text(c))
		}
	}
	for _, sp := range k.services {
		keep(k.r.service(sp))
	}
	keep(k.r.common(k.each(nil), k.health))
	out := rule.Differences(f.family.String(), have, want)
	for _, j := range k.kernel.missing {
		out = append(out, fmt.Sprintf("+ %s %s: -A %s %s", f.family, j.table, j.from, j.jumping().Rule))
	}
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		for _, j := range k.kernel.surplus[t] {
			out = append(out, fmt.Sprintf("- %s %s: -A %s %s", f.family, t, j.From, j.Rule))
		}
	}
	return out, nil
}
