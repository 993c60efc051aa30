// Package rule is the language of iptables-save and iptables-restore: chains and
// the text of their rules are built, read, compared, and written. Text that is built
// here is what iptables-save prints of it, to the letter.
//
// Two structures of chains are built too: a dispatch that branches by address and
// port ([Tree]), and a random choice that splits into groups ([Set.Choose]). What
// the rules are for is the caller's business.
package rule

import (
	"bytes"
	"cmp"
	"strings"

	"github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// NameMax is how many characters a chain's name has at most.
const NameMax = 28

// Chain names one chain of the nat or the filter table. It is comparable and holds
// no pointer, since there can be one for every endpoint of a cluster.
type Chain struct {
	filter bool // else nat
	name   [NameMax]byte
}

// NAT returns the chain of that name in the nat table; a longer name is cut.
func NAT(name string) Chain {
	var c Chain
	copy(c.name[:], name)
	return c
}

// Filter is the same for the filter table.
func Filter(name string) Chain {
	c := NAT(name)
	c.filter = true
	return c
}

// In returns the chain of that name in a table. Those of other tables than nat and
// filter are told apart from these by the caller.
func In(t iptables.Table, name string) Chain {
	if t == iptables.Filter {
		return Filter(name)
	}
	return NAT(name)
}

// Table returns nat or filter.
func (c Chain) Table() iptables.Table {
	if c.filter {
		return iptables.Filter
	}
	return iptables.NAT
}

// String returns the name.
func (c Chain) String() string {
	n := len(c.name)
	for n > 0 && c.name[n-1] == 0 {
		n--
	}
	return string(c.name[:n])
}

// Compare orders chains by name, then by table.
func (c Chain) Compare(o Chain) int {
	return cmp.Or(bytes.Compare(c.name[:], o.name[:]), strings.Compare(string(c.Table()), string(o.Table())))
}
