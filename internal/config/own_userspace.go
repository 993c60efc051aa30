package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// UserspaceOptions are the settings of userspace mode. The connect, ejection and UDP
// settings hold for node ports on loopback too, which are relayed in every mode. Zero
// leaves what else is a default to the mode.
type UserspaceOptions struct {
	// FirstPort and LastPort are the range of the listening ports; 0: the kernel
	// chooses.
	FirstPort, LastPort uint16
	// UDPTimeout is the time without a datagram after which a UDP flow ends.
	UDPTimeout time.Duration
	// ConnectTimeouts bounds each try to connect to an endpoint, and their number.
	ConnectTimeouts []time.Duration
	// EjectAfter is the number of connects that fail in a row after which an endpoint
	// is passed over, for EjectFor; 0: never.
	EjectAfter int
	EjectFor   time.Duration
	// DrainTimeout is how long open connections may go on when the process ends.
	DrainTimeout time.Duration
	// Listen4 and Listen6 are the four addresses on which connections are taken.
	Listen4, Listen6 netip.Prefix
	// RouteBit is the bit of marks that brings answers back to the process.
	RouteBit int
	// Interception is how connections come to the process; "": what the host can do.
	Interception string
}

// Ways in which connections come to userspace mode.
const (
	InterceptNFTables = "nftables" // by a map of nf_tables
	InterceptRoute    = "route"    // by routes alone
)

// OwnUserspace is about userspace mode.
type OwnUserspace struct {
	// UDPIdleTimeout is also taken from where kube-proxy had it, --udp-timeout and
	// the field udpIdleTimeout of KubeProxyConfiguration.
	UDPIdleTimeout  *metav1.Duration  `json:"udpIdleTimeout,omitempty"`
	ConnectTimeouts []metav1.Duration `json:"connectTimeouts,omitempty"`
	Ejection        *OwnEjection      `json:"ejection,omitempty"`
	DrainTimeout    *metav1.Duration  `json:"drainTimeout,omitempty"`
	ListenAddresses []string          `json:"listenAddresses,omitempty"`
	RouteMarkBit    *int32            `json:"routeMarkBit,omitempty"`
	Interception    string            `json:"interception,omitempty"`
}

// OwnEjection says when endpoints are passed over.
type OwnEjection struct {
	Failures int32           `json:"failures"`
	For      metav1.Duration `json:"for,omitempty"`
}

const (
	mostTries       = 16
	mostFailures    = 1000
	listenBits4     = 30 // of a prefix with four addresses
	listenBits6     = 126
	defaultRouteBit = 15
	// defaultUDPTimeout is longer than kube-proxy's 250 ms, which loses every answer
	// that takes longer; it is connection tracking's time for unanswered flows.
	defaultUDPTimeout = 30 * time.Second
	userspaceSection  = "userspace."
)

