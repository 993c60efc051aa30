// Package route is the seam to the host's routing as far as user-space modes need
// it: prefixes that count as the host's own without being on an interface, and rules
// that look marked packets up in a table of their own. [Kernel] is the running
// kernel, [Fake] one in memory.
//
// Ours are the routes and rules with the protocol number [Protocol]; no others are
// listed or touched.
package route

import (
	"context"
	"fmt"
	"net/netip"
)

// Protocol is the number by which the routes and rules of svcproxy are recognised
// ("ip route show table all proto 115"). Nobody else is known to use it
// (iproute2's rt_protos).
const Protocol = 115

// LocalTable is the kernel's own table of local addresses, MainTable the one in which
// most routes are.
const (
	LocalTable = 255
	MainTable  = 254
)

// SteerTable is the table of ipvs mode: see [Entry.OfIPVS].
const SteerTable = 11500

// Entry is a route or a rule. It is comparable.
type Entry struct {
	// Local, if valid, makes the entry a route: packets to the prefix are the
	// host's own, and sockets may be bound to its addresses.
	Local netip.Prefix
	// Table is the routing table in which the route is, or to which the rule leads.
	Table uint32
	// Source, if valid, is of a route to one address in LocalTable: the host's own new
	// connections to the address begin at this one instead of the same. The route takes
	// the place of the kernel's, which does not come back with its deletion.
	Source netip.Addr

	// The rest is of a rule only.
	V6       bool
	Mark     uint32 // the bits of the mark that must be set; 0: any packet
	Priority uint32
	// In is the interface on which packets must come in, "" for any. For "lo" that is
	// every packet that the host itself sends, and every check of a source address.
	In string
	// Goto goes on at the rule of this priority, in place of a table.
	Goto uint32
	// Nop does nothing: a place to go on at.
	Nop bool
}

// OfIPVS reports whether the entry is one of ipvs mode, which settles its entries by
// itself: [Settle] leaves them alone.
func (e Entry) OfIPVS() bool {
	return e.Table == SteerTable || e.In == "lo" && e.Table == MainTable || e.Source.IsValid()
}

// IsRoute tells routes from rules.
func (e Entry) IsRoute() bool { return e.Local.IsValid() }

// Is6 reports whether the entry is of IPv6.
func (e Entry) Is6() bool {
	if e.IsRoute() {
		return e.Local.Addr().Is6()
	}
	return e.V6
}

// String is the entry as ip(8) takes it.
func (e Entry) String() string {
	ip := "ip"
	if e.Is6() {
		ip = "ip -6"
	}
	if e.IsRoute() {
		route := fmt.Sprintf("%s route local %s dev lo table %d proto %d", ip, e.Local, e.Table, Protocol)
		if e.Source.IsValid() {
			route += " src " + e.Source.String()
		}
		return route
	}
	rule := fmt.Sprintf("%s rule pref %d", ip, e.Priority)
	if e.Mark != 0 {
		rule += fmt.Sprintf(" fwmark %#x/%#x", e.Mark, e.Mark)
	}
	if e.In != "" {
		rule += " iif " + e.In
	}
	switch {
	case e.Nop:
		return rule + " nop"
	case e.Goto != 0:
		return rule + fmt.Sprintf(" goto %d", e.Goto)
	}
	return rule + fmt.Sprintf(" lookup %d", e.Table)
}

// Routing is the routing of a network namespace.
type Routing interface {
	// List returns our entries of both families, in no particular order.
	List(ctx context.Context) ([]Entry, error)
	// Add adds an entry; one that is there already is no error.
	Add(ctx context.Context, e Entry) error
	// Delete deletes an entry; one that is not there is no error.
	Delete(ctx context.Context, e Entry) error
	// From is the address that the host would send from to another; unset if there is
	// no way to it.
	From(to netip.Addr) (netip.Addr, error)
	// Watch calls gone for each of our entries that is deleted, by whomever, but for routes
	// with a source, until ctx ends, and returns why it ended. ready is closed once it
	// looks.
	Watch(ctx context.Context, ready chan<- struct{}, gone func(what string)) error
}

// Settle adds the entries of want that r lacks and deletes those that it has too
// much. It returns what it did.
func Settle(ctx context.Context, r Routing, want []Entry) (changes []string, err error) {
	have, err := r.List(ctx)
	if err != nil {
		return nil, err
	}
	missing := map[Entry]bool{}
	for _, e := range want {
		missing[e] = true
	}
	var surplus []Entry
	for _, e := range have {
		if !missing[e] && !e.OfIPVS() {
			surplus = append(surplus, e)
		}
		delete(missing, e)
	}
	for _, e := range want { // in the caller's order
		if !missing[e] {
			continue
		}
		if err := r.Add(ctx, e); err != nil {
			return changes, err
		}
		delete(missing, e)
		changes = append(changes, "add "+e.String())
	}
	for _, e := range surplus {
		if err := r.Delete(ctx, e); err != nil {
			return changes, err
		}
		changes = append(changes, "delete "+e.String())
	}
	return changes, nil
}
