package kernel

import (
	"encoding/binary"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// Attributes that the library of system constants lacks, and nft's numbers for
// comments in user data.
const (
	tableUserdata = 6
	chainUserdata = 12

	commentOfTable   = 0
	commentOfChain   = 0
	commentOfRule    = 0
	commentOfElement = 0
	commentOfSet     = 7
	byteOrderOfKey   = 0
	bigEndian        = 2
)

const (
	// elementBytes is up to how much of a message elements fill: the attribute
	// around them has a length of two bytes.
	elementBytes = 60_000
	// elementGuess is how much room is made for an element: most need less.
	elementGuess = 128
	verdictType  = 0xffffff00 // NFT_DATA_VERDICT
)

func header(f nft.Family, resource uint16) []byte {
	return binary.BigEndian.AppendUint16([]byte{byte(f), unix.NFNETLINK_V0}, resource)
}

func request(kind uint16, flags netlink.HeaderFlags, f nft.Family) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: netlink.Request | flags},
		Data:   header(f, 0),
	}
}

// encode appends the messages of a step, and calls each with every one's step.
func encode(out []netlink.Message, o *nft.Op) []netlink.Message {
	switch o.Kind {
	case nft.AddElements, nft.DeleteElements:
		return encodeElements(out, o)
	}
	kind, flags := uint16(0), netlink.HeaderFlags(0)
	switch o.Kind {
	case nft.AddTable:
		kind, flags = unix.NFT_MSG_NEWTABLE, netlink.Create
	case nft.DeleteTable:
		kind = unix.NFT_MSG_DELTABLE
	case nft.AddChain:
		kind, flags = unix.NFT_MSG_NEWCHAIN, netlink.Create
	case nft.DeleteChain:
		kind = unix.NFT_MSG_DELCHAIN
	case nft.FlushChain:
		kind = unix.NFT_MSG_DELRULE
	case nft.AddRule:
		kind, flags = unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append
	case nft.AddSet:
		kind, flags = unix.NFT_MSG_NEWSET, netlink.Create
	case nft.DeleteSet:
		kind = unix.NFT_MSG_DELSET
	case nft.FlushSet:
		kind = unix.NFT_MSG_DELSETELEM
	}
	m := request(kind, flags, o.Table.Family)
	w := &wire.Message{Buf: m.Data}
	w.Text(1, o.Table.Name) // the first attribute of all
	switch o.Kind {
	case nft.AddTable:
		if o.Comment != "" {
			w.Bytes(tableUserdata, wire.Comment(commentOfTable, o.Comment))
		}
	case nft.AddChain:
		putChain(w, o.Chain)
	case nft.DeleteChain:
		w.Text(unix.NFTA_CHAIN_NAME, o.Name)
	case nft.FlushChain:
		w.Text(unix.NFTA_RULE_CHAIN, o.Name)
	case nft.AddRule:
		w.Text(unix.NFTA_RULE_CHAIN, o.Name)
		w.Nest(unix.NFTA_RULE_EXPRESSIONS, func() { wire.PutExprs(w, o.Rule.Exprs()) })
		if o.Rule.Comment != "" {
			w.Bytes(unix.NFTA_RULE_USERDATA, wire.Comment(commentOfRule, o.Rule.Comment))
		}
	case nft.AddSet:
		putSet(w, o.Set)
	case nft.DeleteSet, nft.FlushSet:
		w.Text(unix.NFTA_SET_NAME, o.Name)
	}
	m.Data = w.Buf
	return append(out, m)
}

func putChain(w *wire.Message, c *nft.Chain) {
	w.Text(unix.NFTA_CHAIN_NAME, c.Name)
	if c.Hook != nil {
		w.Nest(unix.NFTA_CHAIN_HOOK, func() {
			w.Number(unix.NFTA_HOOK_HOOKNUM, uint32(c.Hook.Num))
			w.Number(unix.NFTA_HOOK_PRIORITY, uint32(c.Hook.Priority))
		})
		w.Text(unix.NFTA_CHAIN_TYPE, c.Hook.Type)
	}
	if c.Comment != "" {
		w.Bytes(chainUserdata, wire.Comment(commentOfChain, c.Comment))
	}
}

