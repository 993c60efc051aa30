package dataplane

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// A TCP flow keeps the translation of its first packet too, and rightly so as long
// as its endpoint may answer. Two kinds of flows are ended all the same: those to an
// endpoint that terminates or vanished, where the Service limits their time, and those
// that a failing endpoint has not answered yet. Their entries are removed from
// connection tracking. The client's next packet is translated anew: in the middle of
// a connection that draws a reset from another endpoint, at its beginning it opens
// the connection there.

// endings says which TCP flows are to end and when.
type endings map[ending]endingOf

// ending is the flows of one Service port to one endpoint.
type ending struct {
	id         plan.ID
	endpoint   netip.AddrPort
	unanswered bool // only those that the endpoint did not answer
}

type endingOf struct {
	at time.Time
	to map[netip.AddrPort]struct{} // original destinations, shared
	// instead is an endpoint that takes new flows, invalid: there is none.
	instead netip.AddrPort
}

// add takes up what u changed.
func (e endings) add(u *plan.Update, now time.Time) {
	changes := map[plan.ID]*plan.ServicePort{}
	for _, c := range u.Changed {
		if len(e) > 0 && c.ID.Protocol == plan.TCP {
			changes[c.ID] = c.New
		}
	}
	for k, of := range e {
		switch sp, changed := changes[k.id]; {
		case !changed:
		case !k.unanswered && (sp == nil || sp.Chosen().FlowsEndAfter(false) == 0 || sp.Keeps(k.endpoint)):
			delete(e, k) // the Service does not ask any more, or the endpoint is back
		default:
			of.instead = anyTaker(sp)
			e[k] = of
		}
	}
	for _, c := range u.Changed {
		departures, failed := c.Departures(), failed(c)
		if len(departures)+len(failed) == 0 {
			continue
		}
		of := endingOf{to: destinations(c.New, u.Plan.Node), instead: anyTaker(c.New)}
		maps.Copy(of.to, destinations(c.Old, u.Plan.Node))
		for _, d := range departures {
			of.at = now.Add(d.Within)
			e[ending{id: c.ID, endpoint: d.Endpoint}] = of
		}
		of.at = now
		for _, a := range failed {
			e[ending{id: c.ID, endpoint: a, unanswered: true}] = of
		}
	}
}

// anyTaker returns an endpoint of sp that takes new flows, invalid: there is none.
func anyTaker(sp *plan.ServicePort) netip.AddrPort {
	if sp == nil {
		return netip.AddrPort{}
	}
	for _, pool := range sp.Pools {
		for _, e := range pool {
			if e.Weight > 0 {
				return e.Addr
			}
		}
	}
	return netip.AddrPort{}
}

// failed returns the endpoints of a TCP port with a health check that take new flows
// no more.
func failed(c plan.Change) []netip.AddrPort {
	if c.Old == nil || c.New == nil || c.ID.Protocol != plan.TCP || c.New.Chosen().Check.Method == plan.NoCheck {
		return nil
	}
	var out []netip.AddrPort
	for pool, old := range c.Old.Pools {
		for _, o := range old {
			at, found := slices.BinarySearchFunc(c.New.Pools[pool], o.Addr, func(e plan.Endpoint, a netip.AddrPort) int { return e.Addr.Compare(a) })
			if o.Weight > 0 && (!found || c.New.Pools[pool][at].Weight == 0) && !slices.Contains(out, o.Addr) {
				out = append(out, o.Addr)
			}
		}
	}
	return out
}

// next returns when something is due; false: never.
func (e endings) next() (at time.Time, ok bool) {
	for _, of := range e {
		if !ok || of.at.Before(at) {
			at, ok = of.at, true
		}
	}
	return at, ok
}

// due returns what is due in one family.
func (e endings) due(f plan.Family, now time.Time) endings {
	out := endings{}
	for k, of := range e {
		if k.id.Family == f && !of.at.After(now) {
			out[k] = of
		}
	}
	return out
}

// done forgets what was carried out, unless it was put off meanwhile.
func (e endings) done(carried endings) {
	for k, of := range carried {
		if now, ok := e[k]; ok && now.at.Equal(of.at) {
			delete(e, k)
		}
	}
}

// endingFlow is a flow's original destination and where its replies come from.
type endingFlow struct{ to, from netip.AddrPort }

// rules returns the destinations to look at, sorted, which of their flows end, and an
// endpoint of each.
func (e endings) rules() (to []netip.AddrPort, ends func(to, from netip.AddrPort, answered bool) bool, instead func(to netip.AddrPort) netip.AddrPort) {
	all := map[endingFlow]bool{} // whether only unanswered ones
	takers := map[netip.AddrPort]netip.AddrPort{}
	for k, of := range e {
		for dst := range of.to {
			takers[dst] = of.instead
			f := endingFlow{dst, k.endpoint}
			if only, ok := all[f]; !ok || only {
				all[f] = k.unanswered
			}
			to = append(to, dst)
		}
	}
	slices.SortFunc(to, netip.AddrPort.Compare)
	ends = func(to, from netip.AddrPort, answered bool) bool {
		only, ok := all[endingFlow{to, from}]
		return ok && !(only && answered)
	}
	return slices.Compact(to), ends, func(to netip.AddrPort) netip.AddrPort { return takers[to] }
}
