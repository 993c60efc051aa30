package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Expr is one of the kernel's expressions, of which rules consist, in a form in
// which two that do the same are equal: attributes that only repeat a default are
// left out and registers are numbered in one way.
type Expr struct {
	Name  string
	Attrs []Attr
}

// Attr is an attribute of an [Expr].
type Attr struct {
	Type    uint16
	shape   shape
	N       uint64 // of shapes with a number
	Data    string // of shapes with bytes
	Verdict Verdict
}

// shape is how an attribute is written.
type shape uint8

const (
	shapeNumber  shape = iota // four bytes in network order
	shapeOctet                // one byte
	shapeLong                 // eight bytes in network order
	shapeText                 // a string with a final zero byte
	shapeValue                // nested data
	shapeVerdict              // a nested verdict
)

// U32 is an attribute of four bytes in network order.
func U32(typ uint16, n uint32) Attr { return Attr{Type: typ, shape: shapeNumber, N: uint64(n)} }

// U8 is an attribute of one byte.
func U8(typ uint16, n uint8) Attr { return Attr{Type: typ, shape: shapeOctet, N: uint64(n)} }

// U64 is an attribute of eight bytes in network order.
func U64(typ uint16, n uint64) Attr { return Attr{Type: typ, shape: shapeLong, N: n} }

// Str is an attribute of text.
func Str(typ uint16, s string) Attr { return Attr{Type: typ, shape: shapeText, Data: s} }

// Value is an attribute of data in a register's form.
func Value(typ uint16, b []byte) Attr { return Attr{Type: typ, shape: shapeValue, Data: string(b)} }

// VerdictAttr is an attribute of a verdict.
func VerdictAttr(typ uint16, v Verdict) Attr { return Attr{Type: typ, shape: shapeVerdict, Verdict: v} }

// Find returns the attribute of a type.
func (e Expr) Find(typ uint16) (Attr, bool) {
	for _, a := range e.Attrs {
		if a.Type == typ {
			return a, true
		}
	}
	return Attr{}, false
}

// Num returns the number in an attribute, 0 if there is none.
func (e Expr) Num(typ uint16) uint64 { a, _ := e.Find(typ); return a.N }

// Str returns the bytes in an attribute, none if there is none.
func (e Expr) Str(typ uint16) string { a, _ := e.Find(typ); return a.Data }

// shapes says how the attributes of each expression look.
func shapes(name string) map[uint16]shape {
	switch name {
	case "payload":
		return numbers(unix.NFTA_PAYLOAD_DREG, unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN)
	case "meta":
		return numbers(unix.NFTA_META_DREG, unix.NFTA_META_KEY, unix.NFTA_META_SREG)
	case "ct":
		m := numbers(unix.NFTA_CT_DREG, unix.NFTA_CT_KEY, unix.NFTA_CT_SREG)
		m[unix.NFTA_CT_DIRECTION] = shapeOctet
		return m
	case "fib":
		return numbers(unix.NFTA_FIB_DREG, unix.NFTA_FIB_RESULT, unix.NFTA_FIB_FLAGS)
	case "numgen":
		return numbers(unix.NFTA_NG_DREG, unix.NFTA_NG_MODULUS, unix.NFTA_NG_TYPE, unix.NFTA_NG_OFFSET)
	case "bitwise":
		m := numbers(unix.NFTA_BITWISE_SREG, unix.NFTA_BITWISE_DREG, unix.NFTA_BITWISE_LEN, bitwiseOp)
		m[unix.NFTA_BITWISE_MASK], m[unix.NFTA_BITWISE_XOR] = shapeValue, shapeValue
		return m
	case "cmp":
		m := numbers(unix.NFTA_CMP_SREG, unix.NFTA_CMP_OP)
		m[unix.NFTA_CMP_DATA] = shapeValue
		return m
	case "lookup":
		m := numbers(unix.NFTA_LOOKUP_SREG, unix.NFTA_LOOKUP_DREG, unix.NFTA_LOOKUP_FLAGS)
		m[unix.NFTA_LOOKUP_SET] = shapeText
		return m
	case "nat":
		return numbers(unix.NFTA_NAT_TYPE, unix.NFTA_NAT_FAMILY, unix.NFTA_NAT_REG_ADDR_MIN, unix.NFTA_NAT_REG_ADDR_MAX,
			unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX, unix.NFTA_NAT_FLAGS)
	case "masq":
		return numbers(unix.NFTA_MASQ_FLAGS)
	case "immediate":
		m := numbers(unix.NFTA_IMMEDIATE_DREG)
		m[unix.NFTA_IMMEDIATE_DATA] = shapeVerdict
		return m
	case "reject":
		m := numbers(unix.NFTA_REJECT_TYPE)
		m[unix.NFTA_REJECT_ICMP_CODE] = shapeOctet
		return m
	case "dynset":
		m := numbers(unix.NFTA_DYNSET_OP, unix.NFTA_DYNSET_SREG_KEY, unix.NFTA_DYNSET_SREG_DATA, unix.NFTA_DYNSET_FLAGS)
		m[unix.NFTA_DYNSET_SET_NAME], m[unix.NFTA_DYNSET_TIMEOUT] = shapeText, shapeLong
		return m
	}
	return nil
}

