// Package walk carries packets through tables in memory, expression by expression, as
// the kernel would: to find out what rules do to a packet without sending one. It
// knows the expressions that package nft writes.
package walk

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// Packet is the first packet of a flow, for [Tables.Send].
type Packet struct {
	Proto    uint8
	Src      netip.Addr
	Dst      netip.AddrPort
	In       string // the interface; "" if the host itself sends it
	SrcLocal bool   // Src is an address of the host
	Invalid  bool   // it belongs to no flow
}

// Fate is what becomes of a Packet.
type Fate struct {
	Dropped     bool
	Rejected    bool
	Dst         netip.AddrPort // translated, or as it was
	Masqueraded bool
	Mark        uint32 // when it leaves
}

// Tables are tables of one family and the clients that their rules remember.
type Tables struct {
	family nft.Family
	all    []*table
}

type table struct {
	*nft.Contents
	elements map[string]map[nft.Tuple]nft.Element // by set; those of intervals apart
}

// New returns the tables. Their contents must not change any more.
func New(f nft.Family, contents ...*nft.Contents) *Tables {
	t := &Tables{family: f}
	for _, c := range contents {
		in := &table{Contents: c, elements: map[string]map[nft.Tuple]nft.Element{}}
		for name := range c.Sets {
			byKey := map[nft.Tuple]nft.Element{}
			for _, e := range c.Elements[name] {
				byKey[e.Key] = e
			}
			in.elements[name] = byKey
		}
		t.all = append(t.all, in)
	}
	return t
}

// Forget forgets all clients.
func (t *Tables) Forget() {
	for _, in := range t.all {
		for name, s := range in.Sets {
			if s.Dynamic {
				clear(in.elements[name])
			}
		}
	}
}

// Send carries a packet through the base chains, in the order of hooks and
// priorities: a translation ends the chains of its kind, and clients are remembered.
// pick makes the random choices: a number below n.
func (t *Tables) Send(p Packet, pick func(n uint32) uint32) Fate {
	w := &walk{family: t.family, Packet: p, orig: p.Dst, pick: pick}
	hooks := []nft.HookNum{nft.Prerouting, nft.Forward, nft.Postrouting}
	if p.In == "" {
		hooks = []nft.HookNum{nft.Output, nft.Postrouting}
	}
	for _, h := range hooks {
		for _, b := range t.at(h) {
			if b.chain.Hook.Type == "nat" && (p.Invalid || w.nated) {
				continue
			}
			w.table = b.table
			v := w.chain(b.chain)
			w.fate.Dropped = v.Code == nft.Drop
			if w.fate.Dropped || w.fate.Rejected {
				return w.end()
			}
		}
		w.nated = false
	}
	return w.end()
}

func (w *walk) end() Fate {
	w.fate.Dst, w.fate.Mark = w.Dst, w.mark
	return w.fate
}

type hooked struct {
	table *table
	chain *nft.ChainContents
}

// at lists the base chains of a hook by priority.
func (t *Tables) at(h nft.HookNum) []hooked {
	var out []hooked
	for _, in := range t.all {
		for _, c := range in.Chains {
			if c.Hook != nil && c.Hook.Num == h {
				out = append(out, hooked{in, c})
			}
		}
	}
	slices.SortFunc(out, func(a, b hooked) int { return cmp.Compare(a.chain.Hook.Priority, b.chain.Hook.Priority) })
	return out
}

// walk is a packet on its way.
type walk struct {
	Packet
	family nft.Family
	table  *table
	orig   netip.AddrPort
	nated  bool // at this hook
	mark   uint32
	// flowMark is the mark of its flow.
	flowMark uint32
	regs     [64]byte
	pick     func(uint32) uint32
	fate     Fate
}

// chain carries out a chain. The verdict is nft.Accept or nft.Drop if one ends the walk, none
// at the chain's end.
func (w *walk) chain(c *nft.ChainContents) nft.Verdict {
	for _, r := range c.Rules {
		v := w.rule(r)
		switch v.Code {
		case nft.Goto:
			return w.chain(w.table.Chains[v.Chain])
		case nft.Jump:
			if v = w.chain(w.table.Chains[v.Chain]); v.Code != nft.NoVerdict {
				return v
			}
		case nft.Return:
			return nft.Verdict{}
		case nft.Accept, nft.Drop:
			return v
		}
	}
	return nft.Verdict{}
}

// reg is the bytes from a register on.
func (w *walk) reg(n uint64) []byte { return w.regs[(n-wire.FirstReg)*4:] }

// rule carries out a rule until an expression does not hold or gives a verdict.
func (w *walk) rule(r *nft.Rule) nft.Verdict {
	for _, e := range r.Exprs() {
		v, holds := w.step(e)
		if !holds || v.Code != nft.NoVerdict {
			return v
		}
	}
	return nft.Verdict{}
}

