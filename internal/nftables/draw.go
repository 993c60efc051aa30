package nftables

import (
	"fmt"

	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// An endpoint is drawn by its slot's number. A chain can draw only below a number that
// is written in its rule, and to lead a frontend to another chain makes the kernel
// walk all frontends. So chains are made for round numbers of places: a Service of five
// to eight endpoints draws below eight, and again, below seven, when the number is not
// taken. All shares are equal, and an endpoint more or less is seldom more than an
// element. The kernel walks these chains for every frontend, so they are as short as can be.

// draw is the chain that chooses one of the endpoints of a pool.
func (s settings) draw(nodePort bool, p plan.Pool, places int) nft.Object {
	chain := &nft.Chain{Name: drawName(nodePort, p, places), Comment: fmt.Sprintf("one of up to %d endpoints; again if the number is not taken", places)}
	return nft.Object{Chain: chain, Rules: func() []*nft.Rule {
		var out []*nft.Rule
		for _, n := range slots.Draws(places) {
			out = append(out, s.rule(s.choose(nodePort, p, n)))
		}
		return out
	}}
}

// choose translates to the endpoint that has a slot drawn at random below a number; if
// nobody has it the rule does nothing.
func (s settings) choose(nodePort bool, p plan.Pool, below int) nft.DNAT {
	c := nft.DNAT{Fields: []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}, Map: setEndpoints, Slots: uint32(below)}
	if nodePort {
		c.Fields, c.Map = c.Fields[1:], setPortEndpoints
	}
	if p == plan.Local {
		c.First = slots.Local
	}
	return c
}
