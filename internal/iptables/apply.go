package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// chainsPerRestore is how many chains the nft store is given at once: the time
// that iptables-nft-restore takes grows with the square of their number.
const chainsPerRestore = 500

// family keeps one family's rules in one store as they should be.
type family struct {
	*desired
	env    dataplane.Env
	tables sys.Tables

	known    bool // the tracker knows what the kernel has
	fresh    bool // and nothing was written since it was read back
	caughtUp bool // desired followed a whole plan since known became true
	kernel   inKernel
	style    style
	tried    bool // desired.toItself is known
}

// apply makes the kernel do what u says for the family.
func (f *family) apply(ctx context.Context, u plan.Update) error {
	if !f.known {
		if err := f.readBack(ctx); err != nil {
			return err
		}
		f.keepLayout()
	}
	if u.Partial && f.kernel.inForce {
		return nil
	}
	if !f.commented(u.Plan, u.Changed, !f.caughtUp) {
		if err := f.tryToItself(ctx); err != nil {
			return err
		}
	}
	undo, bad, err := f.follow(u.Plan, u.Changed, !f.caughtUp)
	if err != nil {
		return err
	}
	f.caughtUp = true
	errs := make([]error, 0, len(bad))
	for id, why := range bad {
		errs = append(errs, &dataplane.ObjectError{ID: id, Err: why})
	}
	refused, err := f.settle(ctx, undo)
	for id, why := range refused {
		errs = append(errs, &dataplane.ObjectError{ID: id, Err: why})
	}
	if err != nil {
		f.forget()
		errs = append(errs, err)
	}
	f.tellTotals()
	return errors.Join(errs...)
}

// keepLayout makes the layout in force stay while a cluster is near the limit.
func (f *family) keepLayout() {
	switch {
	case f.kernel.compact:
		f.comments, f.toItself, f.tried = false, true, true
	case f.kernel.endpoints > 0:
		f.comments = f.kernel.commented > 0
	}
}

// tryToItself finds out once whether the kernel has the match that a compact layout
// needs, by a rule in a chain to which nothing leads.
func (f *family) tryToItself(ctx context.Context) error {
	if f.tried {
		return nil
	}
	err := f.tables.Restore(ctx, func(w *bufio.Writer) error {
		begin := "*filter\n:" + chainCanary + " - [0:0]\n"
		_, err := w.WriteString(begin + "-A " + chainCanary + " " + rule.ToItself(sys.Family(f.family)) + " " + rule.Return + "\nCOMMIT\n" + begin + "COMMIT\n")
		return err
	})
	var re *sys.RestoreError
	if err != nil && (!errors.As(err, &re) || re.Busy) {
		return fmt.Errorf("try the bpf match for %s: %w", f.family, err)
	}
	f.toItself, f.tried = err == nil, true
	if err != nil {
		f.env.Log.Warn("the kernel cannot compare a packet's addresses, so that every endpoint keeps a chain and changes take longer; load the module xt_bpf (NETFILTER_XT_MATCH_BPF)",
			"family", f.family, "error", err)
	}
	return nil
}

// forget makes the next apply read the kernel's state back.
func (f *family) forget() { f.known, f.caughtUp = false, false }

// maxRefused bounds how many Service ports one apply finds to be refused.
const maxRefused = 16

// settle writes what is pending. Service ports that the kernel refuses are put back
// to what they were, and returned.
func (f *family) settle(ctx context.Context, undo map[plan.ID]*plan.ServicePort) (map[plan.ID]error, error) {
	refused := map[plan.ID]error{}
	for {
		fresh := f.fresh
		owner, err := f.write(ctx, undo)
		var re *sys.RestoreError
		if err == nil {
			return refused, nil
		}
		f.env.Stats.Add("sync_proxy_rules_iptables_restore_failures_total", 1, f.family.String())
		if len(undo) < len(f.services) {
			f.env.Stats.Add("sync_proxy_rules_iptables_partial_restore_failures_total", 1, f.family.String())
		}
		if !errors.As(err, &re) || re.Busy || ctx.Err() != nil || len(refused) >= maxRefused {
			return refused, err
		}
		if rerr := f.readBack(ctx); rerr != nil {
			return refused, errors.Join(err, rerr)
		}
		if !fresh { // others may have removed what the write relied on; nobody is to blame yet
			continue
		}
		culprits := map[plan.ID]error{}
		switch {
		case owner != (plan.ID{}):
			culprits[owner] = err
		default:
			culprits, err = f.bisect(ctx, err)
		}
		if len(culprits) == 0 {
			return refused, err
		}
		for id, why := range culprits {
			if _, again := refused[id]; again {
				return refused, why
			}
			refused[id] = why
			f.set(id, undo[id])
			delete(undo, id)
		}
	}
}

// write carries out everything pending. With an error it says whose line was
// refused, if that is known.
func (f *family) write(ctx context.Context, undo map[plan.ID]*plan.ServicePort) (plan.ID, error) {
	f.renderShared()
	if f.fresh {
		f.checkStyle(ctx)
	}
	if f.tables.Store() == sys.NFT && f.track.Differing() > chainsPerRestore {
		if owner, err := f.writeInParts(ctx, undo); err != nil {
			return owner, err
		}
	}
	sections := f.sections(undo)
	in, err := f.restore(ctx, sections)
	if err != nil {
		return f.blame(in, err), err
	}
	for _, s := range sections {
		for _, c := range slices.Concat(s.Flush, s.Delete) {
			f.track.Done(c)
		}
	}
	f.kernel.missing, f.kernel.surplus, f.fresh = nil, nil, false
	f.text = nil
	clear(f.dirty)
	if f.tables.Store() == sys.NFT {
		return plan.ID{}, f.deleteInParts(ctx)
	}
	return plan.ID{}, nil
}

