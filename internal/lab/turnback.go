package lab

import (
	"encoding/binary"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// refuseTurningBack makes a host of HostSpec.TurnsBack answer packets that would
// leave by the interface they came in by. An unreachable route would do it too, but
// the kernel answers only one packet a second for those (net.ipv4.route.error_cost,
// which no namespace has of its own).
func (e *end) refuseTurningBack() error {
	if !e.host.turnsBack {
		return nil
	}
	c, err := nftables.New(nftables.WithNetNSFd(int(e.host.ns.file.Fd())))
	if err != nil {
		return fmt.Errorf("open nftables of %s: %w", e.host.name, err)
	}
	t := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "lab"})
	chain := c.AddChain(&nftables.Chain{
		Name: "forward", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
	})
	index := binary.NativeEndian.AppendUint32(nil, uint32(e.index))
	c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIF, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: index},
		&expr.Meta{Key: expr.MetaKeyOIF, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: index},
		&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_HOST_UNREACH},
	}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("let %s answer packets that turn back: %w", e.host.name, err)
	}
	return nil
}
