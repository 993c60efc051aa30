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
}

// apply makes the kernel do what u says for the family.
func (f *family) apply(ctx context.Context, u plan.Update) error {
	if !f.known {
		if err := f.readBack(ctx); err != nil {
			return err
		}
		if f.endpointsHaveComments() {
			f.comments = true
		} else if f.kernel.endpoints > 0 {
			f.comments = false
		}
	}
	if u.Partial && f.kernel.inForce {
		return nil
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

// forget makes the next apply read the kernel's state back.
func (f *family) forget() { f.known, f.caughtUp = false, false }

// maxRefused bounds how many Service ports one apply finds to be refused.
const maxRefused = 16

// settle writes what is pending. Service ports that the kernel refuses are put back
// to what they were, and returned.
func (f *family) settle(ctx context.Context, undo map[plan.ID]*plan.ServicePort) (map[plan.ID]error, error) {
	refused := map[plan.ID]error{}
	for {
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
		if owner, err := f.writeInParts(ctx); err != nil {
			return owner, err
		}
	}
	sections := f.sections(undo)
	in, err := f.restore(ctx, sections)
	if err != nil {
		return f.blame(in, err), err
	}
	for _, s := range sections {
		for _, c := range slices.Concat(s.flush, s.deletes) {
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
func (f *family) blame(in *input, err error) plan.ID {
	var re *sys.RestoreError
	if in == nil || !errors.As(err, &re) {
		return plan.ID{}
	}
	id, _ := in.owner(re.Line)
	return id
}

// restore writes sections in one run of iptables-restore.
func (f *family) restore(ctx context.Context, sections []*section) (*input, error) {
	sections = slices.DeleteFunc(slices.Clone(sections), (*section).empty)
	for _, t := range []sys.Table{sys.NAT, sys.Filter} {
		f.env.Stats.Set("sync_proxy_rules_iptables_last", 0, string(t), f.family.String())
	}
	if len(sections) == 0 {
		return nil, nil
	}
	in := &input{r: f.r, rules: map[sys.Table]int{}}
	err := f.tables.Restore(ctx, func(w *bufio.Writer) error {
		in.w = w
		for _, s := range sections {
			in.section(s, f.tables.Store())
		}
		return in.err
	})
	if err != nil {
		return in, fmt.Errorf("write %s rules: %w", f.family, err)
	}
	for t, n := range in.rules {
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
		if gains(old, f.services[id]) {
			gaining[id] = old
		}
		losing = losing || losses(old, f.services[id])
	}
	shared := f.sharedText()
	nat.shared, filter.shared = shared, shared
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
	s := &section{table: sys.Filter, rewrite: map[chainID]struct{}{}, insert: filter.insert}
	filter.insert = nil
	s.shared = r.clone()
	for _, c := range s.shared.chains {
		if !c.id.filter {
			continue
		}
		if have, ok := f.track.Exists(c.id); ok && have == f.hash.sum(s.shared.text(c)) && !f.track.Pending(c.id) {
			continue
		}
		s.flush = append(s.flush, c.id)
		s.rewrite[c.id] = struct{}{}
		if _, wanted := f.track.Wanted(c.id); !wanted {
			if !slices.Contains(filter.deletes, c.id) {
				filter.deletes = append(filter.deletes, c.id)
			}
		} else if _, ok := filter.rewrite[c.id]; !ok {
			filter.flush = append(filter.flush, c.id)
			filter.rewrite[c.id] = struct{}{}
		}
	}
	// Chains for source ranges that are new must be there already.
	for _, c := range filter.flush {
		if _, exists := f.track.Exists(c); !exists && strings.HasPrefix(c.String(), prefixSources) {
			if _, ok := s.rewrite[c]; !ok {
				s.flush = append(s.flush, c)
				s.rewrite[c] = struct{}{}
			}
		}
	}
	s.services = filter.services
	return s
}

// pending collects what is pending in a table.
func (f *family) pending(t sys.Table) *section {
	s := &section{table: t, rewrite: map[chainID]struct{}{}}
	for c := range f.track.Writes() {
		if c.table() == t {
			s.flush = append(s.flush, c)
			s.rewrite[c] = struct{}{}
		}
	}
	for c := range f.track.Deletes() {
		if c.table() != t {
			continue
		}
		if _, ok := f.kernel.pinned[c]; ok {
			s.flush = append(s.flush, c) // somebody else's rule leads there
			continue
		}
		s.deletes = append(s.deletes, c)
	}
	if f.tables.Store() == sys.NFT && len(s.deletes) > chainsPerRestore {
		s.deletes = nil // see deleteInParts
	}
	s.services = f.dirtyServices()
	for _, j := range f.kernel.missing {
		if j.table == t {
			s.insert = append(s.insert, j)
		}
	}
	s.remove = f.kernel.surplus[t]
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

// writeInParts writes the chains of Service ports, a few hundred at a time, before
// anything new leads to them.
func (f *family) writeInParts(ctx context.Context) (plan.ID, error) {
	basics := []string{chainMarkMasq, chainMasqOthers}
	nat, filter := f.newPart()
	r := f.r.common(func(func(*plan.ServicePort) bool) {}, nil)
	nat.shared = r.clone()
	for _, name := range basics {
		if c := natChain(name); f.track.Pending(c) {
			if _, wanted := f.track.Wanted(c); wanted {
				nat.add(c)
			}
		}
	}
	for _, sp := range f.dirtyServices() {
		for _, c := range f.r.service(sp).chains {
			if f.track.Pending(c.id) {
				map[bool]*section{false: nat, true: filter}[c.id.filter].add(c.id)
			}
		}
		nat.services, filter.services = append(nat.services, sp), append(filter.services, sp)
		if len(nat.flush) >= chainsPerRestore {
			if owner, err := f.writePart(ctx, nat, filter); err != nil {
				return owner, err
			}
			nat, filter = f.newPart()
		}
	}
	return f.writePart(ctx, nat, filter)
}

func (f *family) newPart() (nat, filter *section) {
	return &section{table: sys.NAT, rewrite: map[chainID]struct{}{}}, &section{table: sys.Filter, rewrite: map[chainID]struct{}{}}
}

func (s *section) add(c chainID) {
	s.flush = append(s.flush, c)
	s.rewrite[c] = struct{}{}
}

func (f *family) writePart(ctx context.Context, nat, filter *section) (plan.ID, error) {
	in, err := f.restore(ctx, []*section{filter, nat})
	if err != nil {
		return f.blame(in, err), err
	}
	for _, c := range slices.Concat(nat.flush, filter.flush) {
		f.track.Done(c)
	}
	for _, sp := range nat.services {
		delete(f.dirty, sp.ID)
	}
	return plan.ID{}, nil
}

// deleteInParts removes chains to which nothing leads any more, a few hundred at a
// time and those first that lead to others.
func (f *family) deleteInParts(ctx context.Context) error {
	stale := slices.SortedFunc(f.track.Deletes(), func(a, b chainID) int {
		if r := deleteRank(a) - deleteRank(b); r != 0 {
			return r
		}
		return strings.Compare(a.String(), b.String())
	})
	for part := range slices.Chunk(stale, chainsPerRestore) {
		nat, filter := f.newPart()
		for _, c := range part {
			s := map[bool]*section{false: nat, true: filter}[c.filter]
			s.deletes = append(s.deletes, c)
		}
		if _, err := f.restore(ctx, []*section{filter, nat}); err != nil {
			return err
		}
		for _, c := range part {
			f.track.Done(c)
		}
	}
	return nil
}

// deleteRank orders chains so that none comes before one that leads to it.
func deleteRank(c chainID) int {
	for i, prefix := range []string{prefixAddr, prefixPort, prefixSources, prefixExternal, prefixService, prefixLocal, prefixEndpoint} {
		if strings.HasPrefix(c.String(), prefix) {
			return i
		}
	}
	return -1
}

// bisect finds the Service ports whose chains the kernel refuses, by writing the
// chains of ever fewer. Nothing new leads to them yet. If none is found, why is the
// error that stays.
func (f *family) bisect(ctx context.Context, why error) (map[plan.ID]error, error) {
	culprits := map[plan.ID]error{}
	var try func(part []*plan.ServicePort) error
	try = func(part []*plan.ServicePort) error {
		err := f.writeAlone(ctx, part)
		var re *sys.RestoreError
		if err == nil {
			return nil
		}
		if !errors.As(err, &re) || re.Busy || len(culprits) >= maxRefused {
			return err
		}
		if len(part) == 1 {
			culprits[part[0].ID] = err
			return nil
		}
		return errors.Join(try(part[:len(part)/2]), try(part[len(part)/2:]))
	}
	if services := f.dirtyServices(); len(services) > 0 {
		if err := try(services); err != nil {
			return culprits, err
		}
	}
	return culprits, why
}

// writeAlone writes the pending chains of some Service ports.
func (f *family) writeAlone(ctx context.Context, services []*plan.ServicePort) error {
	nat, filter := f.newPart()
	nat.services, filter.services = services, services
	if _, exists := f.track.Exists(natChain(chainMarkMasq)); !exists {
		r := f.r.common(func(func(*plan.ServicePort) bool) {}, nil)
		nat.shared = r.clone()
		nat.add(natChain(chainMarkMasq))
	}
	for _, sp := range services {
		for _, c := range f.r.service(sp).chains {
			if f.track.Pending(c.id) {
				map[bool]*section{false: nat, true: filter}[c.id.filter].add(c.id)
			}
		}
	}
	_, err := f.writePart(ctx, nat, filter)
	return err
}

func (f *family) tellTotals() {
	f.env.Stats.Set("sync_proxy_rules_iptables_total", float64(f.total(false)), string(sys.NAT), f.family.String())
	f.env.Stats.Set("sync_proxy_rules_iptables_total", float64(f.total(true)), string(sys.Filter), f.family.String())
}
