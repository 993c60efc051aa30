package nftables

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// readBack finds out what the kernel has, and which table to work on.
func (f *family) readBack(ctx context.Context, n *plan.Node) error {
	s, err := newSettings(f.fam, f.env.Mark(), f.env.BeLiberal, n)
	if err != nil {
		return err
	}
	f.start(s)
	var use *nft.Contents
	for _, t := range owned.Tables(f.fam) {
		c, err := f.tables.Read(ctx, t)
		if errors.Is(err, nft.ErrNoTable) {
			continue
		}
		if err != nil {
			return err
		}
		hooked := c.Hooked()
		f.inForce = f.inForce || hooked
		if f.fits(c) && (use == nil || hooked && !use.Hooked()) {
			if use != nil {
				f.replaced = append(f.replaced, use.Table)
			}
			use = c
			continue
		}
		f.replaced = append(f.replaced, t)
	}
	exists, err := f.tables.Exists(ctx, owned.KubeProxy(f.fam))
	if err != nil {
		return err
	}
	if exists {
		f.replaced = append(f.replaced, owned.KubeProxy(f.fam))
		f.inForce = true
	}
	f.switches = f.inForce && (use == nil || !use.Hooked())
	if use == nil {
		return f.choose(ctx)
	}
	f.table = use.Table
	f.load(use)
	f.known = true
	return nil
}

// start forgets everything.
func (f *family) start(s settings) {
	f.core = s.coreSets()
	f.services = map[plan.ID]*service{}
	f.objects = map[string]*entry{}
	f.unused = map[string]struct{}{}
	f.refs = references{liberal: f.env.BeLiberal, counts: map[reference]int32{}}
	f.ranges = map[string][]nft.Element{}
	f.listed = nil
	f.addrs, f.sticky, f.replaced = nil, 0, nil
	f.inForce, f.switches = false, false
}

// choose picks the name of a table that is to be made. One of the two may be in
// force still; what is not is removed first.
func (f *family) choose(ctx context.Context) error {
	for _, t := range owned.Tables(f.fam) {
		if !slices.Contains(f.replaced, t) {
			f.table, f.known = t, true
			return nil
		}
	}
	// Both are there and neither can be used: the first stays in force.
	t := owned.Tables(f.fam)[1]
	if err := f.tables.Commit(ctx, []nft.Op{{Kind: nft.DeleteTable, Table: t}}); err != nil {
		return err
	}
	f.replaced = slices.DeleteFunc(f.replaced, func(r nft.Table) bool { return r == t })
	f.table, f.known = t, true
	return nil
}

// fits reports whether a table can be repaired in place: what cannot be changed of
// it is as it should be.
func (f *family) fits(c *nft.Contents) bool {
	s := settings{family: f.fam, mark: f.env.Mark()}
	return c.Fits(layout, slices.Collect(maps.Values(s.coreSets())), append(s.inner(), s.base(true)...))
}

// load takes over what a table holds.
func (f *family) load(c *nft.Contents) {
	for name, ch := range c.Chains {
		f.objects[name] = &entry{exists: true, sum: nft.ChainSum(&ch.Chain, ch.Rules)}
		f.unused[name] = struct{}{}
	}
	f.listed = map[string]map[nft.Tuple]nft.Element{}
	for name, set := range c.Sets {
		elements := c.Elements[name]
		e := &entry{exists: true, isSet: true}
		f.objects[name] = e
		f.unused[name] = struct{}{}
		switch {
		case f.core[name] == nil:
			e.sum = nft.SetSum(set, elements)
		case set.Interval:
			f.ranges[name] = nft.SortIntervals(elements)
		case name == setNodeAddrs:
			for _, el := range elements {
				a, _ := el.Key.Addr(owned.Family(f.fam))
				f.addrs = append(f.addrs, a)
			}
			slices.SortFunc(f.addrs, netip.Addr.Compare)
		default:
			byKey := make(map[nft.Tuple]nft.Element, len(elements))
			for _, el := range elements {
				byKey[el.Key] = el
			}
			f.listed[name] = byKey
		}
		delete(c.Elements, name)
	}
}

// take returns what a listing found under a key, once; false if nothing.
func (f *family) take(set string, key nft.Tuple, end bool) (nft.Element, bool) {
	found := f.listed[set]
	e, ok := found[key]
	if !ok || end {
		return nft.Element{}, false
	}
	delete(found, key)
	return e, true
}

// adopt reads from a listing which slots the endpoints of a Service port have.
func (f *family) adopt(sp *plan.ServicePort) [2][]netip.AddrPort {
	var out [2][]netip.AddrPort
	if len(f.listed) == 0 {
		return out
	}
	for pool := range out {
		for i := range sp.Frontends {
			fr := front{Frontend: &sp.Frontends[i], key: frontKey(sp.ID.Protocol, &sp.Frontends[i])}
			if out[pool] = f.slotsOf(&fr, plan.Pool(pool)); len(out[pool]) > 0 {
				break
			}
		}
	}
	return out
}

func (f *family) slotsOf(fr *front, p plan.Pool) []netip.AddrPort {
	var out []netip.AddrPort
	for {
		set, probe := fr.slotElement(p, len(out), netip.AddrPortFrom(netip.IPv4Unspecified(), 0))
		e, ok := f.listed[set][probe.Key]
		if !ok {
			return out
		}
		a, rest := e.Data.Addr(owned.Family(f.fam))
		port, _ := rest.Port()
		out = append(out, netip.AddrPortFrom(a, port))
	}
}
