package kernel

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// lost is the [nft.Event] of notifications that the kernel could not deliver.
const lost = "notifications of nf_tables were lost"

// ports returns the numbers of the sockets that commits came from.
func (k *Tables) ports() []uint32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.writers)
}

// Watch implements nft.Tables. The kernel keeps our own commits' notifications back,
// so that they take no room from those of others. If there is no room all the same,
// f is told that notifications were lost, without a table.
func (k *Tables) Watch(ctx context.Context, ours func(nft.Table) bool, ready chan<- struct{}, f func(nft.Event)) error {
	if _, err := k.dial(); err != nil {
		return err
	}
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return fmt.Errorf("open a netfilter socket: %w", err)
	}
	defer c.Close()
	_ = c.SetReadBuffer(cmp.Or(k.eventBuffer, eventBuffer)) // smaller is worse, not wrong
	_ = refuse(c, k.ports())                                // they are told apart below too
	if err := c.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		return fmt.Errorf("ask for nf_tables notifications: %w", err)
	}
	close(ready)
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var seen []nft.Event // of the commit that is being told
	for {
		msgs, err := c.Receive()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.ENOBUFS):
			seen = nil
			f(nft.Event{What: lost})
			continue
		case err != nil:
			return fmt.Errorf("receive nf_tables notifications: %w", err)
		}
		own := k.ports()
		for _, m := range msgs {
			if len(m.Data) < 4 || int(m.Header.Type)>>8 != unix.NFNL_SUBSYS_NFTABLES {
				continue
			}
			kind := int(m.Header.Type) & 0xff
			if kind == unix.NFT_MSG_NEWGEN {
				by := committer(body(m.Data))
				for i, e := range seen {
					e.What += by
					e.More = i < len(seen)-1
					f(e)
				}
				seen = nil
				continue
			}
			if slices.Contains(own, m.Header.PID) {
				continue
			}
			if e := parseEvent(kind, m.Data); e.What != "" && ours(e.Table) {
				seen = note(seen, e, kind == unix.NFT_MSG_DELTABLE)
			}
		}
	}
}

// refuse makes a socket drop the messages that come from other sockets' port numbers.
func refuse(c *netlink.Conn, ports []uint32) error {
	const (
		portAt  = 12 // nlmsg_pid, in the host's order; the program loads in network order
		loadAbs = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		jumpEq  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ret     = unix.BPF_RET | unix.BPF_K
	)
	prog := []unix.SockFilter{{Code: loadAbs, K: portAt}}
	for i, p := range ports {
		k := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, p))
		prog = append(prog, unix.SockFilter{Code: jumpEq, Jt: uint8(len(ports) - i), K: k})
	}
	const everything = 1<<32 - 1
	prog = append(prog, unix.SockFilter{Code: ret, K: everything}, unix.SockFilter{Code: ret, K: 0})
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]})
	})
	return errors.Join(err, failed)
}

// How much of one commit is told exactly.
const (
	mostEvents = 8
	mostKeys   = 20_000
)

// note adds an event to those of its commit. That a table is gone says all about it;
// what is too much is told as a change of the table.
func note(seen []nft.Event, e nft.Event, gone bool) []nft.Event {
	if gone {
		seen = slices.DeleteFunc(seen, func(s nft.Event) bool { return s.Table == e.Table })
	}
	for i := range seen {
		s := &seen[i]
		if s.What != e.What || s.Table != e.Table {
			continue
		}
		if s.Set == e.Set && len(s.Keys)+len(e.Keys) <= mostKeys {
			s.Keys = append(s.Keys, e.Keys...)
		} else {
			s.Set, s.Keys = "", nil
		}
		return seen
	}
	if len(seen) >= mostEvents {
		e = nft.Event{Table: e.Table, What: fmt.Sprintf("table %s: more", e.Table)}
		if slices.ContainsFunc(seen[mostEvents:], func(s nft.Event) bool { return s.Table == e.Table }) {
			return seen
		}
	}
	return append(seen, e)
}

// committer says who made a commit.
func committer(b []byte) string {
	name, pid := "", uint32(0)
	wire.EachAttr(b, func(typ uint16, d []byte) {
		switch typ {
		case unix.NFTA_GEN_PROC_NAME:
			name = wire.CString(d)
		case unix.NFTA_GEN_PROC_PID:
			pid = u32(d)
		}
	})
	if name == "" {
		return ""
	}
	return fmt.Sprintf(" by %s, process %d", name, pid)
}

// parseEvent says what a notification tells. Time that runs out is no event.
func parseEvent(kind int, b []byte) nft.Event {
	e := nft.Event{Table: nft.Table{Family: nft.Family(b[0])}}
	name := ""
	wire.EachAttr(body(b), func(typ uint16, d []byte) {
		switch typ {
		case 1: // the table of all kinds of objects
			e.Table.Name = wire.CString(d)
		case unix.NFTA_SET_NAME: // also NFTA_RULE_CHAIN and NFTA_SET_ELEM_LIST_SET
			if kind != unix.NFT_MSG_NEWTABLE && kind != unix.NFT_MSG_DELTABLE && kind != unix.NFT_MSG_NEWCHAIN && kind != unix.NFT_MSG_DELCHAIN {
				name = wire.CString(d)
			}
		case unix.NFTA_CHAIN_NAME:
			if kind == unix.NFT_MSG_NEWCHAIN || kind == unix.NFT_MSG_DELCHAIN {
				name = wire.CString(d)
			}
		}
	})
	what, ok := map[int]string{
		unix.NFT_MSG_NEWTABLE: "it was changed", unix.NFT_MSG_DELTABLE: "it was deleted", unix.NFT_MSG_NEWCHAIN: "chain %s was changed", unix.NFT_MSG_DELCHAIN: "chain %s was deleted",
		unix.NFT_MSG_NEWRULE: "a rule was added to chain %s", unix.NFT_MSG_DELRULE: "a rule of chain %s was deleted",
		unix.NFT_MSG_NEWSET: "set %s was changed", unix.NFT_MSG_DELSET: "set %s was deleted",
		unix.NFT_MSG_NEWSETELEM: "elements were added to %s", unix.NFT_MSG_DELSETELEM: "elements of %s were deleted",
	}[kind]
	if !ok {
		return nft.Event{}
	}
	if name != "" {
		what = fmt.Sprintf(what, name)
	}
	e.What = fmt.Sprintf("table %s: %s", e.Table, what)
	switch kind {
	case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
		e.Set = name
		eachElement(body(b), func(el nft.Element) { e.Keys = append(e.Keys, el.Key) })
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		e.Rules = true
	}
	return e
}
