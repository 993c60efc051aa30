package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// expr is one of the kernel's expressions, of which rules consist, in a form in
// which two that do the same are equal: attributes that only repeat a default are
// left out and registers are numbered in one way.
type expr struct {
	name  string
	attrs []attr
}

// attr is an attribute of an expr.
type attr struct {
	typ   uint16
	shape shape
	n     uint64 // of shapes with a number
	data  string // of shapes with bytes
	v     Verdict
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

func number(typ uint16, n uint32) attr   { return attr{typ: typ, shape: shapeNumber, n: uint64(n)} }
func octet(typ uint16, n uint8) attr     { return attr{typ: typ, shape: shapeOctet, n: uint64(n)} }
func long(typ uint16, n uint64) attr     { return attr{typ: typ, shape: shapeLong, n: n} }
func text(typ uint16, s string) attr     { return attr{typ: typ, shape: shapeText, data: s} }
func value(typ uint16, b []byte) attr    { return attr{typ: typ, shape: shapeValue, data: string(b)} }
func verdict(typ uint16, v Verdict) attr { return attr{typ: typ, shape: shapeVerdict, v: v} }
func (e expr) find(typ uint16) (attr, bool) {
	for _, a := range e.attrs {
		if a.typ == typ {
			return a, true
		}
	}
	return attr{}, false
}

func (e expr) num(typ uint16) uint64 { a, _ := e.find(typ); return a.n }
func (e expr) str(typ uint16) string { a, _ := e.find(typ); return a.data }

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
func (e expr) isDefault(a attr) bool {
	switch {
	case e.name == "lookup" && a.typ == unix.NFTA_LOOKUP_FLAGS,
		e.name == "dynset" && a.typ == unix.NFTA_DYNSET_FLAGS,
		e.name == "numgen" && a.typ == unix.NFTA_NG_OFFSET,
		e.name == "bitwise" && a.typ == bitwiseOp:
		return a.n == 0
	case e.name == "nat" && a.typ == unix.NFTA_NAT_REG_ADDR_MAX:
		return a.n == e.num(unix.NFTA_NAT_REG_ADDR_MIN)
	case e.name == "nat" && a.typ == unix.NFTA_NAT_REG_PROTO_MAX:
		return a.n == e.num(unix.NFTA_NAT_REG_PROTO_MIN)
	case e.name == "nat" && a.typ == unix.NFTA_NAT_FLAGS:
		const mapIPs, protoSpecified = 1, 2 // follow from the registers
		return a.n&^(mapIPs|protoSpecified) == 0
	}
	return false
}

// put appends an attribute to a message.
func (a attr) put(w *message) {
	switch a.shape {
	case shapeNumber:
		w.number(a.typ, uint32(a.n))
	case shapeOctet:
		w.bytes(a.typ, []byte{byte(a.n)})
	case shapeLong:
		w.bytes(a.typ, binary.BigEndian.AppendUint64(nil, a.n))
	case shapeText:
		w.text(a.typ, a.data)
	case shapeValue:
		w.nest(a.typ, func() { w.bytes(unix.NFTA_DATA_VALUE, []byte(a.data)) })
	case shapeVerdict:
		w.nest(a.typ, func() { w.verdict(a.v) })
	}
}

// putExprs appends a rule's expressions.
func putExprs(w *message, exprs []expr) {
	for _, e := range exprs {
		w.nest(unix.NFTA_LIST_ELEM, func() {
			w.text(unix.NFTA_EXPR_NAME, e.name)
			w.nest(unix.NFTA_EXPR_DATA, func() {
				for _, a := range e.attrs {
					a.put(w)
				}
			})
		})
	}
}

// parseExprs reads a rule's expressions; unknown ones keep their raw bytes, so that
// they differ from all others.
func parseExprs(b []byte) []expr {
	var out []expr
	eachAttr(b, func(_ uint16, elem []byte) {
		var e expr
		var data []byte
		eachAttr(elem, func(typ uint16, b []byte) {
			switch typ {
			case unix.NFTA_EXPR_NAME:
				e.name = cString(b)
			case unix.NFTA_EXPR_DATA:
				data = b
			}
		})
		known := shapes(e.name)
		eachAttr(data, func(typ uint16, b []byte) {
			sh, ok := known[typ]
			if !ok {
				sh = shapeValue
			}
			if a, ok := parseAttr(e.name, typ, sh, b); ok {
				e.attrs = append(e.attrs, a)
			}
		})
		kept := e.attrs[:0:0]
		for _, a := range e.attrs {
			if !e.isDefault(a) {
				kept = append(kept, a)
			}
		}
		e.attrs = kept
		out = append(out, e)
	})
	return out
}

func parseAttr(name string, typ uint16, sh shape, b []byte) (attr, bool) {
	a := attr{typ: typ, shape: sh}
	switch {
	case sh == shapeNumber && len(b) == 4:
		a.n = uint64(binary.BigEndian.Uint32(b))
		if isRegister(name, typ) {
			a.n = canonicalReg(a.n)
		}
	case sh == shapeOctet && len(b) >= 1:
		a.n = uint64(b[0])
	case sh == shapeLong && len(b) == 8:
		a.n = binary.BigEndian.Uint64(b)
	case sh == shapeText:
		a.data = cString(b)
	case sh == shapeValue:
		a.data = string(b)
		eachAttr(b, func(typ uint16, v []byte) {
			if typ == unix.NFTA_DATA_VALUE {
				a.data = string(v)
			}
		})
	case sh == shapeVerdict:
		eachAttr(b, func(typ uint16, v []byte) {
			if typ == unix.NFTA_DATA_VERDICT {
				a.v = parseVerdict(v)
			}
		})
	default:
		return attr{}, false
	}
	return a, true
}

// canonicalReg numbers registers by four bytes each: the kernel names those that
// begin one of sixteen bytes by that one.
func canonicalReg(n uint64) uint64 {
	if n >= unix.NFT_REG_1 && n <= unix.NFT_REG_4 {
		return firstReg + (n-unix.NFT_REG_1)*4
	}
	return n
}

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

func (a attr) String() string {
	switch a.shape {
	case shapeText:
		return fmt.Sprintf("%d=%s", a.typ, a.data)
	case shapeValue:
		return fmt.Sprintf("%d=0x%x", a.typ, a.data)
	case shapeVerdict:
		return fmt.Sprintf("%d=%s", a.typ, a.v)
	}
	return fmt.Sprintf("%d=%d", a.typ, a.n)
}
