package planner

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// claimKey is what only one Service can have. addr is invalid for a node port.
type claimKey struct {
	addr     netip.Addr
	port     uint16
	protocol plan.Protocol
	family   plan.Family
}

// wanted is one frontend that a Service asks for.
type wanted struct {
	key  claimKey
	kind plan.Kind
	port uint16 // index in the Service's ports
}

// claims knows which Service has which address and port. The older Service wins,
// then the one whose namespace and name come first: the outcome does not depend on
// the order in which Services arrive.
type claims struct {
	owner  map[claimKey]*service
	losers map[claimKey][]*service // all others that want it, the best first
	uses   map[netip.Addr]int      // frontends with that address, won or not
	// nodePorts counts those of each family, won or not.
	nodePorts map[plan.Family]int

	// of the update being made:
	affected    map[cluster.Name]struct{} // Services for which the outcome changed
	host        []netip.Addr              // the host's addresses, sorted
	nodeTouched bool                      // what the Node's part of the plan looks at changed
}

func newClaims() claims {
	return claims{
		owner:     map[claimKey]*service{},
		losers:    map[claimKey][]*service{},
		uses:      map[netip.Addr]int{},
		nodePorts: map[plan.Family]int{},
		affected:  map[cluster.Name]struct{}{},
	}
}

// begin starts an update.
func (c *claims) begin(host []netip.Addr) {
	clear(c.affected)
	c.host, c.nodeTouched = host, false
}

// set replaces what s wants. recreated: s has another age than before.
func (c *claims) set(s *service, next []wanted, recreated bool) {
	if !recreated && slices.Equal(s.wanted, next) {
		return
	}
	for _, w := range s.wanted {
		c.release(s, w.key)
	}
	s.wanted = exact(next)
	for _, w := range s.wanted {
		c.claim(s, w.key)
	}
}

func (c *claims) claim(s *service, k claimKey) {
	c.count(k, 1)
	owner := c.owner[k]
	switch {
	case owner == nil:
		c.owner[k] = s
		return
	case precedes(s, owner):
		c.owner[k] = s
		c.addLoser(owner, k)
		c.affect(k)
	default:
		c.addLoser(s, k)
	}
}

func (c *claims) release(s *service, k claimKey) {
	c.count(k, -1)
	losers := c.losers[k]
	if c.owner[k] != s {
		c.setLosers(k, slices.DeleteFunc(losers, func(o *service) bool { return o == s }))
		return
	}
	if len(losers) == 0 {
		delete(c.owner, k)
		return
	}
	c.affect(k)
	c.owner[k] = losers[0]
	c.setLosers(k, losers[1:])
}

func (c *claims) addLoser(s *service, k claimKey) {
	losers := c.losers[k]
	at, _ := slices.BinarySearchFunc(losers, s, compareAge)
	c.losers[k] = slices.Insert(losers, at, s)
}

func (c *claims) setLosers(k claimKey, losers []*service) {
	if len(losers) == 0 {
		delete(c.losers, k)
		return
	}
	c.losers[k] = losers
}

// affect marks all that lost k: they may have it now, or another winner to name.
func (c *claims) affect(k claimKey) {
	for _, s := range c.losers[k] {
		c.affected[s.name] = struct{}{}
	}
}

// count keeps uses and nodePorts.
func (c *claims) count(k claimKey, by int) {
	if !k.addr.IsValid() {
		c.nodePorts[k.family] += by
		if n := c.nodePorts[k.family]; n == 0 || n == by {
			c.nodeTouched = true
		}
		return
	}
	n := c.uses[k.addr] + by
	if n == 0 {
		delete(c.uses, k.addr)
	} else {
		c.uses[k.addr] = n
	}
	if n == 0 || n == by {
		if _, found := slices.BinarySearchFunc(c.host, k.addr, netip.Addr.Compare); found {
			c.nodeTouched = true
		}
	}
}

// has reports whether s won k.
func (c *claims) has(s *service, k claimKey) bool { return c.owner[k] == s }

func precedes(a, b *service) bool { return compareAge(a, b) < 0 }

func compareAge(a, b *service) int {
	return cmp.Or(cmp.Compare(a.created, b.created), compareNames(a.name, b.name))
}