// userspace parses the settings of userspace mode.
func (r *resolver) userspace(mode string, o *OwnUserspace, portRange string, masqueradeBit int) UserspaceOptions {
	u := UserspaceOptions{Interception: o.Interception, RouteBit: defaultRouteBit}
	first, last, err := parsePortRange(portRange)
	switch {
	case mode != Userspace:
	case err != nil:
		r.invalid("portRange", portRange, err.Error())
	default:
		u.FirstPort, u.LastPort = first, last
	}
	if o.UDPIdleTimeout != nil {
		u.UDPTimeout = r.notNegative("udpIdleTimeout", *o.UDPIdleTimeout)
	}
	if u.UDPTimeout == 0 {
		u.UDPTimeout = defaultUDPTimeout
	}
	if len(o.ConnectTimeouts) > mostTries {
		r.invalid(userspaceSection+"connectTimeouts", fmt.Sprint(len(o.ConnectTimeouts)), fmt.Sprintf("are too many tries: give at most %d", mostTries))
	}
	for i, t := range o.ConnectTimeouts {
		u.ConnectTimeouts = append(u.ConnectTimeouts, r.positive(at(userspaceSection+"connectTimeouts", i), t))
	}
	if e := o.Ejection; e != nil {
		r.within(userspaceSection+"ejection.failures", e.Failures, 0, mostFailures)
		u.EjectAfter, u.EjectFor = int(e.Failures), r.notNegative(userspaceSection+"ejection.for", e.For)
	}
	if o.DrainTimeout != nil {
		u.DrainTimeout = r.positive(userspaceSection+"drainTimeout", *o.DrainTimeout)
	}
	r.listenAddresses(o.ListenAddresses, &u)
	if o.RouteMarkBit != nil {
		r.within(userspaceSection+"routeMarkBit", *o.RouteMarkBit, 1, 31)
		u.RouteBit = int(*o.RouteMarkBit)
	}
	if mode == Userspace && u.RouteBit == masqueradeBit {
		r.invalid(userspaceSection+"routeMarkBit", fmt.Sprint(u.RouteBit), "is the masquerade bit; choose another for one of them")
	}
	switch o.Interception {
	case "", InterceptNFTables, InterceptRoute:
	default:
		r.invalid(userspaceSection+"interception", o.Interception, "is not known; use "+InterceptNFTables+" or "+InterceptRoute+", or leave it out")
	}
	return u
}

func (r *resolver) listenAddresses(list []string, u *UserspaceOptions) {
	for i, s := range list {
		path := at(userspaceSection+"listenAddresses", i)
		p, err := netip.ParsePrefix(s)
		to, bits := &u.Listen4, listenBits4
		if err == nil && p.Addr().Is6() {
			to, bits = &u.Listen6, listenBits6
		}
		switch {
		case err != nil || p.Bits() != bits || p != p.Masked():
			r.invalid(path, s, fmt.Sprintf("is no block of four addresses; give one like 169.254.247.0/%d or fd00::/%d", listenBits4, listenBits6))
		case to.IsValid():
			r.invalid(path, s, "is the second of its family; keep one")
		case p.Addr().IsMulticast() || p.Addr().IsUnspecified() || p.Addr().IsLoopback() || p.Addr().Is6() && p.Addr().IsLinkLocalUnicast():
			r.invalid(path, s, "cannot be routed to the host itself; give unicast addresses that nobody uses, no loopback and no IPv6 link-local ones")
		default:
			*to = p
		}
	}
}

// parsePortRange reads what --proxy-port-range takes: "first-last", "first+more", one
// port, or nothing or 0 for no range.
func parsePortRange(s string) (first, last uint16, err error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return 0, 0, nil
	}
	number := func(t string) (uint64, bool) {
		n, err := strconv.ParseUint(strings.TrimSpace(t), 10, 16)
		return n, err == nil
	}
	begin, end, sum := s, s, false
	if a, b, ok := strings.Cut(s, "-"); ok {
		begin, end = a, b
	} else if a, b, ok := strings.Cut(s, "+"); ok {
		begin, end, sum = a, b, true
	}
	lo, ok1 := number(begin)
	hi, ok2 := number(end)
	if sum {
		hi += lo
	}
	if !ok1 || !ok2 || lo > hi || hi > 1<<16-1 || lo == 0 && hi != 0 {
		return 0, 0, errors.New("is no range of ports; give first-last, first+more or one port, from 1 to 65535, or 0-0 to let the kernel choose")
	}
	return uint16(lo), uint16(hi), nil
}

// userspaceWarnings names settings that have no effect without userspace mode.
func userspaceWarnings(modes []string, portRange string, o *OwnUserspace) []string {
	if slices.Contains(modes, Userspace) {
		return nil
	}
	var out []string
	if portRange != "" {
		out = append(out, "--proxy-port-range (field portRange) only has an effect in userspace mode; remove it")
	}
	if o.UDPIdleTimeout != nil {
		out = append(out, "--udp-timeout (field udpIdleTimeout) only has an effect in userspace mode and on loopback node ports; remove it if it is not for these")
	}
	return out
}
