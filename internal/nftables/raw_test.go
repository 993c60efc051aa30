package nftables

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// rawDump returns the bytes of all messages that a listing consists of, but those
// about our own tables and the number of the generation.
func rawDump(t *testing.T, kind uint16, table, set string) []byte {
	t.Helper()
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const header = 4
	w := &wire.Message{Buf: []byte{unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, 0}}
	if table != "" {
		w.Buf[0] = unix.NFPROTO_INET
		w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		w.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
	}
	msgs, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: netlink.Request | netlink.Dump},
		Data:   w.Buf,
	})
	if err != nil {
		t.Fatalf("list kind %d: %v", kind, err)
	}
	var out []byte
	for _, m := range msgs {
		own := false
		wire.EachAttr(m.Data[header:], func(typ uint16, b []byte) {
			const name = 1 // of the table, in all kinds
			own = own || typ == name && (wire.CString(b) == owned.Name || wire.CString(b) == owned.OtherName)
		})
		if !own {
			out = append(out, m.Data[:2]...)
			out = append(out, m.Data[header:]...)
		}
	}
	return out
}
