// Package table describes the nftables table of ipvs mode: its sets and maps, the
// chains that are always there and those that frontends share, and the marks by which
// packets find their virtual server. Values only; nothing is written here.
package table

import (
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

const (
	// tableName is our table of each family.
	tableName = "svcproxy-ipvs"
	// Layout is the table's comment. It changes with everything that cannot be
	// repaired in place: the types of sets and maps, hooks and priorities.
	Layout = "svcproxy-ipvs, layout 1"

	// RoutePriority is that of the rule by which packets with our mark are the host's own.
	RoutePriority = 115
)

// Of names our table of a family.
func Of(f plan.Family) nft.Table { return nft.Table{Family: FamilyOf(f), Name: tableName} }

// FamilyOf is the family of tables.
func FamilyOf(f plan.Family) nft.Family {
	if f == plan.IPv6 {
		return nft.IPv6
	}
	return nft.IPv4
}

// ServerFamilyOf is the family of virtual servers.
func ServerFamilyOf(f plan.Family) ipvs.Family {
	if f == plan.IPv6 {
		return ipvs.IPv6
	}
	return ipvs.IPv4
}

// IsOurs reports whether a table was made by this mode.
func IsOurs(t nft.Table) bool { return t.Name == tableName }

// Chains that are always there.
const (
	chainSteer       = "steer-prerouting"
	chainKeepIn      = "nat-prerouting"
	chainKeepOut     = "nat-output"
	chainInput       = "filter-input"
	chainMark        = "mark-input"
	chainOutput      = "mark-output"
	chainUnservedIn  = "unserved-input"
	chainUnservedOut = "unserved-output"
	chainForward     = "filter-forward"
	chainNAT         = "nat-postrouting"
	chainUnmark      = "unmark-postrouting"
	ChainServices    = "to-services"
	chainReject      = "reject-it"
	// ChainOthers is where node ports lead that others serve at an address.
	ChainOthers = "of-others"
	// ChainRetired is where frontends lead that are gone, while old flows go on.
	ChainRetired = "retired"
	// chainGivenUp says that new flows are another mode's: see [GiveUp].
	chainGivenUp = "given-up"
)

// Prefixes of chains and sets that come and go.
const (
	prefixSources  = "sources/"
	PrefixAllow    = "allow/"
	prefixNodePort = "node-port/"
	prefixExternal = "external/"
)

// Remark is the comment of an element.
func Remark(id plan.ID) string { return nft.CutComment(id.String()) }

// Marks. Packets of some origins need another virtual server than the one at the
// frontend's address; a virtual server by mark catches them, and ip_vs compares the
// whole mark. Ours have a pattern in their upper bits and a number in the lower ones,
// and never the bit that asks for masquerading, which is left out wherever it lies.
const (
	markPattern = 0x2d8 << markBits
	markBits    = 20
	// SteerID is the number of the mark that makes packets the host's own.
	SteerID = 1<<markBits - 1
)

// MarkOf is the mark with a number, for the given bit of masquerading.
func MarkOf(id uint32, masqueradeBit int) uint32 {
	v := uint32(markPattern) | id
	low := v & (1<<masqueradeBit - 1)
	return (v^low)<<1 | low
}
