package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	socket "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// relist is how often the addresses are listed although nothing was heard.
	relist = time.Minute
	// settle is how long further events are waited for before listing: bringing
	// an interface up sends several.
	settle = 20 * time.Millisecond
)

// addressGroups are the multicast groups whose messages make a new listing worth
// while (rtnetlink(7)). Of the messages only the interface is read: a listing is right
// even if some were lost.
const addressGroups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1)

func nativeUint32(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

func (k Kernel) Addrs() ([]netip.Addr, error) {
	out, _, err := nodeAddrs()
	return out, err
}

// listTries is how often a listing is repeated that a change disturbed.
const listTries = 10

// nodeAddrs lists the addresses of all interfaces but VIPDevice, and returns that one's
// index, 0 if there is none.
func nodeAddrs() ([]netip.Addr, int, error) {
	vips, err := vipDevice()
	if err != nil {
		return nil, 0, err
	}
	var list []netlink.Addr
	for try := 1; ; try++ {
		list, err = netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err == nil {
			break
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) || try == listTries {
			return nil, 0, fmt.Errorf("list the addresses of the interfaces: %w", err)
		}
	}
	out := make([]netip.Addr, 0, len(list))
	for _, l := range list {
		if l.LinkIndex == vips {
			continue
		}
		if a, ok := netip.AddrFromSlice(l.IP); ok {
			out = append(out, a.Unmap())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), vips, nil
}

// vipDevice returns the index of VIPDevice, 0 if there is none.
func vipDevice() (int, error) {
	link, err := netlink.LinkByName(VIPDevice)
	if _, none := errors.AsType[netlink.LinkNotFoundError](err); none {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look for device %s: %w", VIPDevice, err)
	}
	return link.Attrs().Index, nil
}

func (k Kernel) Watch(ctx context.Context, changed func([]netip.Addr)) error {
	// Subscribing comes before listing, so nothing is missed in between.
	c, err := socket.Dial(unix.NETLINK_ROUTE, &socket.Config{Groups: addressGroups})
	if err != nil {
		return fmt.Errorf("subscribe to address events: %w", err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	var last []netip.Addr
	for first := true; ; first = false {
		now, vips, err := nodeAddrs()
		if err != nil {
			return err
		}
		if first || !slices.Equal(now, last) {
			last = now
			changed(slices.Clone(now))
		}
		if err := await(ctx, c, vips, relist); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		// Drain what comes together with it.
		for end := time.Now().Add(settle); time.Now().Before(end) && ctx.Err() == nil; {
			if err := await(ctx, c, vips, time.Until(end)); err != nil {
				return err
			}
		}
	}
}

// await returns after an event, or after d, or when ctx ends. What happens to the
// addresses of the interface vips does not count: there are many, and none the node's.
func await(ctx context.Context, c *socket.Conn, vips int, d time.Duration) error {
	if err := c.SetReadDeadline(time.Now().Add(d)); err != nil {
		return fmt.Errorf("wait for address events: %w", err)
	}
	for ctx.Err() == nil { // the deadline above may have replaced the one that ends the wait
		events, err := c.Receive()
		var timeout interface{ Timeout() bool }
		switch {
		case err == nil:
			if slices.ContainsFunc(events, func(e socket.Message) bool { return counts(e, vips) }) {
				return nil
			}
		case errors.As(err, &timeout) && timeout.Timeout():
			return nil
		case errors.Is(err, unix.ENOBUFS):
			return nil // events were lost; the listing that follows makes up for them
		default:
			return fmt.Errorf("receive address events: %w", err)
		}
	}
	return nil
}

// counts reports whether an event may have changed the node's addresses.
func counts(e socket.Message, vips int) bool {
	switch e.Header.Type {
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		index, _, ok := parseAddrEvent(e)
		return !ok || vips == 0 || index != vips
	}
	return true // of a link: VIPDevice may be another one now
}
