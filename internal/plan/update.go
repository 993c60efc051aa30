package plan

import (
	"net/netip"
	"slices"
	"time"
)

// Change is the difference of one ServicePort. Old is nil for a new one, New for
// a removed one.
type Change struct {
	ID       ID
	Old, New *ServicePort
}

// Departure is an endpoint of a TCP port whose flows have only some time left.
type Departure struct {
	Endpoint netip.AddrPort
	Within   time.Duration
}

// Departures returns the endpoints whose flows c limits by New.Policy: those that begin
// to terminate, and those that are gone without having been seen terminating (see
// [Policy.FlowsEndAfter]). The limit ends if [ServicePort.Keeps] them again.
func (c Change) Departures() []Departure {
	if c.Old == nil || c.New == nil || c.ID.Protocol != TCP {
		return nil
	}
	policy := c.New.Chosen()
	drain, vanished := policy.FlowsEndAfter(true), policy.FlowsEndAfter(false)
	var out []Departure
	for _, a := range c.New.Draining {
		if drain != 0 && !has(c.Old.Draining, a) {
			out = append(out, Departure{a, drain})
		}
	}
	for _, a := range c.Old.Serving {
		if vanished != 0 && !c.New.Keeps(a) && !has(c.New.Draining, a) {
			out = append(out, Departure{a, vanished})
		}
	}
	return out
}

// Keeps reports whether flows to an endpoint may go on without limit, as far as is
// known: it is in a pool, or among Serving.
func (sp *ServicePort) Keeps(a netip.AddrPort) bool {
	for _, pool := range sp.Pools {
		if _, ok := slices.BinarySearchFunc(pool, a, func(e Endpoint, a netip.AddrPort) int { return e.Addr.Compare(a) }); ok {
			return true
		}
	}
	return has(sp.Serving, a)
}

// has reports whether a sorted list has a.
func has(list []netip.AddrPort, a netip.AddrPort) bool {
	_, ok := slices.BinarySearchFunc(list, a, netip.AddrPort.Compare)
	return ok
}

// Update is a plan and how it differs from the one before, so that the cost of a
// change does not grow with the cluster.
//
// Plan's maps belong to the planner and are valid until its next call; what a
// receiver keeps are the *ServicePort and *Node in them.
type Update struct {
	Plan    *Plan
	Changed []Change   // each ID once; Services that a new node needs first come first
	Node    bool       // Plan.Node differs
	Health  []HealthID // entries of Plan.Health that differ or are gone
	// Partial: Plan holds only what the node needs to come up (the API server's
	// Service and cluster DNS) and the rest follows at once. A backend that finds
	// state of an earlier run in force leaves everything as it is.
	Partial bool
	// Triggers are the times at which the objects behind the changes changed
	// (annotation endpoints.kubernetes.io/last-change-trigger-time).
	Triggers []time.Time
	// Notes are the remarks on the changed Services that are new.
	Notes []Note
}

// Empty reports whether there is nothing to do.
func (u *Update) Empty() bool {
	return len(u.Changed) == 0 && !u.Node && len(u.Health) == 0 && len(u.Notes) == 0
}

// Merge adds a later update to u, which was not carried out: an ID in both keeps
// the older Old and takes the later New, and one that is back where it was is
// dropped.
func (u *Update) Merge(later Update) {
	at := make(map[ID]int, len(u.Changed))
	for i, c := range u.Changed {
		at[c.ID] = i
	}
	for _, c := range later.Changed {
		if i, ok := at[c.ID]; ok {
			u.Changed[i].New = c.New
			continue
		}
		u.Changed = append(u.Changed, c)
	}
	u.Changed = slices.DeleteFunc(u.Changed, func(c Change) bool { return c.Old == c.New })
	u.Plan = later.Plan
	u.Partial = later.Partial
	u.Node = u.Node || later.Node
	for _, h := range later.Health {
		if !slices.Contains(u.Health, h) {
			u.Health = append(u.Health, h)
		}
	}
	u.Triggers = append(u.Triggers, later.Triggers...)
	u.Notes = append(u.Notes, later.Notes...)
}

// Reason says in one CamelCase word, as in a Kubernetes event, why an object or a
// part of it has no effect or less than its author may expect.
type Reason string

// Note is one remark on a Kubernetes object: what was ignored, why, and what to do.
type Note struct {
	Kind            string // Service, EndpointSlice, Node, ServiceCIDR
	Namespace, Name string
	UID             string
	Reason          Reason
	Message         string // names field and value, and the remedy
	Warning         bool   // worth a Warning event; else only shown when asked why
}
