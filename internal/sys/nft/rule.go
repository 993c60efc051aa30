package nft

import (
	"encoding/binary"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// Rule is a rule. The zero Rule does nothing.
type Rule struct {
	Comment string
	exprs   []wire.Expr
	text    string
}

// NewRule makes a rule of statements, which are carried out in order until one does
// not hold.
func NewRule(f Family, statements ...Statement) *Rule {
	c := &compiler{family: f}
	for _, s := range statements {
		c.reg = wire.FirstReg
		s.compile(c)
	}
	return ReadRule(f, c.out)
}

// IsProto holds for packets of a transport protocol.
func IsProto(p uint8) Is { return Is{Field: Proto, Value: Tuple([]byte{p})} }

// ReadRule makes a rule of the kernel's expressions, for those who list rules.
func ReadRule(f Family, exprs []wire.Expr) *Rule {
	return &Rule{exprs: exprs, text: ruleText(f, exprs)}
}

// Exprs are the kernel's expressions of the rule.
func (r *Rule) Exprs() []wire.Expr { return r.exprs }

// String is the rule in nft's language.
func (r *Rule) String() string {
	if r.Comment != "" {
		return fmt.Sprintf("%s comment %q", r.text, r.Comment)
	}
	return r.text
}

// Statement is a part of a rule: a match that must hold, or something to do.
type Statement interface{ compile(c *compiler) }

// Field is something of a packet or its flow that rules look at.
type Field uint8

const (
	SrcAddr     Field = iota // ip saddr
	DstAddr                  // ip daddr
	Proto                    // meta l4proto
	DstPort                  // th dport
	InInterface              // meta iifname
	Mark                     // meta mark
	State                    // ct state
	Status                   // ct status
	OrigDstAddr              // ct original ip daddr: the destination before translation
	OrigDstPort              // ct original proto-dst
	SrcType                  // fib saddr type
	FlowMark                 // ct mark
	Direction                // ct direction: one byte, ToServer or ToClient
)

// Values of State and Status, for [Has].
const (
	StateInvalid uint32 = 1
	StateNew     uint32 = 8
	StatusDNAT   uint32 = 1 << 5
)

// Values of Direction, for [Is].
const (
	ToServer Tuple = "\x00" // as the flow's first packet
	ToClient Tuple = "\x01"
)

type (
	// Is holds if a Field has a value, as a tuple of one field.
	Is struct {
		Field Field
		Value Tuple
	}
	// InterfaceIs holds if the packet came in through an interface of this name,
	// or of one that begins like it; or, with Not, if it did not.
	InterfaceIs struct {
		Name   string
		Prefix bool
		Not    bool
	}
	// SrcIsLocal holds if the source is one of the host's own addresses.
	SrcIsLocal struct{}
	// Has holds if any of the bits of State, Status, Mark or FlowMark is set.
	Has struct {
		Field Field
		Bits  uint32
	}
	// In holds if a set has the fields and, if it is not 0, a number behind them; or,
	// with Not, has not.
	In struct {
		Fields []Field
		Number uint32
		Set    string
		Not    bool
	}
	// Dispatch does what a verdict map says for the fields and, if it is not 0, a
	// number behind them; without an element the rule ends.
	Dispatch struct {
		Fields []Field
		Number uint32
		Map    string
	}
	// SetMark sets bits of the packet's mark; ClearMark clears them.
	SetMark   uint32
	ClearMark uint32
	// SetFlowMark sets bits of the mark that the packet's flow has in connection
	// tracking.
	SetFlowMark uint32
	// DNAT translates to the address and port that a map has for the fields and,
	// if Slots is not 0, a number chosen at random from First on. Without an
	// element the rule ends.
	DNAT struct {
		Fields []Field
		Slots  uint32
		First  uint32
		Map    string
	}
	// Masquerade translates the source to the outgoing interface's address and a
	// random port.
	Masquerade struct{}
	// Reject answers with ICMP port unreachable, or with a TCP reset.
	Reject struct{ Reset bool }
	// Do ends with a verdict.
	Do Verdict
	// Remember keeps data for a key in a dynamic map for a time from now; what the
	// map has already stays and lasts longer.
	Remember struct {
		Map     string
		Key     []Field
		Data    []Field
		Timeout time.Duration
	}
)

// compiler turns statements into the kernel's expressions.
type compiler struct {
	family Family
	out    []wire.Expr
	reg    uint32 // next free
}

func (c *compiler) emit(name string, attrs ...wire.Attr) {
	c.out = append(c.out, wire.Expr{Name: name, Attrs: attrs})
}

// load reads a field into the next registers.
func (c *compiler) load(f Field) {
	reg := c.reg
	addr := uint32(AddrType(c.family).spec().size)
	words := uint32(1)
	payload := func(base, offset, length uint32) {
		c.emit("payload", wire.U32(unix.NFTA_PAYLOAD_DREG, reg), wire.U32(unix.NFTA_PAYLOAD_BASE, base),
			wire.U32(unix.NFTA_PAYLOAD_OFFSET, offset), wire.U32(unix.NFTA_PAYLOAD_LEN, length))
	}
	meta := func(key uint32) {
		c.emit("meta", wire.U32(unix.NFTA_META_DREG, reg), wire.U32(unix.NFTA_META_KEY, key))
	}
	ct := func(key uint32, more ...wire.Attr) {
		c.emit("ct", append([]wire.Attr{wire.U32(unix.NFTA_CT_DREG, reg), wire.U32(unix.NFTA_CT_KEY, key)}, more...)...)
	}
	original := wire.U8(unix.NFTA_CT_DIRECTION, 0)
	switch f {
	case SrcAddr:
		payload(unix.NFT_PAYLOAD_NETWORK_HEADER, addressOffset(c.family), addr)
		words = addr / 4
	case DstAddr:
		payload(unix.NFT_PAYLOAD_NETWORK_HEADER, addressOffset(c.family)+addr, addr)
		words = addr / 4
	case Proto:
		meta(unix.NFT_META_L4PROTO)
	case DstPort:
		payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2)
	case InInterface:
		meta(unix.NFT_META_IIFNAME)
		words = unix.IFNAMSIZ / 4
	case Mark:
		meta(unix.NFT_META_MARK)
	case State:
		ct(unix.NFT_CT_STATE)
	case Status:
		ct(unix.NFT_CT_STATUS)
	case FlowMark:
		ct(unix.NFT_CT_MARK)
	case Direction:
		ct(unix.NFT_CT_DIRECTION)
	case OrigDstAddr:
		ct(origDstKey(c.family), original)
		words = addr / 4
	case OrigDstPort:
		ct(unix.NFT_CT_PROTO_DST, original)
	case SrcType:
		c.emit("fib", wire.U32(unix.NFTA_FIB_DREG, reg), wire.U32(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE),
			wire.U32(unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_F_SADDR))
	}
	c.reg += words
}

