package iptables

import (
	"iter"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// mostCovered bounds how many rules a scope takes that only has to be about right.
const mostCovered = 64

// toInvalid leads INVALID TCP packets to the chain that drops those of endpoints.
// Without that an endpoint's packet far outside the window would pass untranslated
// and make the client reset its connection (kubernetes/kubernetes#74839). Others'
// INVALID packets, of asymmetric routes, are none of our business (#94861).
const toInvalid = `-p tcp -m comment --comment "untranslated packets of endpoints" -m conntrack --ctstate INVALID -j ` + chainInvalid

// invalid collects the endpoints whose INVALID packets are dropped: by address and
// port as long as they are few, else by prefixes and, if these are few, ports.
type invalid struct {
	exact map[netip.AddrPort]struct{} // nil once there are too many
	addrs rule.Cover
	ports map[uint16]struct{} // nil once there are too many
	last  netip.Prefix        // was added last, to skip repeats
}

// mostSports is how many ports one multiport match holds.
const mostSports = 15

func newInvalid() *invalid {
	return &invalid{
		exact: map[netip.AddrPort]struct{}{}, addrs: rule.Cover{Most: mostCovered}, ports: map[uint16]struct{}{},
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
	for _, ep := range sp.Draining {
		v.add(ep)
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
	if v.last.IsValid() && v.last.Bits() == v.addrs.Bits() && v.last.Contains(ep.Addr()) {
		return
	}
	v.addrs.Add(ep.Addr())
	v.last = netip.PrefixFrom(ep.Addr(), v.addrs.Bits()).Masked()
}

func (r *renderer) filterInvalid(v *invalid) {
	r.Begin(rule.Filter(chainInvalid))
	if v.exact != nil {
		eps := make([]netip.AddrPort, 0, len(v.exact))
		for ep := range v.exact {
			eps = append(eps, ep)
		}
		slices.SortFunc(eps, netip.AddrPort.Compare)
		for _, ep := range eps {
			r.Add(rule.FromAddr(ep.Addr()), "-p tcp -m tcp --sport "+strconv.Itoa(int(ep.Port())), rule.Drop)
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
	for _, p := range v.addrs.Prefixes() {
		r.Add(rule.From(p), match, rule.Drop)
	}
}

// ends renders the chain that depends on all endpoints.
func (r *renderer) ends(services iter.Seq[*plan.ServicePort]) {
	if r.liberal {
		return
	}
	inv := newInvalid()
	for sp := range services {
		inv.collect(sp)
	}
	r.filterInvalid(inv)
}
