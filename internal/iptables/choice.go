package iptables

import (
	"hash/fnv"
)

const (
	// choiceRules is how many endpoints one chain chooses among by one rule each;
	// more are split into groups.
	choiceRules = 16
	// choiceLevels is how deep groups are split: each level adds one character to
	// the chain's name, and names have 28.
	choiceLevels = 3
)

// choice renders the random choice among members into the chain begun last, and
// the chains of groups below it. Many members are split into up to 16 groups by a
// hash of their address, so that a packet walks O(log n) rules and one endpoint
// more or less only touches the chains on its path.
//
// A rule's probability is its weight by the sum of its own and all later ones: so
// every endpoint's share is exactly its weight by the total, up to the kernel's 31
// bits.
func (r *renderer) choice(v *view, chain string, members []candidate, level int) {
	if len(members) <= choiceRules || level == choiceLevels {
		rest := weight(members)
		for i := range members {
			m := &members[i]
			r.option(r.remark(v, " -> ", m.Addr.String()), uint64(m.Weight), rest, m.chain)
			rest -= uint64(m.Weight)
		}
		return
	}
	groups := split(members, level)
	rest := weight(members)
	for g, in := range groups {
		if len(in) == 0 {
			continue
		}
		w := weight(in)
		r.option(r.remark(v), w, rest, groupChain(chain, g, in))
		rest -= w
	}
	for g, in := range groups {
		if len(in) > 1 {
			name := groupChain(chain, g, in)
			r.begin(natChain(name))
			r.choice(v, name, in, level+1)
		}
	}
}

// option is one rule of a choice; the last one always matches.
func (r *renderer) option(remark string, w, rest uint64, chain string) {
	if w == rest {
		r.add(remark, jumpTo(chain))
		return
	}
	r.add(remark, chance(w, rest), jumpTo(chain))
}

// groupChain is where group g leads: to a chain below, or to its only endpoint.
func groupChain(chain string, g int, in []candidate) string {
	if len(in) == 1 {
		return in[0].chain
	}
	return chain + string("0123456789ABCDEF"[g])
}

// split distributes members by a digit of their address's hash; each group keeps
// their order.
func split(members []candidate, level int) [16][]candidate {
	var groups [16][]candidate
	for _, m := range members {
		h := fnv.New32a()
		b, err := m.Addr.MarshalBinary()
		if err != nil {
			panic("an address does not marshal: " + err.Error()) // netip never fails
		}
		h.Write(b)
		g := mix(h.Sum32()) >> (28 - 4*level) & 15
		groups[g] = append(groups[g], m)
	}
	return groups
}

// mix spreads the bits of neighbouring sums (the finaliser of MurmurHash3).
func mix(h uint32) uint32 {
	h ^= h >> 16
	h *= 0x85ebca6b
	h ^= h >> 13
	h *= 0xc2b2ae35
	return h ^ h>>16
}

func weight(members []candidate) uint64 {
	var sum uint64
	for i := range members {
		sum += uint64(members[i].Weight)
	}
	return sum
}
