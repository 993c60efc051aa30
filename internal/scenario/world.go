package scenario

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// host is a name of the script: a network namespace of its own, or the address of
// one that another name stands for (a pod in the node's network).
type host struct {
	name  string
	role  role
	addrs []netip.Addr // of both families, if the world has IPv6
	// on is the host whose namespace this one shares; nil: it has its own.
	on *host
	// serves are the ports with a server that has this host's name.
	serves map[service]bool
}

type role uint8

const (
	thisNode  role = iota
	otherNode      // birch, cedar
	router
	pod
	remote
	client
)

// service is one listening port.
type service struct {
	proto lab.Proto
	port  uint16
}

// addr returns the first address of a family.
func (h *host) addr(v6 bool) (netip.Addr, error) {
	for _, a := range h.addrs {
		if a.Is6() == v6 {
			return a, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("host %s has no %s address", h.name, familyName(v6))
}

func familyName(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}

// world is the small network of a scenario, as data.
type world struct {
	families Families
	hosts    []*host // in the order of their declaration
	nodeName string
	zone     string
	podCIDRs []netip.Prefix
}

// The fixed part of the world. IPv6 addresses are the counterparts.
var (
	routerAddr   = netip.MustParseAddr("192.0.2.1")
	nodeAddr     = netip.MustParseAddr("192.0.2.11")
	probeAddr    = netip.MustParseAddr("10.61.1.250")
	nodePodCIDR  = netip.MustParsePrefix("10.61.1.0/24")
	clusterCIDR  = netip.MustParsePrefix("10.61.0.0/16")
	serviceRange = netip.MustParsePrefix("10.62.0.0/16")
	neighbours   = []neighbour{
		{"birch", netip.MustParseAddr("192.0.2.12"), netip.MustParsePrefix("10.61.2.0/24")},
		{"cedar", netip.MustParseAddr("192.0.2.13"), netip.MustParsePrefix("10.61.3.0/24")},
	}
)

// neighbour is another node: a host that only routes.
type neighbour struct {
	name string
	addr netip.Addr
	pods netip.Prefix
}

func newWorld(f Families) *world {
	w := &world{families: f, nodeName: "alder", zone: "z1", podCIDRs: mustBoth(nodePodCIDR)}
	w.hosts = []*host{
		{name: "node", role: thisNode, addrs: mustPair(nodeAddr)},
		{name: "router", role: router, addrs: mustPair(routerAddr)},
	}
	for _, n := range neighbours {
		w.hosts = append(w.hosts, &host{name: n.name, role: otherNode, addrs: mustPair(n.addr)})
	}
	w.hosts = append(w.hosts, &host{name: "probe", role: pod, addrs: mustPair(probeAddr)})
	for _, h := range w.hosts {
		h.serves = map[service]bool{}
	}
	return w
}

// mustPair returns an address of the world and its counterpart.
func mustPair(a netip.Addr) []netip.Addr {
	c, err := counterpart(a)
	if err != nil {
		panic(err) // the constants above have counterparts
	}
	return []netip.Addr{a, c}
}

func mustBoth(p netip.Prefix) []netip.Prefix {
	c, err := counterpartPrefix(p)
	if err != nil {
		panic(err) // as above
	}
	return []netip.Prefix{p, c}
}

// pair completes a list of addresses: a family that is not in it gets the
// counterpart of the first address.
func pair(addrs []netip.Addr) ([]netip.Addr, error) {
	if len(addrs) == 0 || slices.ContainsFunc(addrs, netip.Addr.Is6) {
		return addrs, nil
	}
	c, err := counterpart(addrs[0])
	return append(addrs, c), err
}

// host finds a host by name; "pod:web" and the node's own name are allowed.
func (w *world) host(name string) (*host, error) {
	for _, prefix := range []string{"pod:", "remote:", "client:"} {
		name = strings.TrimPrefix(name, prefix)
	}
	if name == w.nodeName {
		name = "node"
	}
	for _, h := range w.hosts {
		if h.name == name {
			return h, nil
		}
	}
	return nil, usagef("there is no host %q", name)
}

func (w *world) node() *host { return w.hosts[0] }

// declare adds the host that a line of the script describes: NAME IP[,IP...]
// [PROTO:PORT...].
func (w *world) declare(r role, args []string) (*host, error) {
	if len(args) < 2 {
		return nil, usagef("want NAME IP[,IP6] [PROTO:PORT...]")
	}
	h := &host{name: args[0], role: r, serves: map[service]bool{}}
	if other, _ := w.host(h.name); other != nil {
		return nil, usagef("there is a host %s already", h.name)
	}
	addrs, err := parseAddrs(args[1])
	if err != nil {
		return nil, err
	}
	if h.addrs, err = pair(addrs); err != nil {
		return nil, err
	}
	for _, a := range h.addrs {
		for _, o := range w.hosts {
			if o.on != nil || !slices.Contains(o.addrs, a) {
				continue
			}
			if o.role != thisNode && o.role != otherNode {
				return nil, usagef("host %s has the address %s already", o.name, a)
			}
			h.on = o
		}
	}
	for _, s := range args[2:] {
		svc, err := parseService(s)
		if err != nil {
			return nil, err
		}
		h.serves[svc] = true
	}
	w.hosts = append(w.hosts, h)
	return h, nil
}

func parseAddrs(list string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, s := range strings.Split(list, ",") {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, usagef("address %q: %v", s, err)
		}
		out = append(out, a)
	}
	return out, nil
}

// parseService reads "tcp:8080".
func parseService(s string) (service, error) {
	p, n, ok := strings.Cut(s, ":")
	if !ok {
		return service{}, usagef("server %q: want PROTO:PORT", s)
	}
	proto, err := lab.ParseProto(p)
	if err != nil {
		return service{}, usagef("server %q: %v", s, err)
	}
	port, err := strconv.ParseUint(n, 10, 16)
	if err != nil {
		return service{}, usagef("server %q: port: %v", s, err)
	}
	return service{proto, uint16(port)}, nil
}

// settings are what the command node says.
type settings struct {
	name, zone *string
	addrs      []netip.Addr
	podCIDRs   []netip.Prefix
}

func parseSettings(args []string) (settings, error) {
	var s settings
	for _, a := range args {
		k, v, _ := strings.Cut(a, "=")
		var err error
		switch k {
		case "name":
			s.name = &v
		case "zone":
			s.zone = &v
		case "addr":
			if s.addrs, err = parseAddrs(v); err == nil {
				s.addrs, err = pair(s.addrs)
			}
		case "podcidr":
			s.podCIDRs, err = parseRanges(v)
		default:
			err = usagef("setting %q: want name=, addr=, zone= or podcidr=", a)
		}
		if err != nil {
			return s, err
		}
	}
	return s, nil
}

// parseRanges reads ranges and adds the counterpart of a single IPv4 one.
func parseRanges(list string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range strings.Split(list, ",") {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, usagef("range %q: %v", s, err)
		}
		out = append(out, p)
	}
	if len(out) == 1 && out[0].Addr().Is4() {
		c, err := counterpartPrefix(out[0])
		return append(out, c), err
	}
	return out, nil
}

