package world

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// Host is a name of the script: a network namespace of its own, or the address of
// one that another name stands for (a pod in the node's network).
type Host struct {
	Name  string
	Role  Role
	Addrs []netip.Addr // of both families, if the world has IPv6
	// On is the host whose namespace this one shares; nil: it has its own.
	On *Host
	// Cut: its link is down.
	Cut bool
	// Serves are the ports with a server that has this host's name.
	Serves map[Server]bool
}

// Role is where a host is in the world.
type Role uint8

// The roles.
const (
	ThisNode  Role = iota // the node under test
	OtherNode             // birch, cedar
	Router                // 192.0.2.1, between the nodes and the outside
	Pod                   // on the node under test
	Remote                // a pod on another node
	Client                // an outside host
)

// Server is one listening port of a host.
type Server struct {
	Proto lab.Proto
	Port  uint16
}

// Addr returns the first address of a family.
func (h *Host) Addr(v6 bool) (netip.Addr, error) {
	for _, a := range h.Addrs {
		if a.Is6() == v6 {
			return a, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("host %s has no %s address", h.Name, familyName(v6))
}

// Space is the host whose namespace h has: itself, or the one that it is on.
func (h *Host) Space() *Host {
	if h.On != nil {
		return h.On
	}
	return h
}

func familyName(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}

// World is the small network of a scenario, as data.
type World struct {
	Families Families
	Hosts    []*Host // in the order of their declaration
	NodeName string
	Zone     string
	PodCIDRs []netip.Prefix
}

// The fixed part of the world. IPv6 addresses are the counterparts.
var (
	RouterAddr   = netip.MustParseAddr("192.0.2.1")
	nodeAddr     = netip.MustParseAddr("192.0.2.11")
	probeAddr    = netip.MustParseAddr("10.61.1.250")
	NodePodCIDR  = netip.MustParsePrefix("10.61.1.0/24")
	ClusterCIDR  = netip.MustParsePrefix("10.61.0.0/16")
	serviceRange = netip.MustParsePrefix("10.62.0.0/16")
	Neighbours   = []Neighbour{
		{"birch", netip.MustParseAddr("192.0.2.12"), netip.MustParsePrefix("10.61.2.0/24")},
		{"cedar", netip.MustParseAddr("192.0.2.13"), netip.MustParsePrefix("10.61.3.0/24")},
	}
)

// Neighbour is another node: a host that only routes.
type Neighbour struct {
	Name string
	Addr netip.Addr
	Pods netip.Prefix
}

// New returns the world before a script has added anything.
func New(f Families) *World {
	w := &World{Families: f, NodeName: "alder", Zone: "z1", PodCIDRs: BothRanges(NodePodCIDR)}
	w.Hosts = []*Host{
		{Name: "node", Role: ThisNode, Addrs: Both(nodeAddr)},
		{Name: "router", Role: Router, Addrs: Both(RouterAddr)},
	}
	for _, n := range Neighbours {
		w.Hosts = append(w.Hosts, &Host{Name: n.Name, Role: OtherNode, Addrs: Both(n.Addr)})
	}
	w.Hosts = append(w.Hosts, &Host{Name: "probe", Role: Pod, Addrs: Both(probeAddr)})
	for _, h := range w.Hosts {
		h.Serves = map[Server]bool{}
	}
	return w
}

// Both returns an IPv4 address and its counterpart.
func Both(a netip.Addr) []netip.Addr { return []netip.Addr{a, Counterpart(a)} }

// BothRanges returns an IPv4 range and those that stand for it: one for each range of
// the world.
func BothRanges(p netip.Prefix) []netip.Prefix {
	return append([]netip.Prefix{p}, counterparts(p)...)
}

// Severed reports whether h cannot be reached because its link, or that of the node
// which it is behind, is down.
func (w *World) Severed(h *Host) bool {
	h = h.Space()
	if h.Role != Remote {
		return h.Cut
	}
	at, _ := w.Host(BehindOf(h).Name)
	return h.Cut || at.Cut
}

// BehindOf returns the node that a remote host is behind: the one to whose range its
// address belongs, birch if it belongs to neither.
func BehindOf(h *Host) Neighbour {
	for _, n := range Neighbours {
		if slices.ContainsFunc(BothRanges(n.Pods), func(p netip.Prefix) bool { return p.Contains(h.Addrs[0]) }) {
			return n
		}
	}
	return Neighbours[0]
}

// Pair completes a list of IPv4 addresses by counterparts: in a dual run that of each,
// else that of the first. A list that has IPv6 addresses is complete.
func (f Families) Pair(addrs []netip.Addr) []netip.Addr {
	if slices.ContainsFunc(addrs, netip.Addr.Is6) {
		return addrs
	}
	for _, a := range addrs[:len(addrs):len(addrs)] {
		if addrs = append(addrs, Counterpart(a)); f != Dual {
			break
		}
	}
	return addrs
}

// Host finds a host by name; "pod:web" and the node's own name are allowed.
func (w *World) Host(name string) (*Host, error) {
	for _, prefix := range []string{"pod:", "remote:", "client:"} {
		name = strings.TrimPrefix(name, prefix)
	}
	if name == w.NodeName {
		name = "node"
	}
	for _, h := range w.Hosts {
		if h.Name == name {
			return h, nil
		}
	}
	return nil, Usagef("there is no host %q", name)
}

func (w *World) Node() *Host { return w.Hosts[0] }

// Declare adds the host that a line of the script describes: NAME IP[,IP...]
// [PROTO:PORT...].
func (w *World) Declare(r Role, args []string) (*Host, error) {
	if len(args) < 2 {
		return nil, Usagef("want NAME IP[,IP6] [PROTO:PORT...]")
	}
	h := &Host{Name: args[0], Role: r, Serves: map[Server]bool{}}
	if other, _ := w.Host(h.Name); other != nil {
		return nil, Usagef("there is a host %s already", h.Name)
	}
	addrs, err := ParseAddrs(args[1])
	if err != nil {
		return nil, err
	}
	h.Addrs = w.Families.Pair(addrs)
	for _, a := range h.Addrs {
		for _, o := range w.Hosts {
			if o.On != nil || !slices.Contains(o.Addrs, a) {
				continue
			}
			if o.Role != ThisNode && o.Role != OtherNode {
				return nil, Usagef("host %s has the address %s already", o.Name, a)
			}
			h.On = o
		}
	}
	for _, s := range args[2:] {
		svc, err := ParseServer(s)
		if err != nil {
			return nil, err
		}
		h.Serves[svc] = true
	}
	w.Hosts = append(w.Hosts, h)
	return h, nil
}

// ParseAddrs reads addresses joined by commas.
func ParseAddrs(list string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, s := range strings.Split(list, ",") {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, Usagef("address %q: %v", s, err)
		}
		out = append(out, a)
	}
	return out, nil
}

// ParseServer reads "tcp:8080".
func ParseServer(s string) (Server, error) {
	p, n, ok := strings.Cut(s, ":")
	if !ok {
		return Server{}, Usagef("server %q: want PROTO:PORT", s)
	}
	proto, err := lab.ParseProto(p)
	if err != nil {
		return Server{}, Usagef("server %q: %v", s, err)
	}
	port, err := strconv.ParseUint(n, 10, 16)
	if err == nil && port == 0 {
		err = errors.New("want 1 to 65535")
	}
	if err != nil {
		return Server{}, Usagef("server %q: port: %v", s, err)
	}
	return Server{proto, uint16(port)}, nil
}

// NodeSettings are what the command node says.
type NodeSettings struct {
	Name, Zone *string
	Addrs      []netip.Addr
	PodCIDRs   []netip.Prefix
}

// ParseNodeSettings reads [name=N] [addr=A,B,...] [zone=Z] [podcidr=P].
func (w *World) ParseNodeSettings(args []string) (NodeSettings, error) {
	var s NodeSettings
	for _, a := range args {
		k, v, ok := strings.Cut(a, "=")
		var err error
		if !ok {
			return s, Usagef("setting %q: want %s=VALUE", a, k)
		}
		switch k {
		case "name":
			s.Name = &v
		case "zone":
			s.Zone = &v
		case "addr":
			s.Addrs, err = ParseAddrs(v)
			s.Addrs = w.Families.Pair(s.Addrs)
		case "podcidr":
			s.PodCIDRs, err = parseRanges(v)
		default:
			err = Usagef("setting %q: want name=, addr=, zone= or podcidr=", a)
		}
		if err != nil {
			return s, err
		}
	}
	return s, nil
}

// parseRanges reads ranges and adds the counterparts of a single IPv4 one.
func parseRanges(list string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range strings.Split(list, ",") {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, Usagef("range %q: %v", s, err)
		}
		out = append(out, p)
	}
	if len(out) == 1 && out[0].Addr().Is4() {
		return BothRanges(out[0]), nil
	}
	return out, nil
}

