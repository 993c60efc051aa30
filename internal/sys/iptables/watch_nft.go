package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// eventBuffer is the socket's buffer for notifications, in bytes. A write of ours
// can exceed it; what is lost then is only what others did in that moment.
const eventBuffer = 8 << 20

// watchEvents is Watch for the nft store.
func (c *Command) watchEvents(ctx context.Context, ours func(string) bool, ready func(), suspect func(string)) error {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return fmt.Errorf("open a netfilter socket: %w", err)
	}
	defer conn.Close()
	_ = conn.SetReadBuffer(eventBuffer) // smaller is worse, not wrong
	if err := conn.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		return fmt.Errorf("ask for nf_tables notifications: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	ready()
	for {
		msgs, err := conn.Receive()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, unix.ENOBUFS) {
			if !c.isWriting() {
				suspect("notifications of nf_tables were lost")
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("receive nf_tables notifications: %w", err)
		}
		for _, m := range msgs {
			if what := c.foreign(m, ours); what != "" {
				suspect(what)
			}
		}
	}
}

func (c *Command) isWriting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writing > 0
}

// foreign says what the notification m tells, if somebody else changed one of our
// chains or a rule that leads to one; else it is empty.
func (c *Command) foreign(m netlink.Message, ours func(string) bool) string {
	family := byte(unix.NFPROTO_IPV4)
	if c.family == IPv6 {
		family = unix.NFPROTO_IPV6
	}
	if len(m.Data) < 4 || m.Data[0] != family || int(m.Header.Type)>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return ""
	}
	c.mu.Lock()
	own := slices.Contains(c.writers, int(m.Header.PID))
	c.mu.Unlock()
	if own {
		return ""
	}
	kind := int(m.Header.Type) & 0xff
	attr := attributes(m.Data[4:])
	table := attr[unix.NFTA_RULE_TABLE]
	if table != string(NAT) && table != string(Filter) {
		return ""
	}
	switch kind {
	case unix.NFT_MSG_DELTABLE:
		return fmt.Sprintf("table %s of %s was deleted", table, c.family)
	case unix.NFT_MSG_DELCHAIN:
		if name := attr[unix.NFTA_CHAIN_NAME]; ours(name) {
			return fmt.Sprintf("chain %s of table %s was deleted", name, table)
		}
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		chain := attr[unix.NFTA_RULE_CHAIN]
		if ours(chain) || leadsTo(m.Data, ours) {
			return fmt.Sprintf("a rule of chain %s in table %s was changed", chain, table)
		}
	}
	return ""
}

// attributes returns the strings of the first level of netlink attributes by type.
func attributes(b []byte) map[uint16]string {
	out := map[uint16]string{}
	d, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return out
	}
	for d.Next() {
		out[d.Type()] = d.String()
	}
	return out
}

// leadsTo reports whether a rule's notification names a chain that ours accepts:
// the name of a jump's chain stands in it as a string that ends in a zero byte.
func leadsTo(b []byte, ours func(string) bool) bool {
	const prefix = "KUBE-"
	for {
		at := bytes.Index(b, []byte(prefix))
		if at < 0 {
			return false
		}
		b = b[at:]
		end := bytes.IndexByte(b, 0)
		if end < 0 {
			return false
		}
		if ours(string(b[:end])) {
			return true
		}
		b = b[end:]
	}
}
