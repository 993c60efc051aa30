package walk

import (
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Journey is a packet on its way hook by hook, for paths with something between the
// tables that is no nf_tables.
type Journey struct {
	t     *Tables
	w     *walk
	ended bool
}

// Begin puts a packet at the beginning of its way. pick makes the random choices.
func (t *Tables) Begin(p Packet, pick func(n uint32) uint32) *Journey {
	return &Journey{t: t, w: &walk{family: t.family, Packet: p, orig: p.Dst, pick: pick}}
}

// Pass carries the packet through the base chains of a hook with priorities from one
// on and below another. It reports whether the packet goes on.
func (j *Journey) Pass(h nft.HookNum, from, below int32) bool {
	w := j.w
	w.nated = false
	for _, b := range j.t.at(h) {
		p := b.chain.Hook.Priority
		if j.ended || p < from || p >= below || b.chain.Hook.Type == "nat" && (w.Invalid || w.nated) {
			continue
		}
		w.table = b.table
		v := w.chain(b.chain)
		w.fate.Dropped = v.Code == nft.Drop
		j.ended = w.fate.Dropped || w.fate.Rejected
	}
	return !j.ended
}

// Deliver changes the packet's destination, as something beside the tables does.
func (j *Journey) Deliver(to netip.AddrPort) { j.w.Dst = to }

// Mark is the packet's mark now, Dst its destination.
func (j *Journey) Mark() uint32        { return j.w.mark }
func (j *Journey) Dst() netip.AddrPort { return j.w.Dst }

// Fate is what became of the packet so far.
func (j *Journey) Fate() Fate { return j.w.end() }
