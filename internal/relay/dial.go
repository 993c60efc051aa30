package relay

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// dialing says how an endpoint is connected to.
type dialing struct {
	to      netip.AddrPort
	from    netip.Addr // the client's, if the endpoint is to see it; else the kernel's choice
	mark    uint32     // with from; 0: none
	udp     bool
	options []option
}

// dial begins to connect a non-blocking socket; like connect(2) it gives EINPROGRESS
// when that takes time, together with the socket.
func dial(d dialing) (int, error) {
	kind := unix.SOCK_STREAM
	if d.udp {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(domain(d.to.Addr()), kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("creating a socket: %w", err)
	}
	if err := d.prepare(fd); err != nil {
		unix.Close(fd)
		return -1, err
	}
	err = connect(fd, d.to)
	if err != nil && err != unix.EINPROGRESS {
		unix.Close(fd)
		return -1, fmt.Errorf("connecting to %s: %w", d.to, err)
	}
	return fd, err
}

func (d dialing) prepare(fd int) error {
	if err := setOptions(fd, d.options...); err != nil {
		return err
	}
	if !d.from.IsValid() {
		return nil
	}
	four := d.to.Addr().Is4()
	options := []option{
		byFamily(four, unix.IP_TRANSPARENT, unix.IPV6_TRANSPARENT, "IP_TRANSPARENT, which needs CAP_NET_ADMIN or CAP_NET_RAW"),
	}
	if !d.udp {
		// The port is chosen at connect, when the endpoint is known: the client's
		// address has all ports for each of them. This one has no IPv6 name.
		options = append(options, option{unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1, "IP_BIND_ADDRESS_NO_PORT"})
	}
	if d.mark != 0 {
		options = append(options, option{unix.SOL_SOCKET, unix.SO_MARK, int(d.mark), "SO_MARK, which needs CAP_NET_ADMIN"})
	}
	if err := setOptions(fd, options...); err != nil {
		return err
	}
	if err := bind(fd, netip.AddrPortFrom(d.from, 0)); err != nil {
		return fmt.Errorf("binding to the client's address %s: %w", d.from, err)
	}
	return nil
}

// socketError returns and clears the error that a socket has.
func socketError(fd int) error {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	if n != 0 {
		return unix.Errno(n)
	}
	return nil
}
