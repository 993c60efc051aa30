package rule

import (
	"hash/maphash"
	"slices"
)

// Set is chains under construction with their rules. The text is valid until Reset.
// The zero Set is empty.
type Set struct {
	buf    []byte
	Chains []Span
}

// Span is one chain's part of a Set's text.
type Span struct {
	Chain      Chain
	Rules      int
	start, end int
}

// Reset empties the set and keeps its memory.
func (s *Set) Reset() { s.buf, s.Chains = s.buf[:0], s.Chains[:0] }

// Begin starts the chain to which the following rules belong.
func (s *Set) Begin(c Chain) {
	s.Chains = append(s.Chains, Span{Chain: c, start: len(s.buf), end: len(s.buf)})
}

// Add appends a rule to the chain begun last. Parts are joined by spaces; empty ones
// are left out.
func (s *Set) Add(parts ...string) {
	c := &s.Chains[len(s.Chains)-1]
	s.buf = append(s.buf, "-A "...)
	s.buf = append(s.buf, c.Chain.String()...)
	for _, p := range parts {
		if p != "" {
			s.buf = append(s.buf, ' ')
			s.buf = append(s.buf, p...)
		}
	}
	s.buf = append(s.buf, '\n')
	c.end = len(s.buf)
	c.Rules++
}

// Mark returns the chain begun last, for AddTo.
func (s *Set) Mark() int { return len(s.Chains) - 1 }

// AddTo lets add append rules to the end of a chain behind which others were begun
// already.
func (s *Set) AddTo(mark int, add func()) {
	tail := len(s.buf)
	c := s.Chains[mark]
	s.Chains = append(s.Chains, Span{Chain: c.Chain, start: tail, end: tail})
	add()
	more := s.Chains[len(s.Chains)-1]
	s.Chains = s.Chains[:len(s.Chains)-1]
	text := slices.Clone(s.buf[more.start:more.end])
	s.buf = slices.Insert(s.buf[:tail], c.end, text...)
	s.Chains[mark].end += len(text)
	s.Chains[mark].Rules += more.Rules
	for i := mark + 1; i < len(s.Chains); i++ {
		s.Chains[i].start += len(text)
		s.Chains[i].end += len(text)
	}
}

// Text returns the lines of a chain.
func (s *Set) Text(c Span) []byte { return s.buf[c.start:c.end] }

// Clone returns a copy that stays valid.
func (s *Set) Clone() *Set {
	return &Set{buf: slices.Clone(s.buf), Chains: slices.Clone(s.Chains)}
}

// HasAll reports whether s has every one of the chains that f accepts.
func (s *Set) HasAll(chains []Chain, f func(Chain) bool) bool {
	have := make(map[Chain]struct{}, len(s.Chains))
	for _, c := range s.Chains {
		have[c.Chain] = struct{}{}
	}
	for _, c := range chains {
		if _, ok := have[c]; !ok && f(c) {
			return false
		}
	}
	return true
}

// Hasher makes short sums of texts, which agree within a process.
type Hasher struct{ seed maphash.Seed }

// NewHasher returns a Hasher.
func NewHasher() Hasher { return Hasher{maphash.MakeSeed()} }

// Sum returns the sum of a text as it is.
func (h Hasher) Sum(text []byte) uint64 { return maphash.Bytes(h.seed, text) }

// NormalSum returns the sum of the normal form of a text.
func (h Hasher) NormalSum(text []byte) uint64 { return h.Sum([]byte(NormalText(text))) }
