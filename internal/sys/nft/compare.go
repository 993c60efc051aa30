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
