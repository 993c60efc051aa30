package nftables

import (
	"fmt"
	"math"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// An endpoint is drawn by its slot's number. A chain can draw only below a number that
// is written in its rule, and to lead a frontend to another chain makes the kernel
// walk all frontends. So chains are made for round numbers of places: a Service of four
// to six endpoints draws below six, and again when the number is not taken. All shares
// stay equal, and an endpoint more or less is seldom more than an element.

// placesFor returns among how many places n endpoints are drawn: n itself for one, else
// the next of 3, 6, 12, 24 and so on, of which more than half are taken.
func placesFor(n int) int {
	if n <= 1 {
		return n
	}
	places := 3
	for places < n {
		places *= 2
	}
	return places
}

// drawsFor returns after how many draws among places it does not matter any more that
// none was taken: it happens less than once in 2^32, which is as fine as the kernel's
// random numbers are.
func drawsFor(places int) int {
	fewest := places/2 + 1
	if places == 3 {
		fewest = 2
	}
	const bits = 32
	return int(math.Ceil(bits / -math.Log2(1-float64(fewest)/float64(places))))
}

// draw is the chain that chooses one of the endpoints of a pool.
func (s settings) draw(nodePort bool, p plan.Pool, places int) object {
	chain := &nft.Chain{Name: drawName(nodePort, p, places), Comment: fmt.Sprintf("one of up to %d endpoints; again if the number is not taken", places)}
	return object{chain: chain, rules: func() []*nft.Rule {
		again := s.rule(s.choose(nodePort, p, places))
		var out []*nft.Rule
		for range drawsFor(places) {
			out = append(out, again)
		}
		return append(out, s.rule(s.choose(nodePort, p, 1)))
	}}
}

// choose translates to the endpoint that has a slot drawn at random among the first
// places; if nobody has it the rule does nothing.
func (s settings) choose(nodePort bool, p plan.Pool, places int) nft.DNAT {
	c := nft.DNAT{Fields: []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}, Map: setEndpoints, Slots: uint32(places)}
	if nodePort {
		c.Fields, c.Map = c.Fields[1:], setPortEndpoints
	}
	if p == plan.Local {
		c.First = localSlots
	}
	return c
}