// blame returns whose line a failure names; the zero ID if nobody's.
func (f *family) blame(in *rule.Input[plan.ID], err error) plan.ID {
	var re *sys.RestoreError
	if in == nil || !errors.As(err, &re) {
		return plan.ID{}
	}
	return in.Owner(re.Line)
}

// restore writes sections in one run of iptables-restore.
func (f *family) restore(ctx context.Context, sections []*section) (*rule.Input[plan.ID], error) {
	sections = slices.DeleteFunc(slices.Clone(sections), (*section).Empty)
	for _, t := range []sys.Table{sys.NAT, sys.Filter} {
		f.env.Stats.Set("sync_proxy_rules_iptables_last", 0, string(t), f.family.String())
	}
	if len(sections) == 0 {
		return nil, nil
	}
	in := &rule.Input[plan.ID]{}
	err := f.tables.Restore(ctx, func(w *bufio.Writer) error { return in.Write(w, f.tables.Store(), sections) })
	if err != nil {
		return in, fmt.Errorf("write %s rules: %w", f.family, err)
	}
	for t, n := range in.Rules {
		f.env.Stats.Set("sync_proxy_rules_iptables_last", float64(n), string(t), f.family.String())
	}
	return in, nil
}

// sections says what is pending, in an order in which no packet meets a gap: what
// is no longer translated is refused before, what is no longer refused is
// translated before.
func (f *family) sections(undo map[plan.ID]*plan.ServicePort) []*section {
	nat, filter := f.pending(sys.NAT), f.pending(sys.Filter)
	gaining, losing := map[plan.ID]*plan.ServicePort{}, false
	for id, old := range undo {
		if begins(old, f.services[id]) {
			gaining[id] = old
		}
		losing = losing || begins(f.services[id], old)
	}
	shared := f.sharedText()
	nat.Shared, filter.Shared = shared, shared
	switch {
	case len(gaining) == 0:
		return []*section{filter, nat}
	case !losing:
		return []*section{nat, filter}
	}
	return []*section{f.between(filter, gaining), nat, filter}
}

// between is the filter table for the moment before the nat table changes: what is
// to be refused is, and what will be translated still is too. filter then has to
// rewrite the same chains.
func (f *family) between(filter *section, gaining map[plan.ID]*plan.ServicePort) *section {
	r := f.r.common(f.each(gaining), f.health)
	s := &section{Table: sys.Filter, Insert: filter.Insert, Owned: filter.Owned}
	filter.Insert = nil
	s.Shared = r.Clone()
	for _, c := range s.Shared.Chains {
		if c.Chain.Table() != sys.Filter {
			continue
		}
		if have, ok := f.track.Exists(c.Chain); ok && have == f.hash.Sum(s.Shared.Text(c)) && !f.track.Pending(c.Chain) {
			continue
		}
		s.Rewrite(c.Chain)
		if _, wanted := f.track.Wanted(c.Chain); !wanted {
			if !slices.Contains(filter.Delete, c.Chain) {
				filter.Delete = append(filter.Delete, c.Chain)
			}
		} else {
			filter.Rewrite(c.Chain)
		}
	}
	// Chains for source ranges that are new must be there already.
	for _, c := range filter.Flush {
		if _, exists := f.track.Exists(c); !exists && strings.HasPrefix(c.String(), prefixSources) {
			s.Rewrite(c)
		}
	}
	return s
}

// pending collects what is pending in a table.
func (f *family) pending(t sys.Table) *section {
	s := &section{Table: t, Owned: f.owned(f.dirtyServices())}
	for c := range f.track.Writes() {
		if c.Table() == t {
			s.Rewrite(c)
		}
	}
	for c := range f.track.Deletes() {
		if c.Table() != t {
			continue
		}
		if _, ok := f.kernel.pinned[c]; ok {
			s.Rewrite(c) // somebody else's rule leads there
			continue
		}
		s.Delete = append(s.Delete, c)
	}
	if f.tables.Store() == sys.NFT && len(s.Delete) > chainsPerRestore {
		s.Delete = nil // see deleteInParts
	}
	for _, j := range f.kernel.missing {
		if j.table == t {
			s.Insert = append(s.Insert, j.jumping())
		}
	}
	s.Remove = f.kernel.surplus[t]
	return s
}

// dirtyServices returns the Service ports that may have something to write, in a
// fixed order.
func (f *family) dirtyServices() []*plan.ServicePort {
	ids := slices.SortedFunc(maps.Keys(f.dirty), plan.ID.Compare)
	out := make([]*plan.ServicePort, 0, len(ids))
	for _, id := range ids {
		out = append(out, f.services[id])
	}
	return out
}

func (f *family) tellTotals() {
	for _, t := range []sys.Table{sys.NAT, sys.Filter} {
		f.env.Stats.Set("sync_proxy_rules_iptables_total", float64(f.total(t)), string(t), f.family.String())
	}
}
