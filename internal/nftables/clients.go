package nftables

import (
	"fmt"
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/nftables/edits"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// sweep is an affinity map in which clients of dead endpoints may be.
type sweep struct {
	id   plan.ID
	set  string
	live map[nft.Tuple]bool
}

// forgetClients takes the clients of endpoints that a Service port loses out of its
// affinity maps, in the same transaction, so that they move at once.
func (f *family) forgetClients(p *pending, e *edits.Edits) {
	if !p.new.hasAffinity() {
		return
	}
	for pool := range p.new.slots {
		name := affinityName(p.id, plan.Pool(pool))
		if o := f.objects[name]; o == nil || !o.exists {
			continue
		}
		if f.listed == nil && !loses(p, plan.Pool(pool)) {
			continue
		}
		s := sweep{id: p.id, set: name, live: map[nft.Tuple]bool{}}
		for _, ep := range p.new.slots[pool] {
			s.live[endpointTuple(ep)] = true
		}
		dead, err := f.dead(s)
		if err != nil {
			f.err = err
			return
		}
		for _, el := range dead {
			e.Remove(edits.Forget, name, el)
		}
		if len(dead) > 0 || f.listed == nil {
			f.sweeps = append(f.sweeps, s)
		}
	}
}

func endpointTuple(ep netip.AddrPort) nft.Tuple {
	return nft.Concat(nil).Addr(ep.Addr()).Port(ep.Port()).Tuple()
}

// loses reports whether an endpoint of a pool goes away.
func loses(p *pending, pool plan.Pool) bool {
	if p.old.service == nil {
		return false
	}
	stays := map[netip.AddrPort]bool{}
	for _, ep := range p.new.slots[pool] {
		stays[ep] = true
	}
	for _, ep := range p.old.slots[pool] {
		if !stays[ep] {
			return true
		}
	}
	return false
}

// dead lists the clients of endpoints that are not live.
func (f *family) dead(s sweep) ([]nft.Element, error) {
	if f.await(); f.err != nil {
		return nil, f.err
	}
	var out []nft.Element
	err := f.tables.Elements(f.ctx, f.table, f.set(s.set), func(e nft.Element) {
		if !s.live[e.Data] {
			out = append(out, e)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("look for clients of endpoints that are gone: %w", err)
	}
	return out, nil
}

// sweep looks once more, after the commit, for clients that were remembered while it
// was on its way.
func (f *family) sweep() {
	for _, s := range f.sweeps {
		if f.err != nil {
			return
		}
		if o := f.objects[s.set]; o == nil || !o.exists {
			continue
		}
		dead, err := f.dead(s)
		if err != nil {
			f.err = err
			return
		}
		if len(dead) > 0 {
			f.add(nft.Op{Kind: nft.DeleteElements, Set: f.set(s.set), Elements: dead, Owner: s.id})
			f.commit()
		}
	}
}
