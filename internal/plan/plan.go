// Package plan holds the finished decision about every Service of a node: which
// address and port leads where, for whom, and with which source address. Values
// only; the planner builds them, a mode turns them into kernel objects, [Eval]
// says what they mean for one packet.
//
// Everything reachable from a *ServicePort is immutable once built, so modes may
// keep pointers to it and compare them.
package plan

import (
	"fmt"
	"net/netip"
	"time"
)

// Family is an IP family.
type Family uint8

const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Families lists both, in the order in which they are programmed.
var Families = [...]Family{IPv4, IPv6}

func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	}
	return fmt.Sprintf("Family(%d)", uint8(f))
}

// FamilyOf returns the family of a; an IPv4-mapped IPv6 address counts as IPv6,
// so addresses are unmapped where they enter.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Protocol is a transport protocol by its IANA number.
type Protocol uint8

const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String returns the name as the Kubernetes API spells it.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return fmt.Sprintf("Protocol(%d)", uint8(p))
}

// Name is a Service's namespace and name.
type Name struct{ Namespace, Name string }

func (n Name) String() string { return n.Namespace + "/" + n.Name }

// ID names one port of one Service in one family; it is the key everywhere.
type ID struct {
	Namespace, Name, Port string // Port is the port's name, "" for an unnamed one
	Protocol              Protocol
	Family                Family
}

// Service returns the name of the Service that the port belongs to.
func (id ID) Service() Name { return Name{id.Namespace, id.Name} }

// String is kube-proxy's ServicePortName: "ns/name:port", without the colon for
// an unnamed port. Protocol and family are not part of it.
func (id ID) String() string {
	if id.Port == "" {
		return id.Namespace + "/" + id.Name
	}
	return id.Namespace + "/" + id.Name + ":" + id.Port
}

// Kind says what a frontend's address is. It serves names and metrics; every
// decision is already in the routes.
type Kind uint8

const (
	ClusterIP Kind = iota
	ExternalIP
	LoadBalancerIP
	NodePort
)

func (k Kind) String() string {
	return [...]string{"ClusterIP", "ExternalIP", "LoadBalancerIP", "NodePort"}[k]
}

// Origin is where a packet enters the node from.
type Origin uint8

const (
	FromPod     Origin = iota // a pod of this node, as Node.Local recognises it
	FromNode                  // a process in the node's own network namespace
	FromOutside               // anything else
)

func (o Origin) String() string { return [...]string{"pod", "node", "outside"}[o] }

// Origins lists all, in the order of Frontend.Route.
var Origins = [...]Origin{FromPod, FromNode, FromOutside}

// Verdict is what happens to the first packet of a flow.
type Verdict uint8

const (
	Forward Verdict = iota // to an endpoint of the route's pool
	Reject                 // refused at once: ICMP port unreachable, or a reset
	Drop                   // silently
)

func (v Verdict) String() string { return [...]string{"forward", "reject", "drop"}[v] }

// Pool selects one of a ServicePort's endpoint lists.
type Pool uint8

const (
	Cluster Pool = iota // endpoints anywhere
	Local               // endpoints on this node
)

func (p Pool) String() string { return [...]string{"cluster", "local"}[p] }

// Route is the fate of packets of one origin to one frontend.
type Route struct {
	Verdict Verdict
	Pool    Pool // with Forward
	SNAT    bool // with Forward: the endpoint sees one of the node's addresses
}

// Frontend is one address and port on which a ServicePort answers.
type Frontend struct {
	Kind Kind
	Addr netip.Addr // invalid for NodePort: Node.NodePorts says which addresses
	Port uint16
	// Allow lists the sources that may use the frontend; others are dropped,
	// before the route is looked at. nil: everyone. The frontend's own address
	// is already listed when a range covers this node.
	Allow []netip.Prefix
	Route [3]Route // by Origin
}

// Endpoint is one destination of a pool.
type Endpoint struct {
	Addr   netip.AddrPort
	OnNode bool
	// Elsewhere: known to run on another node. Its packets can come by way of this
	// node all the same, and count as a pod's if Node.Local covers its address. An
	// endpoint of which nobody says where it runs is neither.
	Elsewhere bool
	// Weight is the endpoint's share relative to the pool's others; 0 takes no
	// new flows. The default is 1.
	Weight uint16
}

// ServicePort is one port of one Service in one family; a dual-stack port is two
// of these.
type ServicePort struct {
	ID        ID
	Frontends []Frontend // sorted by kind, address, port; at least one
	// Pools are the endpoints by Pool, sorted by address and port, without
	// duplicates; topology hints and the fall-back to terminating endpoints are
	// already applied. A pool that no route uses is empty.
	Pools [2][]Endpoint
	// Serving lists the endpoints whose existing flows stay valid, whatever the
	// pools say, sorted: for UDP, where stale flows are removed, those that serve; for
	// TCP with a Policy.VanishedTimeout or DrainTimeout all that the slices list and
	// that do not terminate, ready or not. Else it is empty.
	Serving []netip.AddrPort
	// Draining lists the terminating endpoints that no pool has, sorted: their existing
	// flows go on until they end. Only for TCP, where a mode may have to guard them.
	Draining []netip.AddrPort
	// Affinity is the time for which a client sticks to its endpoint, by
	// address, counted from its last new flow; 0: no affinity.
	Affinity time.Duration
	// Policy is what the Service's annotations choose; nil for most: the zero Policy.
	Policy *Policy
}

// Chosen returns the Policy, the zero value if there is none.
func (sp *ServicePort) Chosen() Policy {
	if sp.Policy == nil {
		return Policy{}
	}
	return *sp.Policy
}

// LocalKind is the way in which this node's pods are recognised.
type LocalKind uint8

const (
	LocalUnknown         LocalKind = iota // not at all: no packet is FromPod
	LocalPrefix                           // by source address
	LocalInterface                        // by the name of the incoming interface
	LocalInterfacePrefix                  // by the beginning of that name
)

// LocalTraffic says how to recognise packets of this node's pods in one family.
type LocalTraffic struct {
	Kind     LocalKind
	Prefixes []netip.Prefix // LocalPrefix
	Name     string         // LocalInterface, LocalInterfacePrefix
}

// NodePorts says which of the node's addresses of one family accept node ports.
type NodePorts struct {
	// All: every local address but loopback and Service addresses. Addrs then
	// lists those that the node has now.
	All bool
	// Addrs are sorted, without loopback and IPv6 link-local addresses. One that
	// is there for a Service is left out, unless it is the node's own too.
	Addrs []netip.Addr
	// Loopback: 127.0.0.1 or ::1 accepts them too. Only a forwarder in user
	// space can serve these.
	Loopback bool
}

// Node holds what is true for the whole node. It is replaced as a whole.
type Node struct {
	Name         string
	Addrs        []netip.Addr // of its interfaces, sorted, both families; not IPv6 link-local ones
	NodePorts    map[Family]NodePorts
	Local        map[Family]LocalTraffic
	ServiceCIDRs []netip.Prefix // addresses in them that no Service has are dropped
}

// HealthID names the health-check port of one Service in one family.
type HealthID struct {
	Service Name
	Family  Family
}

// HealthPort is what a Service's health-check node port answers.
type HealthPort struct {
	Port  uint16
	Local int // distinct addresses of ready endpoints on this node
}

// Plan is everything that a node has to do.
type Plan struct {
	Services map[ID]*ServicePort
	Node     *Node
	Health   map[HealthID]HealthPort
}
