package rule

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Sources is a set of TCP endpoints of one family as packets' sources: by address and
// port as long as they are few, else by prefixes and, if these are few, ports. What it
// matches depends on the set only.
type Sources struct {
	most  int
	exact map[netip.AddrPort]struct{} // nil once there are too many
	addrs Cover
	ports map[uint16]struct{} // nil once there are too many
	last  netip.Prefix        // was added last, to skip repeats
}

// mostSports is how many ports one multiport match holds.
const mostSports = 15

// NewSources returns an empty set that takes at most so many matches.
func NewSources(most int) *Sources {
	return &Sources{
		most: most, exact: map[netip.AddrPort]struct{}{}, addrs: Cover{Most: most}, ports: map[uint16]struct{}{},
	}
}

// Add adds an endpoint.
func (s *Sources) Add(ep netip.AddrPort) {
	if s.exact != nil {
		s.exact[ep] = struct{}{}
		if len(s.exact) > s.most {
			s.exact = nil
		}
	}
	if s.ports != nil {
		s.ports[ep.Port()] = struct{}{}
		if len(s.ports) > mostSports {
			s.ports = nil
		}
	}
	if s.last.IsValid() && s.last.Bits() == s.addrs.Bits() && s.last.Contains(ep.Addr()) {
		return
	}
	s.addrs.Add(ep.Addr())
	s.last = netip.PrefixFrom(ep.Addr(), s.addrs.Bits()).Masked()
}

// Matches returns the matches in order, each for a rule of its own.
func (s *Sources) Matches() []string {
	var out []string
	if s.exact != nil {
		eps := make([]netip.AddrPort, 0, len(s.exact))
		for ep := range s.exact {
			eps = append(eps, ep)
		}
		slices.SortFunc(eps, netip.AddrPort.Compare)
		for _, ep := range eps {
			out = append(out, FromAddr(ep.Addr())+" -p tcp -m tcp --sport "+strconv.Itoa(int(ep.Port())))
		}
		return out
	}
	match := " -p tcp"
	if s.ports != nil {
		var list []string
		for p := range s.ports {
			list = append(list, strconv.Itoa(int(p)))
		}
		slices.Sort(list)
		match += " -m multiport --sports " + strings.Join(list, ",")
	}
	for _, p := range s.addrs.Prefixes() {
		out = append(out, From(p)+match)
	}
	return out
}
