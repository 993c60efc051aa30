package socket

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Dialing says how an endpoint is connected to.
type Dialing struct {
	To      netip.AddrPort
	From    netip.Addr // the client's, if the endpoint is to see it; else the kernel's choice
	Ports   *Ports     // with From: the port is one of these
	Mark    uint32     // of its packets; 0: none
	UDP     bool
	Options []Option
}

// Ports are the source ports of sockets with a client's address, in turn. They lie below
// those that clients choose for themselves. A client's own connection to the same
// endpoint must not have the same port: its answers, which the node forwards, would be
// taken for the socket's, and are dropped while that is in TIME-WAIT (ip_forward drops
// what tcp_early_demux has found a socket for).
type Ports struct{ next uint16 }

const (
	firstPort = 1024
	lastPort  = 32767 // the default net.ipv4.ip_local_port_range begins with the next
	// portTries is how many ports are tried; then the kernel chooses. Where one is in
	// TIME-WAIT so are those that come next.
	portTries = 4
)

// NewPorts begins anywhere, so that two do not go the same way.
func NewPorts() *Ports { return &Ports{next: firstPort + uint16(rand.IntN(lastPort-firstPort+1))} }

func (p *Ports) take() uint16 {
	port := p.next
	if p.next++; p.next > lastPort {
		p.next = firstPort
	}
	return port
}

// Dial begins to connect a non-blocking socket; like connect(2) it gives EINPROGRESS
// when that takes time, together with the socket.
func Dial(d Dialing) (int, error) {
	if !d.From.IsValid() || d.Ports == nil {
		return d.from(0)
	}
	for range portTries {
		fd, err := d.from(d.Ports.take())
		if !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fd, err
		}
	}
	return d.from(0)
}

// from dials with a source port; 0: the kernel's choice.
func (d Dialing) from(port uint16) (int, error) {
	kind := unix.SOCK_STREAM
	if d.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(domain(d.To.Addr()), kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("creating a socket: %w", err)
	}
	if err := d.prepare(fd, port); err != nil {
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

func (d Dialing) prepare(fd int, port uint16) error {
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
	switch {
	case d.UDP:
	case port == 0:
		// The port is chosen at connect, when the endpoint is known: the client's
		// address has all ports for each of them. This one has no IPv6 name.
		options = append(options, Option{unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1, "IP_BIND_ADDRESS_NO_PORT"})
	default: // likewise: only the whole must differ from other connections
		options = append(options, Option{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1, "SO_REUSEADDR"})
	}
	if err := setOptions(fd, options...); err != nil {
		return err
	}
	if err := bind(fd, netip.AddrPortFrom(d.From, port)); err != nil {
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
