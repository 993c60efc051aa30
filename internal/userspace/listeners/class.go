// Package listeners holds the sockets on which userspace mode listens: for each Service
// port one port number, at an address for each way in which flows are treated.
package listeners

import (
	"net/netip"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Class is what a listening address stands for: flows that arrive there have this pool
// and treatment. The address is the block's first plus the class.
type Class uint8

// Classes is their number.
const Classes = 4

// Set says of each class whether it is in the set.
type Set [Classes]bool

// ClassOf returns the class of a route that forwards.
func ClassOf(r plan.Route) Class {
	c := Class(r.Pool) << 1
	if r.SNAT {
		c |= 1
	}
	return c
}

// Route is what the flows of the class get.
func (c Class) Route() plan.Route {
	return plan.Route{Verdict: plan.Forward, Pool: plan.Pool(c >> 1), SNAT: c&1 != 0}
}

// Addr is the class's address in a block.
func (c Class) Addr(block netip.Prefix) netip.Addr {
	a := block.Masked().Addr()
	for range c {
		a = a.Next()
	}
	return a
}

// Blocks are the addresses on which the relay listens, four in a row of each family,
// beginning with the prefix's first. Nothing else on the node or beyond it may use
// them; they are never seen outside of it.
type Blocks struct{ V4, V6 netip.Prefix }

// DefaultBlocks are link-local and unique local addresses without a known use.
func DefaultBlocks() Blocks {
	return Blocks{V4: netip.MustParsePrefix("169.254.247.0/30"), V6: netip.MustParsePrefix("fd73:7663:7072:6f78::/126")}
}

// Of returns a family's block.
func (b Blocks) Of(f plan.Family) netip.Prefix {
	if f == plan.IPv6 {
		return b.V6
	}
	return b.V4
}

// PortRange is a range of ports, both ends included. The zero value is none.
type PortRange struct{ First, Last uint16 }

// Key names a Service port for a successor and in logs: "default/web/http/tcp/IPv4".
func Key(id plan.ID) string {
	return id.Namespace + "/" + id.Name + "/" + id.Port + "/" + strings.ToLower(id.Protocol.String()) + "/" + id.Family.String()
}
