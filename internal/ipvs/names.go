package ipvs

import (
	"crypto/sha256"
	"encoding/base32"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

const (
	// tableName is our table of each family.
	tableName = "svcproxy-ipvs"
	// layout is the table's comment. It changes with everything that cannot be
	// repaired in place: the types of sets and maps, hooks and priorities.
	layout = "svcproxy-ipvs, layout 1"

	// routePriority is that of the rule by which packets with our mark are the host's own.
	routePriority = 115
)

func tableOf(f plan.Family) nft.Table { return nft.Table{Family: nftFamily(f), Name: tableName} }

func nftFamily(f plan.Family) nft.Family {
	if f == plan.IPv6 {
		return nft.IPv6
	}
	return nft.IPv4
}

func ipvsFamily(f plan.Family) ipvs.Family {
	if f == plan.IPv6 {
		return ipvs.IPv6
	}
	return ipvs.IPv4
}

// ours reports whether a table was made by this mode.
func ours(t nft.Table) bool { return t.Name == tableName }

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
	chainServices    = "to-services"
	chainReject      = "reject-it"
	// chainRetired is where frontends lead that are gone, while old flows go on.
	chainRetired = "retired"
)

// Prefixes of chains and sets that come and go.
const (
	prefixSources  = "sources/"
	prefixAllow    = "allow/"
	prefixNodePort = "node-port/"
	prefixExternal = "external/"
)

// rangesName is the name of a set of source ranges, which follows from them.
func rangesName(ranges []netip.Prefix) string {
	sorted := make([]string, len(ranges))
	for i, r := range ranges {
		sorted[i] = r.Masked().String()
	}
	slices.Sort(sorted)
	sum := sha256.Sum256([]byte(strings.Join(slices.Compact(sorted), ",")))
	const length = 16
	return prefixSources + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:length])
}

// remark is the comment of an element, as far as it fits: it comes back as it is written.
func remark(id plan.ID) string {
	const longest = 127
	return id.String()[:min(len(id.String()), longest)]
}

// Marks. Packets of some origins need another virtual server than the one at the
// frontend's address; a virtual server by mark catches them, and ip_vs compares the
// whole mark. Ours have a pattern in their upper bits and a number in the lower ones,
// and never the bit that asks for masquerading, which is left out wherever it lies.
const (
	markPattern = 0x2d8 << markBits
	markBits    = 20
	// steerID is the number of the mark that makes packets the host's own.
	steerID = 1<<markBits - 1
)

// markOf is the mark with a number, for the given bit of masquerading.
func markOf(id uint32, masqueradeBit int) uint32 {
	v := uint32(markPattern) | id
	low := v & (1<<masqueradeBit - 1)
	return (v^low)<<1 | low
}

// markID is where the search for a Service port's number begins: the same in every
// run, so that a restart finds its virtual servers in place.
func markID(id plan.ID) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id.String() + "/" + id.Protocol.String() + "/" + id.Family.String()))
	return h.Sum32() % steerID
}

// marks gives numbers to Service ports.
type marks struct {
	of    map[plan.ID]uint32
	owner map[uint32]plan.ID
}

func newMarks() marks { return marks{of: map[plan.ID]uint32{}, owner: map[uint32]plan.ID{}} }

// take returns the Service port's number.
func (m marks) take(id plan.ID) uint32 {
	if n, ok := m.of[id]; ok {
		return n
	}
	n := markID(id)
	for {
		if _, taken := m.owner[n]; !taken {
			break
		}
		n = (n + 1) % steerID
	}
	m.of[id], m.owner[n] = n, id
	return n
}

func (m marks) release(id plan.ID) {
	if n, ok := m.of[id]; ok {
		delete(m.of, id)
		delete(m.owner, n)
	}
}