func numbers(types ...uint16) map[uint16]shape {
	m := make(map[uint16]shape, len(types)+2)
	for _, t := range types {
		m[t] = shapeNumber
	}
	return m
}

// bitwiseOp is NFTA_BITWISE_OP, 0 for mask and xor.
const bitwiseOp = 6

const (
	// FirstReg is the first of the kernel's registers of four bytes each.
	FirstReg   = unix.NFT_REG32_00
	VerdictReg = unix.NFT_REG_VERDICT
	// LookupInverted is NFT_LOOKUP_F_INV.
	LookupInverted = 1
)

// isRegister reports whether an attribute holds a register's number.
func isRegister(name string, typ uint16) bool {
	switch name {
	case "payload", "fib", "numgen", "immediate":
		return typ == 1 // the destination
	case "meta":
		return typ == unix.NFTA_META_DREG || typ == unix.NFTA_META_SREG
	case "ct":
		return typ == unix.NFTA_CT_DREG || typ == unix.NFTA_CT_SREG
	case "bitwise":
		return typ == unix.NFTA_BITWISE_SREG || typ == unix.NFTA_BITWISE_DREG
	case "cmp":
		return typ == unix.NFTA_CMP_SREG
	case "lookup":
		return typ == unix.NFTA_LOOKUP_SREG || typ == unix.NFTA_LOOKUP_DREG
	case "nat":
		return typ >= unix.NFTA_NAT_REG_ADDR_MIN && typ <= unix.NFTA_NAT_REG_PROTO_MAX
	case "dynset":
		return typ == unix.NFTA_DYNSET_SREG_KEY || typ == unix.NFTA_DYNSET_SREG_DATA
	}
	return false
}

// isDefault reports whether an attribute says nothing: the kernel adds such ones.
func (e Expr) isDefault(a Attr) bool {
	switch {
	case e.Name == "lookup" && a.Type == unix.NFTA_LOOKUP_FLAGS,
		e.Name == "dynset" && a.Type == unix.NFTA_DYNSET_FLAGS,
		e.Name == "numgen" && a.Type == unix.NFTA_NG_OFFSET,
		e.Name == "bitwise" && a.Type == bitwiseOp:
		return a.N == 0
	case e.Name == "nat" && a.Type == unix.NFTA_NAT_REG_ADDR_MAX:
		return a.N == e.Num(unix.NFTA_NAT_REG_ADDR_MIN)
	case e.Name == "nat" && a.Type == unix.NFTA_NAT_REG_PROTO_MAX:
		return a.N == e.Num(unix.NFTA_NAT_REG_PROTO_MIN)
	case e.Name == "nat" && a.Type == unix.NFTA_NAT_FLAGS:
		const mapIPs, protoSpecified = 1, 2 // follow from the registers
		return a.N&^(mapIPs|protoSpecified) == 0
	}
	return false
}

