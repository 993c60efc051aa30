package kernel

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

func u32(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// body is what follows the header in a message of nf_tables.
func body(b []byte) []byte { return b[min(4, len(b)):] }

// parseChain reads a chain; table is the one that it belongs to.
func parseChain(b []byte) (table string, c nft.Chain) {
	wire.EachAttr(b, func(typ uint16, data []byte) {
		switch typ {
		case unix.NFTA_CHAIN_TABLE:
			table = wire.CString(data)
		case unix.NFTA_CHAIN_NAME:
			c.Name = wire.CString(data)
		case unix.NFTA_CHAIN_HOOK:
			h := hookOf(&c)
			wire.EachAttr(data, func(typ uint16, data []byte) {
				switch typ {
				case unix.NFTA_HOOK_HOOKNUM:
					h.Num = nft.HookNum(u32(data))
				case unix.NFTA_HOOK_PRIORITY:
					h.Priority = int32(u32(data))
				}
			})
		case unix.NFTA_CHAIN_POLICY:
			hookOf(&c).Drops = u32(data) == 0 // NF_DROP
		case unix.NFTA_CHAIN_TYPE:
			hookOf(&c).Type = wire.CString(data)
		case chainUserdata:
			c.Comment = wire.CommentOf(data, commentOfChain)
		}
	})
	return table, c
}

func hookOf(c *nft.Chain) *nft.Hook {
	if c.Hook == nil {
		c.Hook = &nft.Hook{}
	}
	return c.Hook
}

// parseRule reads a rule of a table of the family, and the chain that it is in.
func parseRule(f nft.Family, b []byte) (chain string, r *nft.Rule) {
	var exprs []wire.Expr
	remark := ""
	wire.EachAttr(b, func(typ uint16, data []byte) {
		switch typ {
		case unix.NFTA_RULE_CHAIN:
			chain = wire.CString(data)
		case unix.NFTA_RULE_EXPRESSIONS:
			exprs = wire.ParseExprs(data)
		case unix.NFTA_RULE_USERDATA:
			remark = wire.CommentOf(data, commentOfRule)
		}
	})
	r = nft.ReadRule(f, exprs)
	r.Comment = remark
	return chain, r
}

// parseSet reads a set's declaration. Types that are not used here leave Key or
// Data empty, so that it differs from all that is wanted.
func parseSet(b []byte) *nft.Set {
	s := &nft.Set{}
	var flags, data uint32
	wire.EachAttr(b, func(typ uint16, d []byte) {
		switch typ {
		case unix.NFTA_SET_NAME:
			s.Name = wire.CString(d)
		case unix.NFTA_SET_FLAGS:
			flags = u32(d)
		case unix.NFTA_SET_KEY_TYPE:
			s.Key = nft.TypesOf(u32(d))
		case unix.NFTA_SET_DATA_TYPE:
			data = u32(d)
		case unix.NFTA_SET_DESC:
			wire.EachAttr(d, func(typ uint16, d []byte) {
				if typ == unix.NFTA_SET_DESC_SIZE {
					s.Size = u32(d)
				}
			})
		case unix.NFTA_SET_USERDATA:
			s.Comment = wire.CommentOf(d, commentOfSet)
		}
	})
	s.Interval = flags&unix.NFT_SET_INTERVAL != 0
	s.Dynamic = flags&unix.NFT_SET_EVAL != 0
	if flags&unix.NFT_SET_MAP != 0 {
		s.Verdicts = data == verdictType
		if !s.Verdicts {
			s.Data = nft.TypesOf(data)
		}
	}
	return s
}

// eachElement calls f with the elements of a message.
func eachElement(b []byte, f func(nft.Element)) {
	wire.EachAttr(b, func(typ uint16, list []byte) {
		if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return
		}
		wire.EachAttr(list, func(_ uint16, b []byte) { f(parseElement(b)) })
	})
}

func parseElement(b []byte) nft.Element {
	var e nft.Element
	wire.EachAttr(b, func(typ uint16, d []byte) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = parseTuple(d)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.End = u32(d)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA:
			wire.EachAttr(d, func(typ uint16, v []byte) {
				switch typ {
				case unix.NFTA_DATA_VALUE:
					e.Data = nft.Tuple(v)
				case unix.NFTA_DATA_VERDICT:
					e.Verdict = wire.ParseVerdict(v)
				}
			})
		case unix.NFTA_SET_ELEM_USERDATA:
			e.Comment = wire.CommentOf(d, commentOfElement)
		}
	})
	return e
}

func parseTuple(b []byte) nft.Tuple {
	var t nft.Tuple
	wire.EachAttr(b, func(typ uint16, v []byte) {
		if typ == unix.NFTA_DATA_VALUE {
			t = nft.Tuple(v)
		}
	})
	return t
}