// addressOffset is where the source address stands in the IP header.
func addressOffset(f Family) uint32 {
	if f == IPv6 {
		return 8
	}
	return 12
}

// Keys of the original destination, which the library of system constants lacks:
// those of an address of a known family (linux/netfilter/nf_tables.h).
const (
	ctDstIP  = 20
	ctDstIP6 = 22
)

func origDstKey(f Family) uint32 {
	if f == IPv6 {
		return ctDstIP6
	}
	return ctDstIP
}

// loadAll reads fields in a row and returns the first one's register.
func (c *compiler) loadAll(fields []Field) uint32 {
	first := c.reg
	for _, f := range fields {
		c.load(f)
	}
	return first
}

func (c *compiler) compare(reg, op uint32, data []byte) {
	c.emit("cmp", wire.U32(unix.NFTA_CMP_SREG, reg), wire.U32(unix.NFTA_CMP_OP, op), wire.Value(unix.NFTA_CMP_DATA, data))
}

// mask does reg = reg & and ^ xor.
func (c *compiler) mask(reg, and, xor uint32) {
	c.emit("bitwise", wire.U32(unix.NFTA_BITWISE_SREG, reg), wire.U32(unix.NFTA_BITWISE_DREG, reg),
		wire.U32(unix.NFTA_BITWISE_LEN, 4), wire.Value(unix.NFTA_BITWISE_MASK, native(and)), wire.Value(unix.NFTA_BITWISE_XOR, native(xor)))
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

func (s Is) compile(c *compiler) {
	reg := c.reg
	c.load(s.Field)
	c.compare(reg, unix.NFT_CMP_EQ, []byte(s.Value))
}

func (s InterfaceIs) compile(c *compiler) {
	reg := c.reg
	c.load(InInterface)
	name := []byte(s.Name)
	if !s.Prefix {
		name = append(name, make([]byte, max(0, unix.IFNAMSIZ-len(name)))...)
	}
	op := uint32(unix.NFT_CMP_EQ)
	if s.Not {
		op = unix.NFT_CMP_NEQ
	}
	c.compare(reg, op, name)
}

func (SrcIsLocal) compile(c *compiler) {
	reg := c.reg
	c.load(SrcType)
	c.compare(reg, unix.NFT_CMP_EQ, native(unix.RTN_LOCAL))
}

func (s Has) compile(c *compiler) {
	reg := c.reg
	c.load(s.Field)
	c.mask(reg, s.Bits, 0)
	c.compare(reg, unix.NFT_CMP_NEQ, native(0))
}

func (s In) compile(c *compiler) {
	reg := c.loadAll(s.Fields)
	if s.Number > 0 { // as in Dispatch
		c.choose(1, s.Number)
	}
	attrs := []wire.Attr{wire.Str(unix.NFTA_LOOKUP_SET, s.Set), wire.U32(unix.NFTA_LOOKUP_SREG, reg)}
	if s.Not {
		attrs = append(attrs, wire.U32(unix.NFTA_LOOKUP_FLAGS, wire.LookupInverted))
	}
	c.emit("lookup", attrs...)
}

func (s Dispatch) compile(c *compiler) {
	reg := c.loadAll(s.Fields)
	if s.Number > 0 { // nft can print a choice out of one as part of a key, and no constant
		c.choose(1, s.Number)
	}
	c.emit("lookup", wire.Str(unix.NFTA_LOOKUP_SET, s.Map), wire.U32(unix.NFTA_LOOKUP_SREG, reg), wire.U32(unix.NFTA_LOOKUP_DREG, wire.VerdictReg))
}

func (s SetMark) compile(c *compiler)   { c.changeMark(^uint32(s), uint32(s)) }
func (s ClearMark) compile(c *compiler) { c.changeMark(^uint32(s), 0) }

func (c *compiler) changeMark(and, xor uint32) {
	reg := c.reg
	c.load(Mark)
	c.mask(reg, and, xor)
	c.emit("meta", wire.U32(unix.NFTA_META_KEY, unix.NFT_META_MARK), wire.U32(unix.NFTA_META_SREG, reg))
}

// choose puts one of n numbers, at random from first on, into the next register.
func (c *compiler) choose(n, first uint32) {
	attrs := []wire.Attr{wire.U32(unix.NFTA_NG_DREG, c.reg), wire.U32(unix.NFTA_NG_MODULUS, n), wire.U32(unix.NFTA_NG_TYPE, unix.NFT_NG_RANDOM)}
	if first > 0 {
		attrs = append(attrs, wire.U32(unix.NFTA_NG_OFFSET, first))
	}
	c.emit("numgen", attrs...)
}

func (s DNAT) compile(c *compiler) {
	reg := c.loadAll(s.Fields)
	if s.Slots > 0 {
		c.choose(s.Slots, s.First)
	}
	c.emit("lookup", wire.Str(unix.NFTA_LOOKUP_SET, s.Map), wire.U32(unix.NFTA_LOOKUP_SREG, reg), wire.U32(unix.NFTA_LOOKUP_DREG, wire.FirstReg))
	words := uint32(AddrType(c.family).spec().size / 4)
	c.emit("nat", wire.U32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT), wire.U32(unix.NFTA_NAT_FAMILY, uint32(c.family)),
		wire.U32(unix.NFTA_NAT_REG_ADDR_MIN, wire.FirstReg), wire.U32(unix.NFTA_NAT_REG_PROTO_MIN, wire.FirstReg+words))
}

