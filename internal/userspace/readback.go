package userspace

import (
	"context"
	"crypto/sha256"
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
	f.chains, f.sets = map[string][sha256.Size]byte{}, map[string]bool{}
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
	f.inForce = c.Hooked()
	f.renew = !c.Fits(layout, f.settings.sets(), f.settings.chains())
	isCore := func(name string) bool {
		return slices.ContainsFunc(f.settings.sets(), func(s *nft.Set) bool { return s.Name == name })
	}
	for name, set := range c.Sets {
		if set.Interval {
			f.ranges[name] = nft.SortIntervals(c.Elements[name])
			continue
		}
		if !isCore(name) { // it goes as a whole
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
		f.chains[name] = nft.ChainSum(&ch.Chain, ch.Rules)
	}
	return nil
}
