package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
)

// Type is the type of one field of a set's keys or data.
type Type uint8

const (
	TypeAddr   Type = iota // ipv4_addr
	TypeAddr6              // ipv6_addr
	TypeProto              // inet_proto
	TypePort               // inet_service
	TypeNumber             // mark: four bytes in the host's order
)

// typeSpec says how the kernel and the program nft know a Type.
type typeSpec struct {
	name string
	id   uint32 // nft's number
	size int    // bytes
}

func (t Type) spec() typeSpec {
	return [...]typeSpec{
		TypeAddr:   {"ipv4_addr", 7, 4},
		TypeAddr6:  {"ipv6_addr", 8, 16},
		TypeProto:  {"inet_proto", 12, 1},
		TypePort:   {"inet_service", 13, 2},
		TypeNumber: {"mark", 19, 4},
	}[t]
}

func (t Type) String() string { return t.spec().name }

// Size is the number of bytes of a value.
func (t Type) Size() int { return t.spec().size }

// register is the size of a field within a tuple of several: padded to the
// kernel's registers.
func (t Type) register() int { return (t.spec().size + 3) &^ 3 }

// AddrType is the type of addresses of the family.
func AddrType(f Family) Type {
	if f == IPv6 {
		return TypeAddr6
	}
	return TypeAddr
}

// TypeID is how nft numbers a concatenation: six bits for each type.
func TypeID(types []Type) uint32 {
	const bits = 6
	var id uint32
	for _, t := range types {
		id = id<<bits | t.spec().id
	}
	return id
}

// TypesOf is the reverse of [TypeID]; nil if it has types that are not used here.
func TypesOf(id uint32) []Type {
	const bits = 6
	var out []Type
	for ; id != 0; id >>= bits {
		known := false
		for t := TypeAddr; t <= TypeNumber; t++ {
			if t.spec().id == id&(1<<bits-1) {
				out, known = append([]Type{t}, out...), true
			}
		}
		if !known {
			return nil
		}
	}
	return out
}

// tupleLen is the length of values of the types.
func tupleLen(types []Type) int {
	if len(types) == 1 {
		return types[0].spec().size
	}
	n := 0
	for _, t := range types {
		n += t.register()
	}
	return n
}

func typesText(types []Type) string {
	s := make([]string, len(types))
	for i, t := range types {
		s[i] = t.String()
	}
	return strings.Join(s, " . ")
}

// Tuple is a key or data: the bytes of one or more fields in a row. Fields of a
// tuple that has several are padded; build those with [Concat].
type Tuple string

// Concat builds a Tuple of several fields in a buffer that can be used again.
type Concat []byte

// Addr appends an address.
func (c Concat) Addr(a netip.Addr) Concat {
	if a.Is4() {
		b := a.As4()
		return append(c, b[:]...)
	}
	b := a.As16()
	return append(c, b[:]...)
}

// Proto appends a transport protocol.
func (c Concat) Proto(p uint8) Concat { return append(c, p, 0, 0, 0) }

// Port appends a port.
func (c Concat) Port(p uint16) Concat { return append(c, byte(p>>8), byte(p), 0, 0) }

// Number appends a TypeNumber.
func (c Concat) Number(n uint32) Concat { return binary.NativeEndian.AppendUint32(c, n) }

// Tuple returns what was appended.
func (c Concat) Tuple() Tuple { return Tuple(c) }

// AddrTuple is the tuple of one address.
func AddrTuple(a netip.Addr) Tuple { return Concat(nil).Addr(a).Tuple() }

// PortTuple is the tuple of one port.
func PortTuple(p uint16) Tuple { return Tuple([]byte{byte(p >> 8), byte(p)}) }

// Addr returns the address with which a tuple begins, and the rest.
func (t Tuple) Addr(f Family) (netip.Addr, Tuple) {
	n := AddrType(f).spec().size
	if len(t) < n {
		return netip.Addr{}, ""
	}
	a, _ := netip.AddrFromSlice([]byte(t[:n]))
	return a, t[n:]
}

// Port returns the port with which a padded tuple begins, and the rest.
func (t Tuple) Port() (uint16, Tuple) {
	if len(t) < 4 {
		return 0, ""
	}
	return uint16(t[0])<<8 | uint16(t[1]), t[4:]
}

// text writes the tuple's fields.
func (t Tuple) text(types []Type) string {
	if len(t) != tupleLen(types) {
		return fmt.Sprintf("0x%x", string(t))
	}
	var out []string
	rest := []byte(t)
	for _, typ := range types {
		spec := typ.spec()
		out = append(out, fieldText(typ, rest[:spec.size]))
		rest = rest[min(typ.register(), len(rest)):]
	}
	return strings.Join(out, " . ")
}

func fieldText(t Type, b []byte) string {
	switch t {
	case TypeAddr, TypeAddr6:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case TypeProto:
		return protoText(b[0])
	case TypePort:
		return fmt.Sprint(binary.BigEndian.Uint16(b))
	case TypeNumber:
		return fmt.Sprintf("0x%08x", binary.NativeEndian.Uint32(b))
	}
	return fmt.Sprintf("0x%x", b)
}

func protoText(p byte) string {
	switch p {
	case 6:
		return "tcp"
	case 17:
		return "udp"
	case 132:
		return "sctp"
	}
	return fmt.Sprint(p)
}
