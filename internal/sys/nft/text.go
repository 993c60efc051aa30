package nft

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// reader turns expressions back into nft's language. Whoever reads the kernel's
// rules or the fake's gets the same text for the same rule.
type reader struct {
	family Family
	loaded []loaded
	out    []string
}

// loaded is what registers hold.
type loaded struct {
	reg  uint64
	text string
}

func ruleText(f Family, exprs []wire.Expr) string {
	r := &reader{family: f}
	for _, e := range exprs {
		r.read(e)
	}
	return strings.Join(r.out, " ")
}

// keep notes what a register holds from now on.
func (r *reader) keep(reg uint64, text string) {
	r.loaded = slices.DeleteFunc(r.loaded, func(l loaded) bool { return l.reg >= reg })
	r.loaded = append(r.loaded, loaded{reg, text})
}

// fields are the contents of the registers from one on, up to another.
func (r *reader) fields(from, to uint64) string {
	var s []string
	for _, l := range r.loaded {
		if l.reg >= from && l.reg < to {
			s = append(s, l.text)
		}
	}
	return strings.Join(s, " . ")
}

const noReg = 1 << 10 // behind all registers

func (r *reader) say(format string, args ...any) { r.out = append(r.out, fmt.Sprintf(format, args...)) }

func (r *reader) read(e wire.Expr) {
	switch e.Name {
	case "payload":
		r.keep(e.Num(unix.NFTA_PAYLOAD_DREG), r.payload(e))
	case "meta":
		key := metaName(e.Num(unix.NFTA_META_KEY))
		if _, ok := e.Find(unix.NFTA_META_SREG); ok {
			r.say("%s set %s", key, r.fields(e.Num(unix.NFTA_META_SREG), noReg))
			return
		}
		r.keep(e.Num(unix.NFTA_META_DREG), key)
	case "ct":
		if sreg, ok := e.Find(unix.NFTA_CT_SREG); ok {
			r.say("%s set %s", ctName(e), r.fields(sreg.N, noReg))
			return
		}
		r.keep(e.Num(unix.NFTA_CT_DREG), ctName(e))
	case "fib":
		r.keep(e.Num(unix.NFTA_FIB_DREG), fibName(e))
	case "numgen":
		s := fmt.Sprintf("numgen random mod %d", e.Num(unix.NFTA_NG_MODULUS))
		if first := e.Num(unix.NFTA_NG_OFFSET); first != 0 {
			s += fmt.Sprintf(" offset %d", first)
		}
		r.keep(e.Num(unix.NFTA_NG_DREG), s)
	case "bitwise":
		reg := e.Num(unix.NFTA_BITWISE_SREG)
		s := fmt.Sprintf("%s & 0x%08x", r.fields(reg, noReg), word(e.Str(unix.NFTA_BITWISE_MASK)))
		if xor := word(e.Str(unix.NFTA_BITWISE_XOR)); xor != 0 {
			s += fmt.Sprintf(" ^ 0x%08x", xor)
		}
		r.keep(e.Num(unix.NFTA_BITWISE_DREG), s)
	case "cmp":
		r.compare(e)
	case "lookup":
		r.lookup(e)
	case "nat":
		family := Family(e.Num(unix.NFTA_NAT_FAMILY))
		what := " addr . port"
		if _, ok := e.Find(unix.NFTA_NAT_REG_PROTO_MIN); !ok {
			what = ""
		}
		r.say("dnat %s%s to %s", family, what, r.fields(e.Num(unix.NFTA_NAT_REG_ADDR_MIN), noReg))
	case "masq":
		r.say("masquerade flags %d", e.Num(unix.NFTA_MASQ_FLAGS))
	case "reject":
		if e.Num(unix.NFTA_REJECT_TYPE) == unix.NFT_REJECT_TCP_RST {
			r.say("reject with tcp reset")
			return
		}
		r.say("reject with icmp type %d", e.Num(unix.NFTA_REJECT_ICMP_CODE))
	case "immediate":
		v, _ := e.Find(unix.NFTA_IMMEDIATE_DATA)
		r.say("%s", v.Verdict)
	case "dynset":
		data := e.Num(unix.NFTA_DYNSET_SREG_DATA)
		r.say("update @%s { %s timeout %s : %s }", e.Str(unix.NFTA_DYNSET_SET_NAME), r.fields(e.Num(unix.NFTA_DYNSET_SREG_KEY), data),
			time.Duration(e.Num(unix.NFTA_DYNSET_TIMEOUT))*time.Millisecond, r.fields(data, noReg))
	default:
		r.say("[%s %v]", e.Name, e.Attrs)
	}
}

// FieldName says in nft's language what an expression reads of a packet; "" if nothing.
func FieldName(f Family, e wire.Expr) string {
	r := &reader{family: f}
	r.read(e)
	if len(r.loaded) == 0 {
		return ""
	}
	return r.loaded[0].text
}

func (r *reader) payload(e wire.Expr) string {
	base, offset, length := e.Num(unix.NFTA_PAYLOAD_BASE), uint32(e.Num(unix.NFTA_PAYLOAD_OFFSET)), uint32(e.Num(unix.NFTA_PAYLOAD_LEN))
	addr := uint32(AddrType(r.family).spec().size)
	switch {
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && length == addr && offset == addressOffset(r.family):
		return r.family.String() + " saddr"
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && length == addr && offset == addressOffset(r.family)+addr:
		return r.family.String() + " daddr"
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && length == 2 && offset == 2:
		return "th dport"
	}
	return fmt.Sprintf("@%d,%d,%d", base, offset*8, length*8)
}

func metaName(key uint64) string {
	switch key {
	case unix.NFT_META_L4PROTO:
		return "meta l4proto"
	case unix.NFT_META_IIFNAME:
		return "iifname"
	case unix.NFT_META_MARK:
		return "meta mark"
	}
	return fmt.Sprintf("meta %d", key)
}

