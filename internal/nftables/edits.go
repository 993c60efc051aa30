package nftables

import (
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/nftables/edits"
	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// change is the way from one state of a Service port to another; either may be that
// of one that does not exist.
type change struct {
	f        *family
	old, new *rendered
	edits    *edits.Edits
	// fronts of old by key
	before map[string]*front
}

// diff collects what differs between two states of a Service port.
func (f *family) diff(id plan.ID, old, new *rendered) *edits.Edits {
	c := &change{f: f, old: old, new: new, edits: &edits.Edits{Owner: id}, before: map[string]*front{}}
	for i := range old.fronts {
		fr := &old.fronts[i]
		c.before[string(fr.key)] = fr
	}
	var moved []slots.Move
	if old.service != nil && new.service != nil {
		moved = slots.Moves(old.slots, new.slots)
	}
	for i := range new.fronts {
		fr := &new.fronts[i]
		was := c.before[string(fr.key)]
		delete(c.before, string(fr.key))
		if was == nil {
			c.addFront(fr)
			continue
		}
		c.changeFront(was, fr, moved)
	}
	for i := range old.fronts {
		if fr := c.before[string(old.fronts[i].key)]; fr != nil {
			c.removeFront(fr)
		}
	}
	c.references()
	return c.edits
}

// slotElement is the element of one slot, and its map.
func (fr *front) slotElement(p plan.Pool, slot int, ep netip.AddrPort) (string, nft.Element) {
	n := uint32(slot)
	if p == plan.Local {
		n += slots.Local
	}
	key := append(fr.key[:len(fr.key):len(fr.key)], 0, 0, 0, 0)[:len(fr.key)].Number(n)
	e := nft.Element{Key: key.Tuple(), Data: nft.Concat(nil).Addr(ep.Addr()).Port(ep.Port()).Tuple()}
	if fr.nodePort() {
		return setPortEndpoints, e
	}
	return setEndpoints, e
}

// verdictElement is the element that leads to what is done with packets.
func (fr *front) verdictElement(id plan.ID) (string, nft.Element) {
	e := nft.Element{Key: fr.key.Tuple(), Verdict: fr.verdict, Comment: remark(id)}
	if fr.nodePort() {
		return setNodePorts, e
	}
	return setServices, e
}

func (c *change) addFront(fr *front) {
	for pool, used := range fr.uses {
		if used {
			c.addSlots(fr, plan.Pool(pool))
		}
	}
	set, e := fr.verdictElement(c.edits.Owner)
	c.add(edits.Verdict, set, e)
	if fr.record != "" {
		set, e := stickyElement(c.edits.Owner, fr)
		c.add(edits.Verdict, set, e)
	}
}

func (c *change) addSlots(fr *front, p plan.Pool) {
	set, _ := fr.slotElement(p, 0, netip.AddrPortFrom(netip.IPv4Unspecified(), 0))
	fresh := c.edits.At(edits.Fresh, set)
	fresh.Add = slices.Grow(fresh.Add, len(c.new.slots[p]))
	for slot, ep := range c.new.slots[p] {
		set, e := fr.slotElement(p, slot, ep)
		c.add(edits.Fresh, set, e)
	}
}

func (c *change) removeSlots(fr *front, p plan.Pool) {
	for slot, ep := range c.old.slots[p] {
		set, e := fr.slotElement(p, slot, ep)
		c.edits.Remove(edits.Stale, set, e)
	}
}

func (c *change) removeFront(fr *front) {
	set, e := fr.verdictElement(c.edits.Owner)
	c.edits.Remove(edits.Verdict, set, e)
	if fr.record != "" {
		set, e := stickyElement(c.edits.Owner, fr)
		c.edits.Remove(edits.Verdict, set, e)
	}
	for pool, used := range fr.uses {
		if used {
			c.removeSlots(fr, plan.Pool(pool))
		}
	}
}

// changeFront writes only what differs.
func (c *change) changeFront(was, fr *front, moved []slots.Move) {
	for pool := range fr.uses {
		p := plan.Pool(pool)
		switch {
		case fr.uses[p] && !was.uses[p]:
			c.addSlots(fr, p)
		case was.uses[p] && !fr.uses[p]:
			c.removeSlots(was, p)
		}
	}
	for _, m := range moved {
		if !fr.uses[m.Pool] || !was.uses[m.Pool] {
			continue
		}
		set, old := was.slotElement(m.Pool, m.Slot, m.Old)
		_, e := fr.slotElement(m.Pool, m.Slot, m.New)
		switch {
		case !m.Old.IsValid():
			c.edits.Insert(edits.Fresh, set, e)
		case !m.New.IsValid():
			c.edits.Remove(edits.Stale, set, old)
		default:
			c.edits.Replace(edits.Replaced, set, old, e)
		}
	}
	id := c.edits.Owner
	set, old := was.verdictElement(id)
	if _, e := fr.verdictElement(id); e != old {
		c.edits.Replace(edits.Switch, set, old, e)
	}
	set, old = stickyElement(id, was)
	_, e := stickyElement(id, fr)
	switch {
	case was.record == fr.record:
	case was.record == "":
		c.add(edits.Verdict, set, e)
	case fr.record == "":
		c.edits.Remove(edits.Verdict, set, old)
	default:
		c.edits.Replace(edits.Switch, set, old, e)
	}
}

// add inserts an element, or finds out that the kernel has it already, in this form
// or another: after a listing that is known.
func (c *change) add(s edits.Step, set string, e nft.Element) {
	known, listed := c.f.take(set, e.Key, e.End)
	switch {
	case c.f.trusts(set, e.Key):
	case !listed:
		c.edits.Insert(s, set, e)
	case known == e:
	case s == edits.Fresh:
		c.edits.Replace(edits.Replaced, set, known, e)
	default:
		c.edits.Replace(edits.Switch, set, known, e)
	}
}

// references counts the uses of elements that Service ports share.
func (c *change) references() {
	want, have := c.f.refs.of(c.new), c.f.refs.of(c.old)
	for len(want) > 0 || len(have) > 0 {
		switch {
		case len(have) == 0 || len(want) > 0 && want[0].compare(have[0]) < 0:
			if c.f.refs.use(want[0]) {
				c.share(want[0])
			}
			want = want[1:]
		case len(want) == 0 || want[0] != have[0]:
			if k := have[0]; c.f.refs.release(k) {
				c.edits.Remove(edits.Stale, k.kind.set(), k.element(c.f.fam))
			}
			have = have[1:]
		default:
			want, have = want[1:], have[1:]
		}
	}
}

// share adds an element that nobody needed before.
func (c *change) share(k reference) {
	switch k.kind {
	case endpointAddr: // nobody waits for it
		c.f.guards = append(c.f.guards, k)
	case clusterIP:
		c.add(edits.Refuse, k.kind.set(), k.element(c.f.fam))
	default:
		c.add(edits.Fresh, k.kind.set(), k.element(c.f.fam))
	}
}
