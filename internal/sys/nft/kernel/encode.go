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

// batch is a transaction on its way to the kernel: messages one after the other, in one
// piece that is written as it is. A cluster's endpoints are many megabytes, so nothing is
// copied on the way, and the room is used again.
type batch struct {
	wire.Message
	port  uint32 // of our socket
	first uint32 // sequence number of the first message
	count uint32
	begun int // where the last message begins
}

// reset empties it; the messages are numbered from first.
func (b *batch) reset(port, first uint32) {
	b.Buf, b.port, b.first, b.count = b.Buf[:0], port, first, 0
}

// open begins a message, which end ends.
func (b *batch) open(typ uint16, flags netlink.HeaderFlags, f nft.Family, resource uint16) {
	b.begun = len(b.Buf)
	b.Buf = binary.NativeEndian.AppendUint32(b.Buf, 0) // the length
	b.Buf = binary.NativeEndian.AppendUint16(b.Buf, typ)
	b.Buf = binary.NativeEndian.AppendUint16(b.Buf, uint16(netlink.Request|flags))
	b.Buf = binary.NativeEndian.AppendUint32(b.Buf, b.first+b.count)
	b.Buf = binary.NativeEndian.AppendUint32(b.Buf, b.port)
	b.Buf = append(b.Buf, byte(f), unix.NFNETLINK_V0)
	b.Buf = binary.BigEndian.AppendUint16(b.Buf, resource)
	b.count++
}

func (b *batch) end() {
	binary.NativeEndian.PutUint32(b.Buf[b.begun:], uint32(len(b.Buf)-b.begun))
}

// acknowledge has the kernel answer to the last message.
func (b *batch) acknowledge() {
	const flagsAt = 6
	at := b.Buf[b.begun+flagsAt:]
	binary.NativeEndian.PutUint16(at, binary.NativeEndian.Uint16(at)|uint16(netlink.Acknowledge))
}

// bound appends the message that begins or ends a transaction.
func (b *batch) bound(typ uint16) {
	b.open(typ, 0, 0, unix.NFNL_SUBSYS_NFTABLES)
	b.end()
}

// step appends the messages of a step.
func (b *batch) step(o *nft.Op) {
	switch o.Kind {
	case nft.AddElements, nft.DeleteElements:
		b.elements(o)
		return
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
	b.open(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, o.Table.Family, 0)
	defer b.end()
	w := &b.Message
	w.Text(1, o.Table.Name) // the first attribute of all
	switch o.Kind {
	case nft.AddTable:
		if o.Comment != "" {
			w.Comment(tableUserdata, commentOfTable, o.Comment)
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
			w.Comment(unix.NFTA_RULE_USERDATA, commentOfRule, o.Rule.Comment)
		}
	case nft.AddSet:
		putSet(w, o.Set)
	case nft.DeleteSet, nft.FlushSet:
		w.Text(unix.NFTA_SET_NAME, o.Name)
	}
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
		w.Comment(chainUserdata, commentOfChain, c.Comment)
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

// elements appends as many messages as the elements need.
func (b *batch) elements(o *nft.Op) {
	kind, flags := uint16(unix.NFT_MSG_NEWSETELEM), netlink.Create
	if o.Kind == nft.DeleteElements {
		kind, flags = unix.NFT_MSG_DELSETELEM, 0
	}
	b.Buf = slices.Grow(b.Buf, len(o.Elements)*elementGuess)
	for rest := o.Elements; len(rest) > 0; {
		b.open(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, o.Table.Family, 0)
		rest = putElements(&b.Message, o.Table, o.Set, rest, o.Kind == nft.AddElements)
		b.end()
	}
}

// putElements appends as many elements as fit into one message, and returns the others.
func putElements(w *wire.Message, t nft.Table, s *nft.Set, rest []nft.Element, whole bool) []nft.Element {
	w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
	w.Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name)
	list := w.Open(unix.NFTA_SET_ELEM_LIST_ELEMENTS | unix.NLA_F_NESTED)
	for len(rest) > 0 && len(w.Buf)-list < elementBytes {
		putElement(w, s, &rest[0], whole)
		rest = rest[1:]
	}
	w.Close(list)
	return rest
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
		w.Comment(unix.NFTA_SET_ELEM_USERDATA, commentOfElement, e.Comment)
	}
	w.Close(at)
}