func ctName(e wire.Expr) string {
	names := map[uint64]string{
		unix.NFT_CT_STATE: "state", unix.NFT_CT_STATUS: "status", unix.NFT_CT_MARK: "mark", unix.NFT_CT_DIRECTION: "direction",
		unix.NFT_CT_PROTO_DST: "proto-dst", ctDstIP: "ip daddr", ctDstIP6: "ip6 daddr",
	}
	name, ok := names[e.Num(unix.NFTA_CT_KEY)]
	if !ok {
		name = fmt.Sprint(e.Num(unix.NFTA_CT_KEY))
	}
	dir, ok := e.Find(unix.NFTA_CT_DIRECTION)
	switch {
	case !ok:
		return "ct " + name
	case dir.N == 0:
		return "ct original " + name
	}
	return "ct reply " + name
}

func fibName(e wire.Expr) string {
	if e.Num(unix.NFTA_FIB_RESULT) == unix.NFT_FIB_RESULT_ADDRTYPE && e.Num(unix.NFTA_FIB_FLAGS) == unix.NFTA_FIB_F_SADDR {
		return "fib saddr type"
	}
	return fmt.Sprintf("fib %d %d", e.Num(unix.NFTA_FIB_FLAGS), e.Num(unix.NFTA_FIB_RESULT))
}

// compare reads a comparison with what was loaded.
func (r *reader) compare(e wire.Expr) {
	left := r.fields(e.Num(unix.NFTA_CMP_SREG), noReg)
	data := e.Str(unix.NFTA_CMP_DATA)
	op := [...]string{"==", "!=", "<", "<=", ">", ">="}[min(e.Num(unix.NFTA_CMP_OP), 5)]
	if op == "==" {
		op = ""
	} else {
		op += " "
	}
	right := fmt.Sprintf("0x%x", data)
	switch {
	case left == "iifname":
		right = fmt.Sprintf("%q", wire.CString([]byte(data)))
		if len(data) < unix.IFNAMSIZ {
			right = fmt.Sprintf("%q", data+"*")
		}
	case left == "meta l4proto" && len(data) == 1:
		right = protoText(data[0])
	case left == "fib saddr type" && word(data) == unix.RTN_LOCAL:
		right = "local"
	case strings.HasSuffix(left, "addr") && len(data) == AddrType(r.family).spec().size:
		right = fieldText(AddrType(r.family), []byte(data))
	}
	r.say("%s %s%s", left, op, right)
}

func (r *reader) lookup(e wire.Expr) {
	set := e.Str(unix.NFTA_LOOKUP_SET)
	fields := r.fields(e.Num(unix.NFTA_LOOKUP_SREG), noReg)
	dreg, isMap := e.Find(unix.NFTA_LOOKUP_DREG)
	switch {
	case isMap && dreg.N == wire.VerdictReg:
		r.say("%s vmap @%s", fields, set)
	case isMap:
		r.keep(dreg.N, fields+" map @"+set)
	case e.Num(unix.NFTA_LOOKUP_FLAGS) == wire.LookupInverted:
		r.say("%s != @%s", fields, set)
	default:
		r.say("%s @%s", fields, set)
	}
}

func word(s string) uint32 {
	if len(s) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32([]byte(s))
}

// String lists the table in a form of nft's language, sorted: two tables that do the
// same have the same text.
func (c *Contents) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table %s {\n", c.Table)
	if c.Comment != "" {
		fmt.Fprintf(&b, "\tcomment %q\n", c.Comment)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Sets)) {
		b.WriteString(c.Sets[name].text(c.Elements[name]))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Chains)) {
		ch := c.Chains[name]
		fmt.Fprintf(&b, "\tchain %s {\n", name)
		if ch.Comment != "" {
			fmt.Fprintf(&b, "\t\tcomment %q\n", ch.Comment)
		}
		if ch.Hook != nil {
			fmt.Fprintf(&b, "\t\ttype %s hook %s priority %d\n", ch.Hook.Type, ch.Hook.Num, ch.Hook.Priority)
		}
		for _, r := range ch.Rules {
			fmt.Fprintf(&b, "\t\t%s\n", r)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// String is the declaration.
func (s *Set) String() string {
	kind, typ := "set", typesText(s.Key)
	if s.IsMap() {
		kind = "map"
		if s.Verdicts {
			typ += " : verdict"
		} else {
			typ += " : " + typesText(s.Data)
		}
	}
	out := fmt.Sprintf("%s %s { type %s", kind, s.Name, typ)
	if s.Interval {
		out += "; flags interval"
	}
	if s.Dynamic {
		out += "; flags dynamic,timeout"
	}
	if s.Size > 0 {
		out += fmt.Sprintf("; size %d", s.Size)
	}
	if s.Comment != "" {
		out += fmt.Sprintf("; comment %q", s.Comment)
	}
	return out + " }"
}

func (s *Set) text(elements []Element) string {
	lines := make([]string, 0, len(elements))
	for i := range elements {
		lines = append(lines, "\t\t"+s.ElementText(&elements[i])+"\n")
	}
	slices.Sort(lines)
	return "\t" + s.String() + "\n" + strings.Join(lines, "")
}

// ElementText is an element as nft writes it.
func (s *Set) ElementText(e *Element) string {
	out := e.Key.text(s.Key)
	if e.End {
		out = "before " + out
	}
	if e.Comment != "" {
		out += fmt.Sprintf(" comment %q", e.Comment)
	}
	switch {
	case s.Verdicts:
		out += " : " + e.Verdict.String()
	case len(s.Data) > 0:
		out += " : " + e.Data.text(s.Data)
	}
	return out
}
