package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

// stores finds every store of a family that has tables.
type stores func(ctx context.Context, f plan.Family) ([]sys.Tables, error)

// hostStores asks the kernel first: where there are no tables no program is executed.
func hostStores(env dataplane.Env) stores {
	return func(ctx context.Context, f plan.Family) ([]sys.Tables, error) {
		find := finder(env, f)
		var used []sys.Store
		if slices.ContainsFunc(tables(), func(t sys.Table) bool { return find.HasLegacy(sys.Family(f), t) }) {
			used = append(used, sys.Legacy)
		}
		if has, err := hasNFT(ctx, f); err != nil {
			return nil, err
		} else if has {
			used = append(used, sys.NFT)
		}
		if len(used) == 0 {
			return nil, nil
		}
		all, err := find.All(ctx, sys.Family(f))
		return slices.DeleteFunc(all, func(t sys.Tables) bool { return !slices.Contains(used, t.Store()) }), err
	}
}

// tables are those in which we have chains.
func tables() []sys.Table { return []sys.Table{sys.Mangle, sys.Filter, sys.NAT} }

// hasNFT reports whether the store nft has tables of a family.
func hasNFT(ctx context.Context, f plan.Family) (has bool, err error) {
	k := &kernel.Tables{}
	defer func() { err = errors.Join(err, k.Close()) }()
	family := map[plan.Family]nft.Family{plan.IPv4: nft.IPv4, plan.IPv6: nft.IPv6}[f]
	for _, t := range tables() {
		if has, err = nft.Present(ctx, k, nft.Table{Family: family, Name: string(t)}); has || err != nil {
			return has, err
		}
	}
	return false, nil
}

// cleanup removes every chain of ours and of kube-proxy, and every jump to one, from
// both stores and both families. A family or store that the host does not have
// holds nothing. spare leaves a store where svcproxy has taken kube-proxy's over.
func cleanup(ctx context.Context, env dataplane.Env, find stores, spare bool) error {
	return each(ctx, find, func(f plan.Family, t sys.Tables) error {
		n, err := removeAll(ctx, t, spare)
		// Another process may be removing the same: what was read is gone then.
		for range 3 {
			if _, gone := errors.AsType[*sys.RestoreError](err); !gone {
				break
			}
			n, err = removeAll(ctx, t, spare)
		}
		if err == nil && n > 0 {
			env.Log.Info("removed iptables rules", "store", t.Store(), "family", f, "chains", n)
		}
		return err
	})
}

// inForce reports whether a built-in chain leads to chains of ours or of kube-proxy.
func inForce(ctx context.Context, find stores) (found bool, err error) {
	err = each(ctx, find, func(_ plan.Family, t sys.Tables) error {
		for _, table := range []sys.Table{sys.NAT, sys.Filter} {
			s := newScan(table)
			s.Each = func(rule.Chain, []byte) error { return nil }
			if err := s.Read(ctx, t); err != nil {
				return err
			}
			found = found || len(s.Jumps) > 0
		}
		return nil
	})
	return found, err
}

// each calls do for every store of every family that the host has.
func each(ctx context.Context, find stores, do func(plan.Family, sys.Tables) error) error {
	var errs []error
	for _, f := range plan.Families {
		all, err := find(ctx, f)
		if err != nil {
			if !errors.Is(err, sys.ErrUnsupported) {
				errs = append(errs, fmt.Errorf("look for iptables rules of %s: %w", f, err))
			}
			continue
		}
		for _, t := range all {
			if err := do(f, t); err != nil {
				errs = append(errs, fmt.Errorf("the %s store of %s: %w", t.Store(), f, err))
			}
		}
	}
	return errors.Join(errs...)
}

// removeAll removes everything of ours from one store and returns the number of
// chains. KUBE-FIREWALL goes too unless kubelet is there, whose chain it is then. A
// chain to which others' rules lead is emptied only; KUBE-MARK-MASQ keeps its
// meaning for them. With spare a store stays as it is that has the one chain which
// svcproxy always writes and kube-proxy never.
func removeAll(ctx context.Context, t sys.Tables, spare bool) (int, error) {
	kubelet := false
	var found []*rule.Scan
	chains := map[sys.Table][]rule.Chain{}
	for _, table := range tables() {
		s := newScan(table)
		s.Own = func(chain string) bool {
			kubelet = kubelet || chain == "KUBE-KUBELET-CANARY"
			return ours(table, chain) || table == sys.Filter && chain == chainFirewall
		}
		s.Each = func(c rule.Chain, _ []byte) error {
			chains[table] = append(chains[table], c)
			return nil
		}
		if err := s.Read(ctx, t); err != nil {
			return 0, err
		}
		found = append(found, s)
	}
	if spare && slices.Contains(chains[sys.Filter], rule.Filter(chainInvalid)) {
		return 0, nil
	}
	removed := 0
	for _, s := range found {
		sec := removal(s, chains[s.Table], kubelet)
		removed += len(sec.Delete)
		if err := remove(ctx, t, sec); err != nil {
			return removed, fmt.Errorf("table %s: %w", s.Table, err)
		}
	}
	return removed, nil
}

// removal plans what to take out of a table.
func removal(s *rule.Scan, chains []rule.Chain, kubelet bool) *section {
	sec := &section{Table: s.Table}
	keep := func(c rule.Chain) bool { return kubelet && c.String() == chainFirewall }
	for _, j := range s.Jumps {
		if !keep(rule.In(s.Table, rule.Target(j.Rule))) {
			sec.Remove = append(sec.Remove, j)
		}
	}
	for _, c := range chains {
		switch {
		case keep(c):
		case !slices.Contains(s.Pinned, c):
			sec.Delete = append(sec.Delete, c)
		case c.String() != chainMarkMasq:
			sec.Rewrite(c)
		}
	}
	slices.SortFunc(sec.Delete, deleteOrder)
	return sec
}

// remove carries a removal out, in parts where the store needs that.
func remove(ctx context.Context, t sys.Tables, sec *section) error {
	parts := []*section{sec}
	if t.Store() == sys.NFT {
		parts = nil
		rest := *sec
		for len(rest.Delete) > chainsPerRestore {
			part := rest
			part.Delete = rest.Delete[:chainsPerRestore]
			parts = append(parts, &part)
			rest = section{Table: sec.Table, Delete: rest.Delete[chainsPerRestore:]}
		}
		parts = append(parts, &rest)
	}
	for _, p := range parts {
		if p.Empty() {
			continue
		}
		err := t.Restore(ctx, func(w *bufio.Writer) error {
			var in rule.Input[plan.ID]
			return in.Write(w, t.Store(), []*section{p})
		})
		if err != nil {
			return err
		}
	}
	return nil
}
