package nft

import (
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

type (
	// ReplaceMark gives the packet a mark, whatever it had.
	ReplaceMark uint32
	// MarkFrom gives the packet the mark that a map has for the fields; without an
	// element the rule ends.
	MarkFrom struct {
		Fields []Field
		Map    string
	}
	// KeepDst settles that the flow's destination stays as it is: chains of type nat
	// that come later in the hook do not see it.
	KeepDst struct{}
)

func (s ReplaceMark) compile(c *compiler) { c.changeMark(0, uint32(s)) }

func (s MarkFrom) compile(c *compiler) {
	reg := c.loadAll(s.Fields)
	c.emit("lookup", wire.Str(unix.NFTA_LOOKUP_SET, s.Map), wire.U32(unix.NFTA_LOOKUP_SREG, reg), wire.U32(unix.NFTA_LOOKUP_DREG, wire.FirstReg))
	c.emit("meta", wire.U32(unix.NFTA_META_KEY, unix.NFT_META_MARK), wire.U32(unix.NFTA_META_SREG, wire.FirstReg))
}

func (KeepDst) compile(c *compiler) {
	reg := c.reg
	c.load(DstAddr)
	c.emit("nat", wire.U32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT), wire.U32(unix.NFTA_NAT_FAMILY, uint32(c.family)),
		wire.U32(unix.NFTA_NAT_REG_ADDR_MIN, reg))
}

// Number returns the number with which a tuple begins; 0 if it is too short.
func (t Tuple) Number() uint32 { return word(string(t[:min(len(t), 4)])) }
