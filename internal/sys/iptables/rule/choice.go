package rule

import (
	"hash/fnv"
	"net/netip"
)

const (
	// ChoiceRules is how many options one chain chooses among by one rule each; more
	// are split into groups.
	ChoiceRules = 16
	// ChoiceLevels is how deep groups are split: each level adds one character to the
	// name of the chain that chooses.
	ChoiceLevels = 3
)

// Option is one target to choose.
type Option struct {
	Key    netip.AddrPort // decides the group
	Match  string         // what the target needs to be matched, "" for a chain
	Target string
	Weight uint16 // at least 1
	Remark string
}

// Choose appends a random choice to the chain begun last, whose name is chain, in the
// nat table, and adds the chains of groups below it. Many options are split into up to
// 16 groups by a hash of their key, so that a packet walks O(log n) rules and one
// option more or less only touches the chains on its path.
//
// A rule's probability is its weight by the sum of its own and all later ones: so
// every option's share is exactly its weight by the total, up to the kernel's 31
// bits. remark is for rules that lead to groups.
func (s *Set) Choose(chain, remark string, options []Option) { s.choose(chain, remark, options, 0) }

func (s *Set) choose(chain, remark string, options []Option, level int) {
	rest := weight(options)
	if len(options) <= ChoiceRules || level == ChoiceLevels {
		for i := range options {
			o := &options[i]
			s.option(o.Match, o.Remark, uint64(o.Weight), rest, o.Target)
			rest -= uint64(o.Weight)
		}
		return
	}
	groups := split(options, level)
	for g, in := range groups {
		if len(in) > 0 {
			w := weight(in)
			if len(in) == 1 {
				s.option(in[0].Match, remark, w, rest, in[0].Target)
			} else {
				s.option("", remark, w, rest, Jump(groupChain(chain, g)))
			}
			rest -= w
		}
	}
	for g, in := range groups {
		if len(in) > 1 {
			name := groupChain(chain, g)
			s.Begin(NAT(name))
			s.choose(name, remark, in, level+1)
		}
	}
}

// option is one rule of a choice; the last one always matches.
func (s *Set) option(match, remark string, w, rest uint64, target string) {
	if w == rest {
		s.Add(match, remark, target)
		return
	}
	s.Add(match, remark, Chance(w, rest), target)
}

// groupChain is the chain of group g.
func groupChain(chain string, g int) string { return chain + string("0123456789ABCDEF"[g]) }

// split distributes options by a digit of their key's hash; each group keeps their
// order.
func split(options []Option, level int) [16][]Option {
	var groups [16][]Option
	for _, o := range options {
		h := fnv.New32a()
		b, err := o.Key.MarshalBinary()
		if err != nil {
			panic("an address does not marshal: " + err.Error()) // netip never fails
		}
		h.Write(b)
		g := mix(h.Sum32()) >> (28 - 4*level) & 15
		groups[g] = append(groups[g], o)
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

func weight(options []Option) uint64 {
	var sum uint64
	for i := range options {
		sum += uint64(options[i].Weight)
	}
	return sum
}
