package table

import (
	"hash/fnv"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// numberOf is where the search for a Service port's number begins: the same in every
// run, so that a restart finds its virtual servers in place.
func numberOf(id plan.ID) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id.String() + "/" + id.Protocol.String() + "/" + id.Family.String()))
	return h.Sum32() % SteerID
}

// Numbers gives numbers to Service ports.
type Numbers struct {
	of    map[plan.ID]uint32
	owner map[uint32]plan.ID
}

// NewNumbers returns one that has given none.
func NewNumbers() Numbers { return Numbers{of: map[plan.ID]uint32{}, owner: map[uint32]plan.ID{}} }

// Take returns the Service port's number.
func (m Numbers) Take(id plan.ID) uint32 {
	if n, ok := m.of[id]; ok {
		return n
	}
	n := numberOf(id)
	for {
		if _, taken := m.owner[n]; !taken {
			break
		}
		n = (n + 1) % SteerID
	}
	m.of[id], m.owner[n] = n, id
	return n
}

// Release takes the Service port's number back.
func (m Numbers) Release(id plan.ID) {
	if n, ok := m.of[id]; ok {
		delete(m.of, id)
		delete(m.owner, n)
	}
}
