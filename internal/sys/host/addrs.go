package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
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
// while (rtnetlink(7)). The messages themselves are not read: a listing is right
// even if some were lost.
const addressGroups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1)

func (k Kernel) Addrs() ([]netip.Addr, error) {
	nets, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list the addresses of the interfaces: %w", err)
	}
	out := make([]netip.Addr, 0, len(nets))
	for _, n := range nets {
		if ipn, ok := n.(*net.IPNet); ok {
			if a, ok := netip.AddrFromSlice(ipn.IP); ok {
				out = append(out, a.Unmap())
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

func (k Kernel) Watch(ctx context.Context, changed func([]netip.Addr)) error {
	// Subscribing comes before listing, so nothing is missed in between.
	c, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: addressGroups})
	if err != nil {
		return fmt.Errorf("subscribe to address events: %w", err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	var last []netip.Addr
	for first := true; ; first = false {
		now, err := k.Addrs()
		if err != nil {
			return err
		}
		if first || !slices.Equal(now, last) {
			last = now
			changed(slices.Clone(now))
		}
		if err := await(ctx, c, relist); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		// Drain what comes together with it.
		for end := time.Now().Add(settle); time.Now().Before(end) && ctx.Err() == nil; {
			if err := await(ctx, c, time.Until(end)); err != nil {
				return err
			}
		}
	}
}

// await returns after an event, or after d, or when ctx ends.
func await(ctx context.Context, c *netlink.Conn, d time.Duration) error {
	if err := c.SetReadDeadline(time.Now().Add(d)); err != nil {
		return fmt.Errorf("wait for address events: %w", err)
	}
	if ctx.Err() != nil { // the deadline above may have replaced the one that ends the wait
		return nil
	}
	_, err := c.Receive()
	var timeout interface{ Timeout() bool }
	switch {
	case err == nil, errors.As(err, &timeout) && timeout.Timeout():
		return nil
	case errors.Is(err, unix.ENOBUFS):
		return nil // events were lost; the listing that follows makes up for them
	}
	return fmt.Errorf("receive address events: %w", err)
}
