// Package fronts finds out where a Service's external address and a node port coincide:
// on an address of the node, with the same number. The external address has it, as in the
// other modes, so that the node port needs no virtual server there.
package fronts

import (
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

// port is a number of a protocol.
type port struct {
	proto  plan.Protocol
	number uint16
}

// Fronts counts the frontends of one family that may coincide. The zero value has none.
type Fronts struct {
	addrs     []netip.Addr // that accept node ports
	known     map[plan.ID]*plan.ServicePort
	nodePorts map[port]int
	others    map[port]map[netip.Addr]int // frontends that are no node ports, on addrs
}

// Follow takes over an update, or begins anew with its whole plan. It returns the virtual
// servers that a node port would need and another frontend has.
func (f *Fronts) Follow(u plan.Update, family plan.Family, addrs []netip.Addr, anew bool) map[ipvs.Key]bool {
	if anew || !slices.Equal(addrs, f.addrs) {
		*f = Fronts{addrs: slices.Clone(addrs), known: map[plan.ID]*plan.ServicePort{}, nodePorts: map[port]int{}, others: map[port]map[netip.Addr]int{}}
		for id, sp := range u.Plan.Services {
			if id.Family == family {
				f.set(id, sp)
			}
		}
	}
	for _, c := range u.Changed {
		if c.ID.Family == family {
			f.set(c.ID, c.New)
		}
	}
	return f.coincide()
}

// set replaces what is known of a Service port.
func (f *Fronts) set(id plan.ID, sp *plan.ServicePort) {
	f.count(f.known[id], -1)
	f.count(sp, 1)
	if f.known[id] = sp; sp == nil {
		delete(f.known, id)
	}
}

func (f *Fronts) count(sp *plan.ServicePort, by int) {
	if sp == nil {
		return
	}
	for i := range sp.Frontends {
		fe := &sp.Frontends[i]
		k := port{sp.ID.Protocol, fe.Port}
		switch {
		case fe.Kind == plan.NodePort:
			if f.nodePorts[k] += by; f.nodePorts[k] == 0 {
				delete(f.nodePorts, k)
			}
		case slices.Contains(f.addrs, fe.Addr):
			at := f.others[k]
			if at == nil {
				at = map[netip.Addr]int{}
				f.others[k] = at
			}
			if at[fe.Addr] += by; at[fe.Addr] == 0 {
				delete(at, fe.Addr)
			}
			if len(at) == 0 {
				delete(f.others, k)
			}
		}
	}
}

func (f *Fronts) coincide() map[ipvs.Key]bool {
	out := map[ipvs.Key]bool{}
	for k, addrs := range f.others {
		if f.nodePorts[k] == 0 {
			continue
		}
		for a := range addrs {
			out[ipvs.ByAddr(ipvs.Protocol(k.proto), netip.AddrPortFrom(a, k.number))] = true
		}
	}
	return out
}