// Target is where a flow goes, in one family.
type Target struct {
	V6   bool
	Addr netip.AddrPort
}

// Targets returns what ADDR:PORT in a script stands for: one target, or, in a dual
// run, one for each family.
func (w *World) Targets(s string) ([]Target, error) {
	i := strings.LastIndex(s, ":")
	if i < 0 {
		return nil, Usagef("destination %q: want ADDR:PORT", s)
	}
	name := s[:i]
	n, err := strconv.ParseUint(s[i+1:], 10, 16)
	if err != nil {
		return nil, Usagef("destination %q: port: %v", s, err)
	}
	port := uint16(n)
	if a, err := netip.ParseAddr(strings.Trim(name, "[]")); err == nil {
		four := Target{a.Is6(), netip.AddrPortFrom(a, port)}
		if a.Is6() || w.Families != Dual {
			return []Target{four}, nil
		}
		return []Target{four, {true, netip.AddrPortFrom(Counterpart(a), port)}}, nil
	}
	var out []Target
	for _, v6 := range w.nameFamilies(name) {
		a, err := w.named(name, v6)
		if err != nil {
			return nil, err
		}
		out = append(out, Target{v6, netip.AddrPortFrom(a, port)})
	}
	return out, nil
}

func (w *World) nameFamilies(name string) []bool {
	switch {
	case name == "[v6]", w.Families == Only6:
		return []bool{true}
	case w.Families == Dual:
		return []bool{false, true}
	}
	return []bool{false}
}

func (w *World) named(name string, v6 bool) (netip.Addr, error) {
	switch name {
	case "lo":
		if v6 {
			return netip.IPv6Loopback(), nil
		}
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), nil
	case "[v6]":
		return w.Node().Addr(true)
	}
	h, err := w.Host(name)
	if err != nil {
		return netip.Addr{}, err
	}
	return h.Addr(v6)
}
