package planner

import (
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Options are the settings that decide what a plan says. The zero value plans
// nothing, because Families is empty.
type Options struct {
	// NodeName is the own Node's name: endpoints with this nodeName are on this
	// node. Compared as it stands; kube-proxy lower-cases its own name first.
	NodeName string
	// NodeOptional: there may be no Node object, as when all facts come from
	// files. Without it [Planner.Ready] waits for the Node called NodeName.
	NodeOptional bool
	// NodeIP replaces the Node's address of its family (kube-proxy's bindAddress);
	// invalid or unspecified: the Node decides.
	NodeIP netip.Addr
	// Families are the families to plan for.
	Families []plan.Family
	// MasqueradeAll hides the client of all traffic to ClusterIPs, pods included.
	MasqueradeAll bool
	// Local says how packets of this node's pods are recognised.
	Local LocalDetector
	// NodePorts selects the node's addresses that accept node ports; the caller
	// has filled in the mode's default.
	NodePorts NodePortAddresses
	// LocalhostNodePorts allows node ports on 127.0.0.1 and ::1 where NodePorts
	// includes loopback; without it they are never served.
	LocalhostNodePorts bool
	// ServiceProxyName is the value that the label
	// service.kubernetes.io/service-proxy-name must have. "": plan the Services
	// without that label.
	ServiceProxyName string
	// AllowExternalIPs lets spec.externalIPs have effect (feature gate
	// AllowServiceExternalIPs, on by default in kube-proxy).
	AllowExternalIPs bool
	// Guard refuses some external and load-balancer addresses.
	Guard Guard
	// DefaultCheck is the health check of Services that choose none; the zero
	// value: their endpoints are not probed.
	DefaultCheck plan.HealthCheck
}

// DetectorKind is one of kube-proxy's detectLocalMode values.
type DetectorKind uint8

const (
	ClusterCIDR         DetectorKind = iota // source in the cluster's pod range
	NodeCIDR                                // source in the Node's spec.podCIDRs
	BridgeInterface                         // came in through one interface
	InterfaceNamePrefix                     // came in through interfaces with this prefix
)

func (k DetectorKind) String() string {
	return [...]string{"ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"}[k]
}

// LocalDetector says how packets of this node's pods are recognised. Without a
// CIDR of a family (ClusterCIDR, NodeCIDR) pods of that family are unknown.
type LocalDetector struct {
	Kind  DetectorKind
	CIDRs []netip.Prefix // ClusterCIDR
	Name  string         // BridgeInterface, InterfaceNamePrefix
}

// NodePortAddresses is kube-proxy's nodePortAddresses, keywords apart from CIDRs.
// The zero value selects all local addresses. As in kube-proxy, a family for which
// nothing is selected has all its addresses selected.
type NodePortAddresses struct {
	Primary   bool // the node's IP of each family
	Localhost bool // 127.0.0.0/8 and ::1
	All       bool // 0.0.0.0/0 and ::/0
	CIDRs     []netip.Prefix
}

func (a *NodePortAddresses) empty() bool {
	return !a.Primary && !a.Localhost && !a.All && len(a.CIDRs) == 0
}

// prefixes returns what is selected in family f. nodeIP may be invalid.
func (a *NodePortAddresses) prefixes(f plan.Family, nodeIP netip.Addr) []netip.Prefix {
	var out []netip.Prefix
	if a.All {
		out = append(out, everything(f))
	}
	if a.Localhost {
		out = append(out, loopbackRange(f))
	}
	if a.Primary && nodeIP.IsValid() {
		out = append(out, netip.PrefixFrom(nodeIP, nodeIP.BitLen()))
	}
	for _, c := range a.CIDRs {
		if plan.FamilyOf(c.Addr()) == f {
			out = append(out, c.Masked())
		}
	}
	return out
}

func everything(f plan.Family) netip.Prefix {
	if f == plan.IPv4 {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

func loopbackRange(f plan.Family) netip.Prefix {
	if f == plan.IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)
	}
	return netip.PrefixFrom(netip.IPv6Loopback(), 128)
}

func loopbackAddr(f plan.Family) netip.Addr {
	if f == plan.IPv4 {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// clone makes o independent of the caller's slices.
func (o Options) clone() Options {
	o.Families = slices.Clone(o.Families)
	o.Guard = o.Guard.clone()
	o.Local.CIDRs = slices.Clone(o.Local.CIDRs)
	o.NodePorts.CIDRs = slices.Clone(o.NodePorts.CIDRs)
	return o
}
