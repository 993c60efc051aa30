package table

import (
	"net/netip"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Marks never have the bit that asks for masquerading, wherever it lies, and differ
// for different numbers.
func TestMarks(t *testing.T) {
	for bit := range 32 {
		seen := map[uint32]uint32{}
		for _, id := range []uint32{0, 1, 2, 1 << 10, 0xabcde, SteerID - 1, SteerID} {
			m := MarkOf(id, bit)
			if m&(1<<bit) != 0 || m == 0 {
				t.Errorf("bit %d, number %d: mark %#x", bit, id, m)
			}
			if other, twice := seen[m]; twice {
				t.Errorf("bit %d: numbers %d and %d have mark %#x", bit, id, other, m)
			}
			seen[m] = id
		}
	}
	m := NewNumbers()
	a, b := plan.ID{Name: "a"}, plan.ID{Name: "b"}
	m.owner[numberOf(a)] = b // taken
	if n := m.Take(a); n == numberOf(a) || m.Take(a) != n {
		t.Errorf("number %d", n)
	}
	m.Release(a)
	if len(m.of) != 0 {
		t.Errorf("left: %v", m.of)
	}
}

// What an element is can be read back from the kernel.
func TestElements(t *testing.T) {
	for _, f := range plan.Families {
		addr := netip.MustParseAddr(map[plan.Family]string{plan.IPv4: "10.62.0.20", plan.IPv6: "2001:db8:62::20"}[f])
		for k := range Kinds {
			e := Element{Kind: k}
			switch k {
			case ServerMarks:
				e.Mark = 0xdeadbeef
			case HealthPorts:
				e.Port = 32100
			case NodePorts, PortMarks:
				e = OnPort(k, plan.UDP, 30001)
			case ClusterIPs, ExternalIPs, NodeAddrs, Endpoints:
				e = OnAddr(k, addr)
			default:
				e = At(k, plan.SCTP, netip.AddrPortFrom(addr, 80))
			}
			c := Content{}
			switch k {
			case Services, NodePorts:
				c = Content{Chain: "all.forward", Remark: "default/web:http"}
			case Marks, PortMarks:
				c.Mark = 0xcafe
			}
			in := e.Encode(f, c)
			if want := k.Set(f).KeyLen(); len(in.Key) != want {
				t.Errorf("%s, %s: key of %d bytes, want %d", f, k.Name(), len(in.Key), want)
			}
			if have, content, ok := Decode(f, k, in); !ok || have != e || content != c {
				t.Errorf("%s, %s: have %+v %+v %t, want %+v %+v", f, k.Name(), have, content, ok, e, c)
			}
		}
	}
}
