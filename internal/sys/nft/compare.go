package nft

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
)

// ChainSum stands for what a chain does, comments apart.
func ChainSum(c *Chain, rules []*Rule) [sha256.Size]byte {
	var b strings.Builder
	if c.Hook != nil {
		fmt.Fprintln(&b, *c.Hook)
	}
	for _, r := range rules {
		fmt.Fprintln(&b, r)
	}
	return sha256.Sum256([]byte(b.String()))
}

// SetSum stands for a set and its elements.
func SetSum(s *Set, elements []Element) [sha256.Size]byte {
	lines := make([]string, len(elements))
	for i := range elements {
		lines[i] = s.ElementText(&elements[i])
	}
	slices.Sort(lines)
	return sha256.Sum256([]byte(s.Declaration() + strings.Join(lines, "\n")))
}

// Declaration is what cannot be changed of a set.
func (s *Set) Declaration() string {
	bare := *s
	bare.Comment = ""
	return bare.String()
}

// Hooked reports whether the kernel calls into a table.
func (c *Contents) Hooked() bool {
	for _, ch := range c.Chains {
		if ch.Hook != nil {
			return true
		}
	}
	return false
}

// Fits reports whether a table can be repaired in place: what cannot be changed of
// it, and its comment, are as they should be.
func (c *Contents) Fits(comment string, sets []*Set, chains []Object) bool {
	if c.Comment != comment || c.Dormant {
		return false
	}
	for _, want := range sets {
		if have := c.Sets[want.Name]; have != nil && have.Declaration() != want.Declaration() {
			return false
		}
	}
	for _, want := range chains {
		have := c.Chains[want.Name()]
		if have == nil {
			continue
		}
		hook := want.Chain.Hook
		if (have.Hook == nil) != (hook == nil) || hook != nil && *have.Hook != *hook {
			return false
		}
	}
	return true
}