func (s SetFlowMark) compile(c *compiler) {
	reg := c.reg
	c.load(FlowMark)
	c.mask(reg, ^uint32(s), uint32(s))
	c.emit("ct", wire.U32(unix.NFTA_CT_KEY, unix.NFT_CT_MARK), wire.U32(unix.NFTA_CT_SREG, reg))
}

// randomFully is NF_NAT_RANGE_PROTO_RANDOM_FULLY.
const randomFully = 1 << 4

func (Masquerade) compile(c *compiler) { c.emit("masq", wire.U32(unix.NFTA_MASQ_FLAGS, randomFully)) }

func (s Reject) compile(c *compiler) {
	if s.Reset {
		c.emit("reject", wire.U32(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_TCP_RST))
		return
	}
	c.emit("reject", wire.U32(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_ICMP_UNREACH), wire.U8(unix.NFTA_REJECT_ICMP_CODE, portUnreachable(c.family)))
}

// portUnreachable is the ICMP code for it.
func portUnreachable(f Family) uint8 {
	if f == IPv6 {
		return 4
	}
	return 3
}

func (s Do) compile(c *compiler) {
	c.emit("immediate", wire.U32(unix.NFTA_IMMEDIATE_DREG, wire.VerdictReg), wire.VerdictAttr(unix.NFTA_IMMEDIATE_DATA, Verdict(s)))
}

func (s Remember) compile(c *compiler) {
	key := c.loadAll(s.Key)
	data := c.loadAll(s.Data)
	c.emit("dynset", wire.Str(unix.NFTA_DYNSET_SET_NAME, s.Map), wire.U32(unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_UPDATE),
		wire.U32(unix.NFTA_DYNSET_SREG_KEY, key), wire.U32(unix.NFTA_DYNSET_SREG_DATA, data),
		wire.U64(unix.NFTA_DYNSET_TIMEOUT, uint64(s.Timeout.Milliseconds())))
}
