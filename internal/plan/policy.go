package plan

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Policy is what annotations on a Service choose beyond the Service API. The zero
// value leaves everything to the mode and its configuration. Comparable.
//
// Weights and the results of health checks are not here: the planner has put them
// into Endpoint.Weight.
type Policy struct {
	// Scheduler is how an endpoint is chosen, by ip_vs's name ("rr", "wlc", "mh") or
	// "random"; "": the mode's default. A mode without the scheduler uses its default.
	Scheduler string
	// SourcePort: a scheduler that hashes counts the source port in ("sh", "mh").
	SourcePort bool
	// Fallback: a scheduler that hashes chooses another endpoint when the first
	// takes no new flows ("sh", "mh").
	Fallback bool
	// DrainTimeout is how long TCP flows to an endpoint may go on from when it
	// terminates or is gone; 0: the mode's default.
	DrainTimeout time.Duration
	// VanishedTimeout is the time after which flows to an endpoint that is gone
	// without having been seen terminating are ended, so that clients connect anew;
	// 0: they are left alone.
	VanishedTimeout time.Duration
	// ClientAddress says whose address endpoints see where a mode has the choice.
	ClientAddress ClientAddress
	// ProxyProtocol is the version of the PROXY protocol that the endpoints expect
	// at the start of a TCP connection, 1 or 2; 0: none.
	ProxyProtocol uint8
	// Check says how this node probes the endpoints; the zero value: not at all.
	Check HealthCheck
}

// FlowsEndAfter returns how long TCP flows to an endpoint that takes no new ones may go
// on, from when it terminates, or else from when it is gone; 0: without limit. An
// endpoint that vanished has the shorter of both times.
func (p Policy) FlowsEndAfter(terminates bool) time.Duration {
	if terminates || p.VanishedTimeout == 0 || p.DrainTimeout != 0 && p.DrainTimeout < p.VanishedTimeout {
		return p.DrainTimeout
	}
	return p.VanishedTimeout
}

// String is what is chosen, each thing as a word, with a space between; "" for the
// zero Policy: "scheduler=mh source-port fallback drain-timeout=30s".
func (p Policy) String() string {
	var words []string
	add := func(on bool, format string, args ...any) {
		if on {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	add(p.Scheduler != "", "scheduler=%s", p.Scheduler)
	add(p.SourcePort, "source-port")
	add(p.Fallback, "fallback")
	add(p.DrainTimeout != 0, "drain-timeout=%s", p.DrainTimeout)
	add(p.VanishedTimeout != 0, "vanished-endpoint-timeout=%s", p.VanishedTimeout)
	add(p.ClientAddress != ClientAddressByRoute, "client-address=%s", p.ClientAddress)
	add(p.ProxyProtocol != 0, "proxy-protocol=v%d", p.ProxyProtocol)
	add(p.Check.Method != NoCheck, "health-check=%s", p.Check)
	return strings.Join(words, " ")
}

// ClientAddress is a wish about the source address that endpoints see.
type ClientAddress uint8

const (
	ClientAddressByRoute ClientAddress = iota // as Route.SNAT says
	ClientAddressKept                         // the client's, also where Route.SNAT would hide it
	ClientAddressHidden                       // one of the node's
)

func (c ClientAddress) String() string { return [...]string{"by-route", "keep", "hide"}[c] }

// HealthCheck says how endpoints are probed.
type HealthCheck struct {
	Method CheckMethod
	Path   string // of a CheckHTTP, with its query
	Code   uint16 // that a CheckHTTP expects; 0: any from 200 to 399
	// Port is probed in place of the endpoint's own; 0: the endpoint's.
	Port     uint16
	Interval time.Duration // from the start of a probe to the start of the next
	Timeout  time.Duration // of one probe
	Rise     uint8         // successes in a row after which a failing endpoint counts as healthy
	Fall     uint8         // failures in a row after which a healthy one counts as failing
}

// CheckMethod is the kind of a probe.
type CheckMethod uint8

const (
	NoCheck   CheckMethod = iota
	CheckTCP              // the endpoint accepts a connection
	CheckHTTP             // it answers a GET with the expected code
)

// Target returns where an endpoint at a is probed.
func (h HealthCheck) Target(a netip.AddrPort) netip.AddrPort {
	if h.Port == 0 {
		return a
	}
	return netip.AddrPortFrom(a.Addr(), h.Port)
}
