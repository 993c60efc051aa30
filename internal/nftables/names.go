package nftables

import (
	"fmt"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

const (
	// layout is the table's comment. It changes with everything that cannot be
	// repaired in place: the types of sets and maps, hooks and priorities.
	layout = "svcproxy, layout 1"
)

// Sets and maps that are always there.
const (
	setServices      = "services"            // address, protocol, port: what happens to packets
	setNodePorts     = "node-ports"          // protocol, port: the same
	setEndpoints     = "endpoints"           // address, protocol, port, slot: an endpoint
	setPortEndpoints = "node-port-endpoints" // protocol, port, slot: an endpoint
	setClusterIPs    = "cluster-ips"
	setExternal      = "external-addresses" // of Services, load balancers' among them
	setNodeAddrs     = "node-port-addresses"
	setServiceRanges = "service-ranges"
	setPodRanges     = "pod-ranges"
	setHairpin       = "hairpin"            // endpoints that may be their own clients
	setEndpointAddrs = "endpoint-addresses" // of TCP endpoints
	setSticky        = "sticky-"            // and a protocol: address, port: where clients are remembered
	setStickyPorts   = "sticky-node-ports-" // and a protocol: port: the same
)

// Chains that are always there, or whenever something needs them.
const (
	chainPrerouting  = "nat-prerouting"
	chainOutput      = "nat-output"
	chainPostrouting = "nat-postrouting"
	chainForward     = "filter-forward"
	chainInput       = "filter-input"
	chainRecordIn    = "record-prerouting"
	chainRecordOut   = "record-output"
	chainServices    = "to-services"
	chainReject      = "reject-it"
	chainRecord      = "record-clients"
)

// Prefixes of chains and sets that come and go; what follows is told by className,
// servicePath and nft.PrefixesName.
const (
	prefixSticky   = "sticky/"
	prefixRecord   = "record/"
	prefixAffinity = "affinity/"
	prefixSources  = "sources/"
	prefixAllow    = "allow/"
	prefixNodePort = "node-port/"
	prefixDraw     = "among-" // and a number of places
)

// protoName is the protocol's name in nft's language.
func protoName(p plan.Protocol) string { return strings.ToLower(p.String()) }

// servicePath names a Service port within one family: "default/web/http/tcp".
func servicePath(id plan.ID) string {
	return id.Namespace + "/" + id.Name + "/" + id.Port + "/" + protoName(id.Protocol)
}

// remark is the comment of an element.
func remark(id plan.ID) string { return nft.CutComment(id.String()) }

// affinityName is the map of the clients of one pool.
func affinityName(id plan.ID, p plan.Pool) string {
	return prefixAffinity + servicePath(id) + "/" + p.String()
}

// drawName names the chain that draws among places: "among-4", "local/among-4",
// "node-port/among-4".
func drawName(nodePort bool, p plan.Pool, places int) string {
	s := fmt.Sprint(prefixDraw, places)
	if p == plan.Local {
		s = p.String() + "/" + s
	}
	if nodePort {
		s = prefixNodePort + s
	}
	return s
}

// name names the chain for packets with given routes: what happens to packets
// of this node's pods, of the node, and of others, with the number of places for
// endpoints of the pool. "pod.cluster-4/other.cluster-4-masq" chooses among up to four
// endpoints and masquerades all but pods.
func (c *class) name() string {
	pod, node, outside := c.label(plan.FromPod), c.label(plan.FromNode), c.label(plan.FromOutside)
	s := ""
	if c.nodePort {
		s = prefixNodePort
	}
	switch {
	case pod == node && node == outside:
		return s + "all." + pod
	case node == outside:
		return s + "pod." + pod + "/other." + node
	case c.podsUnknown:
		return s + "node." + node + "/outside." + outside
	}
	return s + "pod." + pod + "/node." + node + "/outside." + outside
}

func (c *class) label(o plan.Origin) string {
	r := c.routes[o]
	if r.Verdict != plan.Forward {
		return r.Verdict.String()
	}
	s := fmt.Sprintf("%s-%d", r.Pool, c.places[r.Pool])
	if r.SNAT {
		s += "-masq"
	}
	return s
}