func (w *walk) step(e wire.Expr) (nft.Verdict, bool) {
	switch e.Name {
	case "ct":
		if sreg, ok := e.Find(unix.NFTA_CT_SREG); ok {
			w.flowMark = binary.NativeEndian.Uint32(w.reg(sreg.N))
			break
		}
		w.load(e.Num(unix.NFTA_CT_DREG), w.field(e))
	case "payload", "fib":
		w.load(e.Num(1), w.field(e))
	case "meta":
		if sreg, ok := e.Find(unix.NFTA_META_SREG); ok {
			w.mark = binary.NativeEndian.Uint32(w.reg(sreg.N))
			break
		}
		w.load(e.Num(unix.NFTA_META_DREG), w.field(e))
	case "numgen":
		n := w.pick(uint32(e.Num(unix.NFTA_NG_MODULUS))) + uint32(e.Num(unix.NFTA_NG_OFFSET))
		w.load(e.Num(unix.NFTA_NG_DREG), native(n))
	case "bitwise":
		n := binary.NativeEndian.Uint32(w.reg(e.Num(unix.NFTA_BITWISE_SREG)))
		n = n&word(e.Str(unix.NFTA_BITWISE_MASK)) ^ word(e.Str(unix.NFTA_BITWISE_XOR))
		w.load(e.Num(unix.NFTA_BITWISE_DREG), native(n))
	case "cmp":
		data := []byte(e.Str(unix.NFTA_CMP_DATA))
		same := bytes.Equal(w.reg(e.Num(unix.NFTA_CMP_SREG))[:len(data)], data)
		return nft.Verdict{}, same == (e.Num(unix.NFTA_CMP_OP) == unix.NFT_CMP_EQ)
	case "lookup":
		return w.lookup(e)
	case "nat":
		a, _ := netip.AddrFromSlice(w.reg(e.Num(unix.NFTA_NAT_REG_ADDR_MIN))[:addrLen(w.family)])
		port := w.Dst.Port()
		if to, ok := e.Find(unix.NFTA_NAT_REG_PROTO_MIN); ok {
			port = binary.BigEndian.Uint16(w.reg(to.N))
		}
		w.Dst = netip.AddrPortFrom(a, port)
		w.nated = true
		return nft.Verdict{Code: nft.Accept}, true
	case "masq":
		w.fate.Masqueraded, w.nated = true, true
		return nft.Verdict{Code: nft.Accept}, true
	case "reject":
		w.fate.Rejected = true
		return nft.Verdict{Code: nft.Drop}, true
	case "immediate":
		v, _ := e.Find(unix.NFTA_IMMEDIATE_DATA)
		return v.Verdict, true
	case "dynset":
		w.remember(e)
	}
	return nft.Verdict{}, true
}

func (w *walk) load(reg uint64, b []byte) {
	to := w.reg(reg)
	clear(to[:(len(b)+3)&^3])
	copy(to, b)
}

// field is what an expression reads of the packet.
func (w *walk) field(e wire.Expr) []byte {
	invalid := map[bool]uint32{true: nft.StateInvalid, false: nft.StateNew}
	switch name := nft.FieldName(w.family, e); name {
	case w.family.String() + " saddr":
		return w.Src.AsSlice()
	case w.family.String() + " daddr":
		return w.Dst.Addr().AsSlice()
	case "th dport":
		return binary.BigEndian.AppendUint16(nil, w.Dst.Port())
	case "meta l4proto":
		return []byte{w.Proto}
	case "iifname":
		return append([]byte(w.In), make([]byte, unix.IFNAMSIZ-len(w.In))...)
	case "meta mark":
		return native(w.mark)
	case "ct state":
		return native(invalid[w.Invalid])
	case "ct mark":
		return native(w.flowMark)
	case "ct direction":
		return []byte(nft.ToServer)
	case "ct status":
		if w.Dst != w.orig {
			return native(nft.StatusDNAT)
		}
		return native(0)
	case "ct original ip daddr", "ct original ip6 daddr":
		return w.orig.Addr().AsSlice()
	case "ct original proto-dst":
		return binary.BigEndian.AppendUint16(nil, w.orig.Port())
	case "fib saddr type":
		if w.SrcLocal {
			return native(unix.RTN_LOCAL)
		}
		return native(unix.RTN_UNICAST)
	default:
		panic("walk: a packet has no " + name)
	}
}

func (w *walk) lookup(e wire.Expr) (nft.Verdict, bool) {
	name := e.Str(unix.NFTA_LOOKUP_SET)
	s := w.table.Sets[name]
	key := nft.Tuple(w.reg(e.Num(unix.NFTA_LOOKUP_SREG))[:s.KeyLen()])
	found, ok := w.table.elements[name][key]
	if s.Interval {
		ok = covers(w.table.Elements[name], key)
	}
	dreg, isMap := e.Find(unix.NFTA_LOOKUP_DREG)
	switch {
	case !isMap:
		return nft.Verdict{}, ok != (e.Num(unix.NFTA_LOOKUP_FLAGS) == wire.LookupInverted)
	case !ok:
		return nft.Verdict{}, false
	case dreg.N == wire.VerdictReg:
		return found.Verdict, true
	}
	w.load(dreg.N, []byte(found.Data))
	return nft.Verdict{}, true
}

// covers reports whether a range of an interval set has the key: the last element
// that is not behind it begins one.
func covers(elements []nft.Element, key nft.Tuple) bool {
	var last *nft.Element
	for i := range elements {
		e := &elements[i]
		if e.Key <= key && (last == nil || e.Key > last.Key || e.Key == last.Key && !e.End) {
			last = e
		}
	}
	return last != nil && !last.End
}

// remember is the update of a dynamic map.
func (w *walk) remember(e wire.Expr) {
	name := e.Str(unix.NFTA_DYNSET_SET_NAME)
	s, elements := w.table.Sets[name], w.table.elements[name]
	key := nft.Tuple(w.reg(e.Num(unix.NFTA_DYNSET_SREG_KEY))[:s.KeyLen()])
	if _, ok := elements[key]; ok || s.Size > 0 && len(elements) >= int(s.Size) {
		return
	}
	elements[key] = nft.Element{Key: key, Data: nft.Tuple(w.reg(e.Num(unix.NFTA_DYNSET_SREG_DATA))[:s.DataLen()])}
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

func word(s string) uint32 { return binary.NativeEndian.Uint32([]byte(s)) }

func addrLen(f nft.Family) int { return nft.AddrType(f).Size() }
