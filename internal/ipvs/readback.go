package ipvs

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/ipvs/leftover"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// readBack finds out what the kernel has. listed are all virtual servers.
func (f *family) readBack(listed []ipvs.Entry) error {
	f.start()
	held, err := f.k.tables.Read(f.ctx, table.Of(f.fam))
	switch {
	case errors.Is(err, nft.ErrNoTable):
		held = nil
	case err != nil:
		return err
	default:
		f.hasTable = true
		if f.fits(held) {
			f.load(held)
		} else {
			f.replace = true
		}
	}
	addrs, err := f.k.device.Addrs()
	hasDevice := !errors.Is(err, host.ErrNoDevice)
	if err != nil && hasDevice {
		return err
	}
	for _, a := range addrs {
		if plan.FamilyOf(a) == f.fam && !a.IsLinkLocalUnicast() {
			f.bound.Have(a, struct{}{})
		}
	}
	recorded := recordedIn(f.fam, held)
	f.adopting = hasDevice && held == nil
	var kubeProxys leftover.NodePorts
	if f.adopting {
		if kubeProxys, err = leftover.ReadNodePorts(f.k.sets); err != nil {
			return err
		}
	}
	met := f.met
	f.met = map[ipvs.Key]bool{}
	for _, e := range listed {
		if e.Family != table.ServerFamilyOf(f.fam) {
			continue
		}
		_, onDevice := f.bound.Exists(e.Addr.Addr())
		switch {
		case met[e.Key]:
			f.met[e.Key] = true
			f.foreign[e.Key] = e
		case recorded[e.Key], f.mine[e.Key], (e.Mark == 0 && onDevice || kubeProxys.Has(e.Key)) && !f.opts.excluded(e.Key):
			f.adopt(e)
		default:
			f.foreign[e.Key] = e
		}
	}
	entries, err := f.k.routing.List(f.ctx)
	if err != nil {
		return err
	}
	if err := f.takeBack(entries); err != nil {
		return err
	}
	f.steering = true
	for _, e := range f.routes() {
		f.steering = f.steering && slices.Contains(entries, e)
	}
	f.inForce = held != nil && !table.IsGivenUp(held) || held == nil && hasDevice && len(addrs) > 0
	f.known = true
	return nil
}

// recordedIn are the virtual servers that a table says are ours.
func recordedIn(f plan.Family, held *nft.Contents) map[ipvs.Key]bool {
	out := map[ipvs.Key]bool{}
	if held == nil {
		return out
	}
	for _, k := range [...]table.Kind{table.Servers, table.ServerMarks} {
		for _, in := range held.Elements[k.Name()] {
			e, _, ok := table.Decode(f, k, in)
			switch {
			case !ok:
			case k == table.ServerMarks:
				out[ipvs.ByMark(table.ServerFamilyOf(f), e.Mark)] = true
			default:
				out[ipvs.ByAddr(ipvs.Protocol(e.Proto), netip.AddrPortFrom(e.Address(f), e.Port))] = true
			}
		}
	}
	return out
}

// fits reports whether a table can be repaired in place: what cannot be changed of
// it is as it should be.
func (f *family) fits(c *nft.Contents) bool {
	s := table.Settings{Family: f.fam, Bit: f.env.MasqueradeBit}
	return c.Fits(table.Layout, s.Sets(), append(s.Inner(), s.Base()...))
}

// load takes over what a table holds.
func (f *family) load(c *nft.Contents) {
	for name, ch := range c.Chains {
		f.hooked = f.hooked || ch.Hook != nil && !table.IsGivenUp(c)
		f.objects[name] = &entry{Object: nft.Object{Chain: &ch.Chain}, exists: true, sum: nft.ChainSum(&ch.Chain, ch.Rules)}
		f.touched[name] = struct{}{}
	}
	kinds := map[string]table.Kind{}
	for k := range table.Kinds {
		kinds[k.Name()] = k
	}
	for name, set := range c.Sets {
		f.objects[name] = &entry{Object: nft.Object{Set: set}, isSet: true, exists: true}
		f.touched[name] = struct{}{}
		k, grows := kinds[name]
		switch {
		case grows:
			for _, in := range c.Elements[name] {
				if e, content, ok := table.Decode(f.fam, k, in); ok {
					f.elements.Have(e, content)
				}
			}
		case name == table.PodRanges || name == table.ServiceRanges:
			f.ranges[name] = nft.SortIntervals(c.Elements[name])
		default:
			f.objects[name].sum = nft.SetSum(set, c.Elements[name])
		}
	}
}