// target is where a flow goes, in one family.
type target struct {
	v6   bool
	addr netip.AddrPort
}

// targets returns what ADDR:PORT in a script stands for: one target, or, in a dual
// run, one for each family.
func (w *world) targets(s string) ([]target, error) {
	i := strings.LastIndex(s, ":")
	if i < 0 {
		return nil, usagef("destination %q: want ADDR:PORT", s)
	}
	name := s[:i]
	n, err := strconv.ParseUint(s[i+1:], 10, 16)
	if err != nil {
		return nil, usagef("destination %q: port: %v", s, err)
	}
	port := uint16(n)
	if a, err := netip.ParseAddr(strings.Trim(name, "[]")); err == nil {
		four := target{a.Is6(), netip.AddrPortFrom(a, port)}
		if a.Is6() || w.families != Dual {
			return []target{four}, nil
		}
		c, err := counterpart(a)
		return []target{four, {true, netip.AddrPortFrom(c, port)}}, err
	}
	var out []target
	for _, v6 := range w.nameFamilies(name) {
		a, err := w.named(name, v6)
		if err != nil {
			return nil, err
		}
		out = append(out, target{v6, netip.AddrPortFrom(a, port)})
	}
	return out, nil
}

func (w *world) nameFamilies(name string) []bool {
	switch {
	case name == "[v6]", w.families == Only6:
		return []bool{true}
	case w.families == Dual:
		return []bool{false, true}
	}
	return []bool{false}
}

func (w *world) named(name string, v6 bool) (netip.Addr, error) {
	switch name {
	case "lo":
		if v6 {
			return netip.IPv6Loopback(), nil
		}
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), nil
	case "[v6]":
		return w.node().addr(true)
	}
	h, err := w.host(name)
	if err != nil {
		return netip.Addr{}, err
	}
	return h.addr(v6)
}
