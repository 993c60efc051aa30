package iptables

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

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
	k.kernel = inKernel{surplus: map[sys.Table][]rule.Jumping{}, pinned: map[rule.Chain]struct{}{}}
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		s := newScan(t)
		s.Each = func(c rule.Chain, text []byte) error {
			have[c] = bytes.Clone(text)
			if strings.HasPrefix(c.String(), prefixEndpoint) && bytes.Contains(text, []byte(" --comment ")) {
				k.kernel.commented++
			}
			return nil
		}
		if err := s.Read(ctx, f.tables); err != nil {
			return nil, err
		}
		k.kernel.take(s)
	}
	k.comments = k.kernel.commented > 0
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
	out := chainDiffs(f.family, have, want)
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

// chainDiffs lists the rules in which two sets of chains differ.
func chainDiffs(f plan.Family, have, want map[rule.Chain][]byte) []string {
	all := map[rule.Chain]struct{}{}
	for c := range have {
		all[c] = struct{}{}
	}
	for c := range want {
		all[c] = struct{}{}
	}
	var out []string
	for _, c := range slices.SortedFunc(maps.Keys(all), rule.Chain.Compare) {
		h, exists := have[c]
		w, wanted := want[c]
		where := fmt.Sprintf(" %s %s: ", f, c.Table())
		switch {
		case exists && !wanted:
			out = append(out, "-"+where+":"+c.String())
		case wanted && !exists:
			out = append(out, "+"+where+":"+c.String())
		}
		if rule.NormalText(h) == rule.NormalText(w) {
			continue
		}
		for line := range bytes.Lines(h) {
			out = append(out, "-"+where+strings.TrimSuffix(string(line), "\n"))
		}
		for line := range bytes.Lines(w) {
			out = append(out, "+"+where+strings.TrimSuffix(string(line), "\n"))
		}
	}
	return out
}
