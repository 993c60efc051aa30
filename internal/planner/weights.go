package planner

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// weights are the shares that a Service's annotation gives to its endpoints, by
// group. nil: all have the same.
type weights map[weightKey]uint16

// weightKey is a group of endpoints.
type weightKey struct {
	group weightGroup
	name  string // of namedNode and namedZone
}

type weightGroup uint8

// The groups, the most specific first.
const (
	namedNode weightGroup = iota
	ownNode
	namedZone
	ownZone
	anywhere
)

// mostWeight is what a weight can be, with ip_vs as in a plan.
const mostWeight = 65535

// parseWeights reads a list like "node=10,zone=5,other=1,node/birch=3,zone/z2=0".
func parseWeights(value string) (weights, error) {
	w := weights{}
	for _, part := range strings.Split(value, ",") {
		group, number, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok {
			return nil, fmt.Errorf("%q is not of the form GROUP=WEIGHT", part)
		}
		key, err := parseWeightKey(group)
		if err != nil {
			return nil, err
		}
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("%s=%s: give a weight from 0 to %d", group, number, mostWeight)
		}
		if _, twice := w[key]; twice {
			return nil, fmt.Errorf("%s is there twice; keep one", group)
		}
		w[key] = uint16(n)
	}
	return w, nil
}

func parseWeightKey(s string) (weightKey, error) {
	switch s {
	case "node":
		return weightKey{group: ownNode}, nil
	case "zone":
		return weightKey{group: ownZone}, nil
	case "other":
		return weightKey{group: anywhere}, nil
	}
	switch kind, name, _ := strings.Cut(s, "/"); {
	case kind == "node" && name != "":
		return weightKey{namedNode, name}, nil
	case kind == "zone" && name != "":
		return weightKey{namedZone, name}, nil
	}
	return weightKey{}, fmt.Errorf("%q is no group of endpoints; use node, zone, other, node/NAME or zone/NAME", s)
}

// of returns the weight of an endpoint, that of the most specific of its groups
// which has one, else 1. here: it is on this node; zone is this node's, "": unknown.
func (w weights) of(ep *cluster.Endpoint, here bool, zone string) uint16 {
	if w == nil {
		return 1
	}
	its := topology(ep).Zone
	if its == "" && here {
		its = zone
	}
	for _, g := range [...]struct {
		member bool
		key    weightKey
	}{
		namedNode: {true, weightKey{namedNode, text(ep.Node)}},
		ownNode:   {here, weightKey{group: ownNode}},
		namedZone: {true, weightKey{namedZone, its}},
		ownZone:   {here || its != "" && its == zone, weightKey{group: ownZone}},
		anywhere:  {true, weightKey{group: anywhere}},
	} {
		if n, ok := w[g.key]; ok && g.member {
			return n
		}
	}
	return 1
}

// spare takes new flows from the endpoints that fail their health check, failing
// being sorted. When all fail that would take some, all are used: the fault may be
// the check's, and a chance is better than a refusal.
func spare(pool []plan.Endpoint, failing []netip.AddrPort) {
	fails := func(e plan.Endpoint) bool {
		_, ok := slices.BinarySearchFunc(failing, e.Addr, netip.AddrPort.Compare)
		return ok
	}
	healthy := slices.ContainsFunc(pool, func(e plan.Endpoint) bool { return e.Weight > 0 && !fails(e) })
	if len(failing) == 0 || !healthy {
		return
	}
	for i := range pool {
		if fails(pool[i]) {
			pool[i].Weight = 0
		}
	}
}

// remarkWeights says which endpoints of a port, whose pools are in buf, take no new
// flows though they are ready.
func (d *draft) remarkWeights(port *cluster.ServicePort) {
	takes := func(e plan.Endpoint) bool { return e.Weight > 0 }
	pools := [...][]plan.Endpoint{plan.Cluster: d.p.buf.cluster, plan.Local: d.p.buf.local}
	for _, pool := range [...]plan.Pool{plan.Cluster, plan.Local} {
		if len(pools[pool]) > 0 && !slices.ContainsFunc(pools[pool], takes) {
			d.notes.info(EndpointsDrained, "port %s (%s): all endpoints of the %s pool have the weight 0 by metadata.annotations[%q]: connections are refused", portText(port), d.family, pool, annotationWeights)
		}
	}
	c := d.s.choice.policy(protocolOf(port))
	if c == nil || c.Check.Method == plan.NoCheck {
		return
	}
	var failing []string
	healthy := 0
	for _, found := range d.p.buf.found {
		if !pooled(pools[plan.Cluster], found.addr) && !pooled(pools[plan.Local], found.addr) {
			continue
		}
		if _, fails := slices.BinarySearchFunc(d.failing, found.addr, netip.AddrPort.Compare); !fails {
			healthy++
		} else {
			failing = append(failing, found.addr.String())
		}
	}
	const most = 8 // are named
	if n := len(failing); n > most {
		failing = append(failing[:most], fmt.Sprintf("%d more", n-most))
	}
	switch names := strings.Join(failing, ", "); {
	case len(failing) == 0:
	case healthy == 0:
		d.notes.warn(EndpointsFailing, "port %s (%s): all endpoints fail their health check %s, as seen from node %q: they are used all the same; failing: %s", portText(port), d.family, c.Check, d.p.opt.NodeName, names)
	default:
		d.notes.info(EndpointsFailing, "port %s (%s): these endpoints fail their health check %s, as seen from node %q, and get no new flows while others do not: %s", portText(port), d.family, c.Check, d.p.opt.NodeName, names)
	}
}