func putSet(w *wire.Message, s *nft.Set) {
	w.Text(unix.NFTA_SET_NAME, s.Name)
	w.Number(unix.NFTA_SET_FLAGS, flagsOf(s))
	w.Number(unix.NFTA_SET_KEY_TYPE, nft.TypeID(s.Key))
	w.Number(unix.NFTA_SET_KEY_LEN, uint32(s.KeyLen()))
	switch {
	case s.Verdicts:
		w.Number(unix.NFTA_SET_DATA_TYPE, verdictType)
		w.Number(unix.NFTA_SET_DATA_LEN, 16)
	case len(s.Data) > 0:
		w.Number(unix.NFTA_SET_DATA_TYPE, nft.TypeID(s.Data))
		w.Number(unix.NFTA_SET_DATA_LEN, uint32(s.DataLen()))
	}
	if s.Size > 0 {
		w.Nest(unix.NFTA_SET_DESC, func() { w.Number(unix.NFTA_SET_DESC_SIZE, s.Size) })
	}
	w.Number(unix.NFTA_SET_ID, 1) // required; steps name sets
	var ud []byte
	if s.Interval {
		ud = wire.Userdata(ud, byteOrderOfKey, binary.NativeEndian.AppendUint32(nil, bigEndian))
	}
	if s.Comment != "" {
		ud = append(ud, wire.Comment(commentOfSet, s.Comment)...)
	}
	if len(ud) > 0 {
		w.Bytes(unix.NFTA_SET_USERDATA, ud)
	}
}

func flagsOf(s *nft.Set) uint32 {
	var f uint32
	if s.IsMap() {
		f |= unix.NFT_SET_MAP
	}
	if s.Interval {
		f |= unix.NFT_SET_INTERVAL
	}
	if s.Dynamic {
		f |= unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT
	}
	return f
}

// encodeElements appends as many messages as the elements need.
func encodeElements(out []netlink.Message, o *nft.Op) []netlink.Message {
	for rest := o.Elements; len(rest) > 0; {
		m := request(unix.NFT_MSG_NEWSETELEM, netlink.Create, o.Table.Family)
		if o.Kind == nft.DeleteElements {
			m = request(unix.NFT_MSG_DELSETELEM, 0, o.Table.Family)
		}
		w := &wire.Message{Buf: slices.Grow(m.Data, min(len(rest)*elementGuess, elementBytes)+elementGuess)}
		w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, o.Table.Name)
		w.Text(unix.NFTA_SET_ELEM_LIST_SET, o.Set.Name)
		list := w.Open(unix.NFTA_SET_ELEM_LIST_ELEMENTS | unix.NLA_F_NESTED)
		for len(rest) > 0 && len(w.Buf)-list < elementBytes {
			putElement(w, o.Set, &rest[0], o.Kind == nft.AddElements)
			rest = rest[1:]
		}
		w.Close(list)
		m.Data = w.Buf
		out = append(out, m)
	}
	return out
}

func putElement(w *wire.Message, s *nft.Set, e *nft.Element, whole bool) {
	at := w.Open(unix.NFTA_LIST_ELEM | unix.NLA_F_NESTED)
	if e.End {
		w.Number(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	w.Data(unix.NFTA_SET_ELEM_KEY, string(e.Key))
	switch {
	case !whole || !s.IsMap():
	case s.Verdicts:
		data := w.Open(unix.NFTA_SET_ELEM_DATA | unix.NLA_F_NESTED)
		w.Verdict(e.Verdict)
		w.Close(data)
	default:
		w.Data(unix.NFTA_SET_ELEM_DATA, string(e.Data))
	}
	if whole && e.Timeout > 0 {
		w.Bytes(unix.NFTA_SET_ELEM_TIMEOUT, binary.BigEndian.AppendUint64(nil, uint64(e.Timeout.Milliseconds())))
	}
	if whole && e.Comment != "" {
		w.Bytes(unix.NFTA_SET_ELEM_USERDATA, wire.Comment(commentOfElement, e.Comment))
	}
	w.Close(at)
}
