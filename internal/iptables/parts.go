package iptables

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// section is one commit; a Service port owns its lines.
type section = rule.Section[plan.ID]

// owned yields the chains of Service ports as they are written.
func (f *family) owned(services []*plan.ServicePort) iter.Seq2[plan.ID, *rule.Set] {
	return func(yield func(plan.ID, *rule.Set) bool) {
		for _, sp := range services {
			if !yield(sp.ID, f.r.service(sp)) {
				return
			}
		}
	}
}

// part is the pending chains of some Service ports.
type part struct {
	services    []*plan.ServicePort
	nat, filter section
}

func newPart() *part {
	return &part{nat: section{Table: sys.NAT}, filter: section{Table: sys.Filter}}
}

func (p *part) in(t sys.Table) *section {
	if t == sys.Filter {
		return &p.filter
	}
	return &p.nat
}

// take adds what is pending of a Service port.
func (f *family) take(p *part, sp *plan.ServicePort) {
	p.services = append(p.services, sp)
	for _, c := range f.r.service(sp).Chains {
		if f.track.Pending(c.Chain) {
			p.in(c.Chain.Table()).Rewrite(c.Chain)
		}
	}
}

// basics adds the chains that every Service port's rely on, if they are missing: those
// to which they lead, and the one that masquerades endpoints without chains when they
// meet themselves.
func (f *family) basics(p *part) {
	p.nat.Shared = f.r.common(func(func(*plan.ServicePort) bool) {}, nil).Clone()
	names := []string{chainMarkMasq, chainMasqOthers}
	if f.r.compact { // else endpoints may still be without chains, and it has to stay as it is
		names = append(names, chainPostrouting)
	}
	for _, name := range names {
		c := rule.NAT(name)
		if _, wanted := f.track.Wanted(c); wanted && f.track.Pending(c) {
			p.nat.Rewrite(c)
		}
	}
}

func (f *family) writePart(ctx context.Context, p *part) (plan.ID, error) {
	p.nat.Owned, p.filter.Owned = f.owned(p.services), f.owned(p.services)
	in, err := f.restore(ctx, []*section{&p.filter, &p.nat})
	if err != nil {
		return f.blame(in, err), err
	}
	for _, c := range slices.Concat(p.nat.Flush, p.filter.Flush) {
		f.track.Done(c)
	}
	for _, sp := range p.services {
		delete(f.dirty, sp.ID)
	}
	return plan.ID{}, nil
}

// writeInParts writes the chains of Service ports, a few hundred at a time, before
// anything new leads to them.
func (f *family) writeInParts(ctx context.Context, undo map[plan.ID]*plan.ServicePort) (plan.ID, error) {
	p := newPart()
	f.basics(p)
	for _, sp := range f.dirtyServices() {
		if begins(sp, undo[sp.ID]) {
			continue // it forwards less than before: what it refuses comes first, see sections
		}
		f.take(p, sp)
		if len(p.nat.Flush) >= chainsPerRestore {
			if owner, err := f.writePart(ctx, p); err != nil {
				return owner, err
			}
			p = newPart()
		}
	}
	return f.writePart(ctx, p)
}

// deleteInParts removes chains to which nothing leads any more, a few hundred at a
// time and those first that lead to others.
func (f *family) deleteInParts(ctx context.Context) error {
	stale := slices.SortedFunc(f.track.Deletes(), deleteOrder)
	for some := range slices.Chunk(stale, chainsPerRestore) {
		p := newPart()
		for _, c := range some {
			s := p.in(c.Table())
			s.Delete = append(s.Delete, c)
		}
		if _, err := f.restore(ctx, []*section{&p.filter, &p.nat}); err != nil {
			return err
		}
		for _, c := range some {
			f.track.Done(c)
		}
	}
	return nil
}

// deleteOrder sorts chains so that none comes before one that leads to it: those that
// all packets pass, then the dispatch and on to endpoints, then those that mark.
func deleteOrder(a, b rule.Chain) int {
	rank := func(c rule.Chain) int {
		order := []string{
			prefixAddr, prefixPort, prefixExtAddr, prefixExtPort, prefixFWAddr, prefixSources, prefixExternal, "KUBE-XLB-",
			chainMasqOthers, prefixService, prefixLocal, prefixEndpoint, "KUBE-MARK-",
		}
		if c.String() == chainMasqOthers { // begins like a Service's, which lead to it
			return len(order) - 2
		}
		return slices.IndexFunc(order, func(prefix string) bool { return strings.HasPrefix(c.String(), prefix) })
	}
	return cmp.Or(rank(a)-rank(b), a.Compare(b))
}

// bisect finds the Service ports whose chains the kernel refuses, by writing the
// chains of ever fewer. Nothing new leads to them yet. If none is found, why is the
// error that stays.
func (f *family) bisect(ctx context.Context, why error) (map[plan.ID]error, error) {
	culprits := map[plan.ID]error{}
	var try func(services []*plan.ServicePort) error
	try = func(services []*plan.ServicePort) error {
		p := newPart()
		f.basics(p)
		for _, sp := range services {
			f.take(p, sp)
		}
		_, err := f.writePart(ctx, p)
		var re *sys.RestoreError
		if err == nil {
			return nil
		}
		if !errors.As(err, &re) || re.Busy || len(culprits) >= maxRefused {
			return err
		}
		if len(services) == 1 {
			culprits[services[0].ID] = err
			return nil
		}
		return errors.Join(try(services[:len(services)/2]), try(services[len(services)/2:]))
	}
	if services := f.dirtyServices(); len(services) > 0 {
		if err := try(services); err != nil {
			return culprits, err
		}
	}
	return culprits, why
}
