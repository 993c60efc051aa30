package table

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// ChainSum stands for a chain and its rules.
func ChainSum(c *nft.Chain, rules []*nft.Rule) [sha256.Size]byte {
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
func SetSum(s *nft.Set, elements []nft.Element) [sha256.Size]byte {
	lines := make([]string, len(elements))
	for i := range elements {
		lines[i] = s.ElementText(&elements[i])
	}
	slices.Sort(lines)
	return sha256.Sum256([]byte(Declaration(s) + strings.Join(lines, "\n")))
}

// Sum stands for the object's content.
func (o *Object) Sum() [sha256.Size]byte {
	if o.Set != nil {
		return SetSum(o.Set, o.Elements)
	}
	return ChainSum(o.Chain, o.Rules())
}

// Declaration is what cannot be changed of a set.
func Declaration(s *nft.Set) string {
	bare := *s
	bare.Comment = ""
	return bare.String()
}
