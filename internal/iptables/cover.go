package iptables

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// mostCovered bounds how many rules a scope takes that only has to be about right.
const mostCovered = 64

// cover is a set of addresses by few prefixes: exactly, as long as there are few of
// them, else by ever shorter prefixes. The result depends on the set only.
type cover struct {
	most int
	bits int // of the prefixes in set; 0 for an empty set
	set  map[netip.Prefix]struct{}
}

func (c *cover) add(a netip.Addr) {
	if c.set == nil {
		c.set, c.bits = map[netip.Prefix]struct{}{}, a.BitLen()
	}
	c.set[prefixOf(a, c.bits)] = struct{}{}
	for len(c.set) > c.most && c.bits > 4 {
		c.bits -= 4
		shorter := make(map[netip.Prefix]struct{}, len(c.set))
		for p := range c.set {
			shorter[prefixOf(p.Addr(), c.bits)] = struct{}{}
		}
		c.set = shorter
	}
}

func (c *cover) prefixes() []netip.Prefix {
	out := make([]netip.Prefix, 0, len(c.set))
	for p := range c.set {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return out
}

// coverPorts returns ranges of ports that cover the entries' ports.
func coverPorts(entries []entry) []portRange {
	for bits := 16; ; bits -= 4 {
		set := map[portRange]struct{}{}
		for i := range entries {
			set[rangeOf(&entries[i], bits)] = struct{}{}
		}
		if len(set) > mostCovered && bits > 4 {
			continue
		}
		out := make([]portRange, 0, len(set))
		for in := range set {
			out = append(out, in)
		}
		slices.SortFunc(out, func(a, b portRange) int {
			return (int(a.proto)<<16 | int(a.port)) - (int(b.proto)<<16 | int(b.port))
		})
		return out
	}
}

// toInvalid leads INVALID TCP packets to the chain that drops those of endpoints.
// Without that an endpoint's packet far outside the window would pass untranslated
// and make the client reset its connection (kubernetes/kubernetes#74839). Others'
// INVALID packets, of asymmetric routes, are none of our business (#94861).
const toInvalid = `-p tcp -m comment --comment "untranslated packets of endpoints" -m conntrack --ctstate INVALID -j ` + chainInvalid

// invalid collects the endpoints whose INVALID packets are dropped: by address and
// port as long as they are few, else by prefixes and, if these are few, ports.
type invalid struct {
	exact map[netip.AddrPort]struct{} // nil once there are too many
	addrs cover
	ports map[uint16]struct{} // nil once there are too many
	last  netip.Prefix        // was added last, to skip repeats
}

// mostSports is how many ports one multiport match holds.
const mostSports = 15

func newInvalid() *invalid {
	return &invalid{
		exact: map[netip.AddrPort]struct{}{}, addrs: cover{most: mostCovered}, ports: map[uint16]struct{}{},
	}
}

func (v *invalid) collect(sp *plan.ServicePort) {
	if sp.ID.Protocol != plan.TCP {
		return
	}
	for _, pool := range sp.Pools {
		for i := range pool {
			v.add(pool[i].Addr)
		}
	}
}

func (v *invalid) add(ep netip.AddrPort) {
	if v.exact != nil {
		v.exact[ep] = struct{}{}
		if len(v.exact) > mostCovered {
			v.exact = nil
		}
	}
	if v.ports != nil {
		v.ports[ep.Port()] = struct{}{}
		if len(v.ports) > mostSports {
			v.ports = nil
		}
	}
	if v.last.IsValid() && v.last.Bits() == v.addrs.bits && v.last.Contains(ep.Addr()) {
		return
	}
	v.addrs.add(ep.Addr())
	v.last = prefixOf(ep.Addr(), v.addrs.bits)
}

func (r *renderer) filterInvalid(v *invalid) {
	r.begin(filterChain(chainInvalid))
	if v.exact != nil {
		eps := make([]netip.AddrPort, 0, len(v.exact))
		for ep := range v.exact {
			eps = append(eps, ep)
		}
		slices.SortFunc(eps, netip.AddrPort.Compare)
		for _, ep := range eps {
			r.add(fromAddr(ep.Addr()), "-p tcp -m tcp --sport "+strconv.Itoa(int(ep.Port())), drop)
		}
		return
	}
	match := "-p tcp"
	if v.ports != nil {
		var list []string
		for p := range v.ports {
			list = append(list, strconv.Itoa(int(p)))
		}
		slices.Sort(list)
		match += " -m multiport --sports " + strings.Join(list, ",")
	}
	for _, p := range v.addrs.prefixes() {
		r.add(from(p), match, drop)
	}
}