// put appends an attribute to a message.
func (a Attr) put(w *Message) {
	switch a.shape {
	case shapeNumber:
		w.Number(a.Type, uint32(a.N))
	case shapeOctet:
		w.Bytes(a.Type, []byte{byte(a.N)})
	case shapeLong:
		w.Bytes(a.Type, binary.BigEndian.AppendUint64(nil, a.N))
	case shapeText:
		w.Text(a.Type, a.Data)
	case shapeValue:
		w.Nest(a.Type, func() { w.Bytes(unix.NFTA_DATA_VALUE, []byte(a.Data)) })
	case shapeVerdict:
		w.Nest(a.Type, func() { w.Verdict(a.Verdict) })
	}
}

// PutExprs appends a rule's expressions.
func PutExprs(w *Message, exprs []Expr) {
	for _, e := range exprs {
		w.Nest(unix.NFTA_LIST_ELEM, func() {
			w.Text(unix.NFTA_EXPR_NAME, e.Name)
			w.Nest(unix.NFTA_EXPR_DATA, func() {
				for _, a := range e.Attrs {
					a.put(w)
				}
			})
		})
	}
}

// ParseExprs reads a rule's expressions; unknown ones keep their raw bytes, so that
// they differ from all others.
func ParseExprs(b []byte) []Expr {
	var out []Expr
	EachAttr(b, func(_ uint16, elem []byte) {
		var e Expr
		var data []byte
		EachAttr(elem, func(typ uint16, b []byte) {
			switch typ {
			case unix.NFTA_EXPR_NAME:
				e.Name = CString(b)
			case unix.NFTA_EXPR_DATA:
				data = b
			}
		})
		known := shapes(e.Name)
		EachAttr(data, func(typ uint16, b []byte) {
			sh, ok := known[typ]
			if !ok {
				sh = shapeValue
			}
			if a, ok := parseAttr(e.Name, typ, sh, b); ok {
				e.Attrs = append(e.Attrs, a)
			}
		})
		kept := e.Attrs[:0:0]
		for _, a := range e.Attrs {
			if !e.isDefault(a) {
				kept = append(kept, a)
			}
		}
		e.Attrs = kept
		out = append(out, e)
	})
	return out
}

func parseAttr(name string, typ uint16, sh shape, b []byte) (Attr, bool) {
	a := Attr{Type: typ, shape: sh}
	switch {
	case sh == shapeNumber && len(b) == 4:
		a.N = uint64(binary.BigEndian.Uint32(b))
		if isRegister(name, typ) {
			a.N = canonicalReg(a.N)
		}
	case sh == shapeOctet && len(b) >= 1:
		a.N = uint64(b[0])
	case sh == shapeLong && len(b) == 8:
		a.N = binary.BigEndian.Uint64(b)
	case sh == shapeText:
		a.Data = CString(b)
	case sh == shapeValue:
		a.Data = string(b)
		EachAttr(b, func(typ uint16, v []byte) {
			if typ == unix.NFTA_DATA_VALUE {
				a.Data = string(v)
			}
		})
	case sh == shapeVerdict:
		EachAttr(b, func(typ uint16, v []byte) {
			if typ == unix.NFTA_DATA_VERDICT {
				a.Verdict = ParseVerdict(v)
			}
		})
	default:
		return Attr{}, false
	}
	return a, true
}

// canonicalReg numbers registers by four bytes each: the kernel names those that
// begin one of sixteen bytes by that one.
func canonicalReg(n uint64) uint64 {
	if n >= unix.NFT_REG_1 && n <= unix.NFT_REG_4 {
		return FirstReg + (n-unix.NFT_REG_1)*4
	}
	return n
}

func CString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

func (a Attr) String() string {
	switch a.shape {
	case shapeText:
		return fmt.Sprintf("%d=%s", a.Type, a.Data)
	case shapeValue:
		return fmt.Sprintf("%d=0x%x", a.Type, a.Data)
	case shapeVerdict:
		return fmt.Sprintf("%d=%s", a.Type, a.Verdict)
	}
	return fmt.Sprintf("%d=%d", a.Type, a.N)
}
