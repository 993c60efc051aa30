package userspace

import (
	"context"
	"errors"
	"slices"

	"github.com/svcproxy/svcproxy/internal/delta"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// readBack finds out what the table holds.
func (f *family) readBack(ctx context.Context) error {
	f.services = map[plan.ID]service{}
	f.elements = delta.New[place, content]()
	f.shared, f.guards = map[place]int{}, map[string]int{}
	f.chains, f.sets = map[string]string{}, map[string]bool{}
	f.ranges, f.unused = map[string][]nft.Element{}, map[string]bool{}
	f.found = map[place]content{}
	f.addrs, f.inForce, f.renew, f.settings = nil, false, false, f.baseSettings()

	c, err := f.tables.Read(ctx, tableOf(f.fam))
	if errors.Is(err, nft.ErrNoTable) {
		f.known = true
		return nil
	}
	if err != nil {
		return err
	}
	f.inForce = isHooked(c)
	f.renew = !f.settings.fit(c)
	for name, set := range c.Sets {
		if set.Interval {
			f.ranges[name] = ordered(c.Elements[name])
			continue
		}
		for _, e := range c.Elements[name] {
			f.found[place{name, e.Key}] = contentOf(e)
		}
	}
	f.known = true
	if f.renew { // nothing of it counts but the ports
		f.ranges = map[string][]nft.Element{}
		return nil
	}
	for at, what := range f.found {
		f.elements.Have(at, what)
	}
	for name := range c.Sets {
		f.sets[name] = true
	}
	for name, ch := range c.Chains {
		f.chains[name] = chain{ch.Chain, ch.Rules}.sum()
	}
	return nil
}

// isHooked reports whether the kernel calls into a table.
func isHooked(c *nft.Contents) bool {
	for _, ch := range c.Chains {
		if ch.Hook != nil {
			return true
		}
	}
	return false
}

// fit reports whether a table can be repaired in place: what cannot be changed of it
// is as it should be.
func (s settings) fit(c *nft.Contents) bool {
	if c.Comment != layout {
		return false
	}
	for _, want := range s.sets() {
		if have := c.Sets[want.Name]; have != nil && declaration(have) != declaration(want) {
			return false
		}
	}
	for _, want := range s.chains() {
		have := c.Chains[want.Name]
		if have == nil {
			continue
		}
		if (have.Hook == nil) != (want.Hook == nil) || have.Hook != nil && *have.Hook != *want.Hook {
			return false
		}
	}
	return true
}

// declaration is all of a set that cannot be changed.
func declaration(s *nft.Set) string {
	plain := *s
	plain.Comment = ""
	return plain.String()
}

// ordered puts the elements of an interval set into the order of [nft.Intervals].
func ordered(elements []nft.Element) []nft.Element {
	out := slices.Clone(elements)
	slices.SortFunc(out, func(a, b nft.Element) int {
		switch {
		case a.Key < b.Key, a.Key == b.Key && a.End && !b.End:
			return -1
		case a.Key != b.Key || a.End != b.End:
			return 1
		}
		return 0
	})
	return out
}
