package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Proto is a transport protocol by its IANA number.
type Proto int

const (
	TCP  Proto = unix.IPPROTO_TCP
	UDP  Proto = unix.IPPROTO_UDP
	SCTP Proto = unix.IPPROTO_SCTP
)

// ParseProto reads "tcp", "udp" or "sctp".
func ParseProto(s string) (Proto, error) {
	switch s {
	case "tcp", "TCP":
		return TCP, nil
	case "udp", "UDP":
		return UDP, nil
	case "sctp", "SCTP":
		return SCTP, nil
	}
	return 0, fmt.Errorf("protocol %q: want tcp, udp or sctp", s)
}

func (p Proto) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprintf("Proto(%d)", int(p))
}

// HasSCTP reports whether the kernel opens SCTP sockets.
func HasSCTP() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// open makes a non-blocking socket; call it on the namespace's thread. The net
// package has no SCTP, and the three protocols go the same way here.
func open(p Proto, v6 bool) (int, error) {
	domain, kind := unix.AF_INET, unix.SOCK_STREAM
	if v6 {
		domain = unix.AF_INET6
	}
	if p == UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(p))
	if err != nil {
		return -1, fmt.Errorf("open a %s socket: %w", p, err)
	}
	if p != UDP {
		// Wanted by fixed source ports and by servers that start again.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			unix.Close(fd)
			return -1, err
		}
	}
	if v6 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			unix.Close(fd)
			return -1, err
		}
	}
	return fd, nil
}

func kernelSockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// socket is a connected or accepted socket under Go's poller.
type socket struct {
	*os.File
	raw   syscall.RawConn
	proto Proto
}

func newSocket(fd int, p Proto) (*socket, error) {
	f := os.NewFile(uintptr(fd), p.String())
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &socket{File: f, raw: raw, proto: p}, nil
}

// control runs fn on the file descriptor.
func (s *socket) control(fn func(fd int) error) error {
	var err error
	return errors.Join(s.raw.Control(func(fd uintptr) { err = fn(int(fd)) }), err)
}

// Dialing says how to open a flow.
type Dialing struct {
	Proto      Proto
	To         netip.AddrPort
	From       netip.Addr // source address; unset: the kernel chooses
	SourcePort uint16     // 0: the kernel chooses
}

// whileTaken tries again for a moment if the source port is in use: a socket that was
// just closed lives on in a program that is being started until that begins to run.
func whileTaken(try func() error) error {
	const tries = 100
	for i := 0; ; i++ {
		err := try()
		if !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) || i == tries {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// connect opens the flow; for UDP only the kernel's route is looked up.
func (h *Host) connect(ctx context.Context, d Dialing) (*socket, error) {
	fd := -1
	err := h.ns.do(func() (err error) {
		if fd, err = open(d.Proto, d.To.Addr().Is6()); err != nil {
			return err
		}
		if d.From.IsValid() || d.SourcePort != 0 {
			from := d.From
			if !from.IsValid() {
				from = netip.IPv4Unspecified()
				if d.To.Addr().Is6() {
					from = netip.IPv6Unspecified()
				}
			}
			at := kernelSockaddr(netip.AddrPortFrom(from, d.SourcePort))
			if err := whileTaken(func() error { return unix.Bind(fd, at) }); err != nil {
				return fmt.Errorf("bind to source port %d: %w", d.SourcePort, err)
			}
		}
		connect := func() error { return unix.Connect(fd, kernelSockaddr(d.To)) }
		if d.SourcePort != 0 {
			err = whileTaken(connect)
		} else {
			err = connect()
		}
		if errors.Is(err, unix.EINPROGRESS) {
			return nil
		}
		return err
	})
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, err
	}
	s, err := newSocket(fd, d.Proto)
	if err != nil {
		return nil, err
	}
	if err := s.awaitConnected(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *socket) awaitConnected(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { s.SetDeadline(time.Unix(1, 0)) })
	var failed error
	err := s.raw.Write(func(fd uintptr) bool {
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && code != 0 {
			err = unix.Errno(code)
		}
		if err != nil {
			failed = err
			return true
		}
		_, err = unix.Getpeername(int(fd))
		return err == nil // ENOTCONN: still connecting
	})
	if !stop() && failed == nil && err == nil {
		err = ctx.Err()
	}
	return errors.Join(failed, err)
}

// local returns the socket's own address.
func (s *socket) local() netip.AddrPort {
	var a netip.AddrPort
	s.control(func(fd int) error {
		sa, err := unix.Getsockname(fd)
		if err == nil {
			a = addrPort(sa)
		}
		return err
	})
	return a
}
