package userspace

import (
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

const (
	// tableName is our table of each family.
	tableName = "svcproxy-userspace"
	// layout is the table's comment. It changes with everything that cannot be
	// repaired in place: the types of sets and maps, hooks and priorities.
	layout = "svcproxy userspace mode, layout 1"
	// handoverPath is where a process waits for its successor: a name in the abstract
	// namespace of Unix sockets, which is that of the network namespace.
	handoverPath = "@svcproxy-userspace"
)

// tableOf is our table of a family.
func tableOf(f plan.Family) nft.Table { return nft.Table{Family: familyOf(f), Name: tableName} }

func familyOf(f plan.Family) nft.Family {
	if f == plan.IPv6 {
		return nft.IPv6
	}
	return nft.IPv4
}

// ours reports whether a table was made by this mode.
func ours(t nft.Table) bool { return t.Name == tableName }

// Sets and maps that are always there. Keys end with the number of an origin where it
// makes a difference: see originNumber.
const (
	setListeners    = "listeners"           // address, protocol, port, origin: where the relay listens
	setPorts        = "node-port-listeners" // protocol, port, origin: the same
	setVerdicts     = "verdicts"            // address, protocol, port, origin: what is refused or dropped
	setPortVerdicts = "node-port-verdicts"  // protocol, port, origin: the same
	setGuards       = "guards"              // address, protocol, port: who may use it
	setPortGuards   = "node-port-guards"    // protocol, port: the same
	setClusterIPs   = "cluster-ips"         // whose undefined ports are refused
	setExternalIPs  = "external-ips"        // whose undefined ports are none of ours
	setNodeAddrs    = "node-port-addresses" // addresses of the node that accept node ports
	setRanges       = "service-ranges"      // addresses in them that no Service has are dropped
	setPodRanges    = "pod-ranges"          // pods of this node
	setOwn          = "listening-addresses" // of the relay
)

// Chains that are always there.
const (
	chainPrerouting = "nat-prerouting"
	chainOutput     = "nat-output"
	chainMarkIn     = "mark-prerouting"
	chainMarkOut    = "mark-output"
	chainUnmarkOut  = "unmark-output"
	chainUnmarkIn   = "unmark-input"
	chainReject     = "reject-it"
	prefixFrom      = "from-" // and an origin
)

// Prefixes of what comes and goes with source ranges; a sum of them follows.
const (
	prefixSources = "sources/"
	prefixAllow   = "allow/"
)

func chainFrom(o plan.Origin) string { return prefixFrom + o.String() }

// originNumber is an origin in a key; 0 is none.
func originNumber(o plan.Origin) uint32 { return uint32(o) + 1 }

// remark is the comment of an element.
func remark(id plan.ID) string { return nft.CutComment(id.String()) }
