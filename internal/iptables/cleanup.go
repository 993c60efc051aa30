package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// stores finds every store of a family.
type stores func(ctx context.Context, f plan.Family) ([]sys.Tables, error)

func hostStores(env dataplane.Env) stores {
	return func(ctx context.Context, f plan.Family) ([]sys.Tables, error) {
		return finder(env, f).All(ctx, sys.Family(f))
	}
}

// cleanup removes every chain of ours and of kube-proxy, and every jump to one, from
// both stores and both families. A family or store that the host does not have
// holds nothing.
func cleanup(ctx context.Context, env dataplane.Env, find stores) error {
	var errs []error
	for _, f := range plan.Families {
		all, err := find(ctx, f)
		if err != nil {
			if !errors.Is(err, sys.ErrUnsupported) {
				errs = append(errs, fmt.Errorf("clean up iptables for %s: %w", f, err))
			}
			continue
		}
		for _, t := range all {
			n, err := removeAll(ctx, t)
			if err != nil {
				errs = append(errs, fmt.Errorf("clean up the %s store for %s: %w", t.Store(), f, err))
			}
			if n > 0 {
				env.Log.Info("removed iptables rules", "store", t.Store(), "family", f, "chains", n)
			}
		}
	}
	return errors.Join(errs...)
}

// removeAll removes everything of ours from one store and returns the number of
// chains. KUBE-FIREWALL goes too unless kubelet is there, whose chain it is then. A
// chain to which others' rules lead is emptied only; KUBE-MARK-MASQ keeps its
// meaning for them.
func removeAll(ctx context.Context, t sys.Tables) (int, error) {
	kubelet := false
	var found []*scan
	chains := map[sys.Table][]chainID{}
	for _, table := range []sys.Table{sys.Mangle, sys.Filter, sys.NAT} {
		s := newScan(table)
		s.own = func(chain string) bool {
			kubelet = kubelet || chain == "KUBE-KUBELET-CANARY"
			return ours(table, chain) || table == sys.Filter && chain == chainFirewall
		}
		s.chain = func(c chainID, _ []byte) error {
			chains[table] = append(chains[table], c)
			return nil
		}
		if err := s.read(ctx, t); err != nil {
			return 0, err
		}
		found = append(found, s)
	}
	removed := 0
	for _, s := range found {
		sec := removal(s, chains[s.table], kubelet)
		removed += len(sec.deletes)
		if err := remove(ctx, t, sec); err != nil {
			return removed, fmt.Errorf("table %s: %w", s.table, err)
		}
	}
	return removed, nil
}

// removal plans what to take out of a table.
func removal(s *scan, chains []chainID, kubelet bool) *section {
	sec := &section{table: s.table, rewrite: map[chainID]struct{}{}}
	keep := func(c chainID) bool { return kubelet && c.String() == chainFirewall }
	for _, j := range s.jumps {
		if !keep(inTable(s.table, targetOf(j.rule))) {
			sec.remove = append(sec.remove, j.from+" "+j.rule)
		}
	}
	for _, c := range chains {
		switch {
		case keep(c):
		case !slices.Contains(s.pinned, c):
			sec.deletes = append(sec.deletes, c)
		case c.String() != chainMarkMasq:
			sec.flush = append(sec.flush, c)
		}
	}
	slices.SortFunc(sec.deletes, func(a, b chainID) int {
		if r := deleteRank(a) - deleteRank(b); r != 0 {
			return r
		}
		return strings.Compare(a.String(), b.String())
	})
	return sec
}

// remove carries a removal out, in parts where the store needs that.
func remove(ctx context.Context, t sys.Tables, sec *section) error {
	parts := []*section{sec}
	if t.Store() == sys.NFT {
		parts = nil
		rest := *sec
		for len(rest.deletes) > chainsPerRestore {
			part := rest
			part.deletes = rest.deletes[:chainsPerRestore]
			parts = append(parts, &part)
			rest = section{table: sec.table, rewrite: sec.rewrite, deletes: rest.deletes[chainsPerRestore:]}
		}
		parts = append(parts, &rest)
	}
	for _, p := range parts {
		if p.empty() {
			continue
		}
		err := t.Restore(ctx, func(w *bufio.Writer) error {
			in := &input{w: w, rules: map[sys.Table]int{}}
			in.section(p, t.Store())
			return in.err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
