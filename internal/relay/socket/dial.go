package socket

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Dialing says how an endpoint is connected to.
type Dialing struct {
	To      netip.AddrPort
	From    netip.Addr // the client's, if the endpoint is to see it; else the kernel's choice
	Mark    uint32     // of its packets; 0: none
	UDP     bool
	Options []Option
}

// Dial begins to connect a non-blocking socket; like connect(2) it gives EINPROGRESS
// when that takes time, together with the socket.
func Dial(d Dialing) (int, error) {
	kind := unix.SOCK_STREAM
	if d.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(domain(d.To.Addr()), kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("creating a socket: %w", err)
	}
	if err := d.prepare(fd); err != nil {
		unix.Close(fd)
		return -1, err
	}
	err = Connect(fd, d.To)
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return -1, fmt.Errorf("connecting to %s: %w", d.To, err)
	}
	return fd, err
}

func (d Dialing) prepare(fd int) error {
	if err := setOptions(fd, d.Options...); err != nil {
		return err
	}
	if d.UDP {
		joinDatagrams(fd)
	}
	if d.Mark != 0 {
		if err := setOptions(fd, Option{unix.SOL_SOCKET, unix.SO_MARK, int(d.Mark), "SO_MARK, which needs CAP_NET_ADMIN"}); err != nil {
			return err
		}
	}
	if !d.From.IsValid() {
		return nil
	}
	four := d.To.Addr().Is4()
	options := []Option{
		byFamily(four, unix.IP_TRANSPARENT, unix.IPV6_TRANSPARENT, "IP_TRANSPARENT, which needs CAP_NET_ADMIN or CAP_NET_RAW"),
	}
	if !d.UDP {
		// The port is chosen at connect, when the endpoint is known: the client's
		// address has all ports for each of them. This one has no IPv6 name.
		options = append(options, Option{unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1, "IP_BIND_ADDRESS_NO_PORT"})
	}
	if err := setOptions(fd, options...); err != nil {
		return err
	}
	if err := bind(fd, netip.AddrPortFrom(d.From, 0)); err != nil {
		return fmt.Errorf("binding to the client's address %s: %w", d.From, err)
	}
	return nil
}

// Error returns and clears the error that a socket has.
func Error(fd int) error {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	if n != 0 {
		return unix.Errno(n)
	}
	return nil
}
