// Package socket is the relay's way to the kernel: non-blocking TCP and UDP sockets by
// their descriptors, without allocation and without waiting.
//
// Calls on the hot path go to the kernel without telling the Go scheduler: none of
// them waits, and telling it costs more than most of them. Errors are errno values
// there, for callers that decide by them; elsewhere they say what was tried.
package socket

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Poll returns the events that are there already.
func Poll(epoll int, events []unix.EpollEvent) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	return result(n, errno)
}

func result(n uintptr, errno unix.Errno) (int, error) {
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

func Read(fd int, b []byte) (int, error) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return result(n, errno)
}

// Send writes to a socket without a SIGPIPE.
func Send(fd int, b []byte) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT, 0, 0)
	return result(n, errno)
}

// Splice moves up to n bytes between a socket and a pipe. It may copy a mebibyte, so
// it is announced to the scheduler.
func Splice(from, to, n int) (int, error) {
	moved, _, errno := unix.Syscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n), unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	return result(moved, errno)
}

// sockaddr is a kernel socket address of either family.
type sockaddr [unix.SizeofSockaddrInet6]byte

// put sets the address and returns its length.
func (s *sockaddr) put(a netip.AddrPort) uint32 {
	binary.BigEndian.PutUint16(s[2:], a.Port())
	if a.Addr().Is4() {
		binary.NativeEndian.PutUint16(s[:], unix.AF_INET)
		ip := a.Addr().As4()
		copy(s[4:], ip[:])
		return unix.SizeofSockaddrInet4
	}
	binary.NativeEndian.PutUint16(s[:], unix.AF_INET6)
	ip := a.Addr().As16()
	clear(s[4:8])
	copy(s[8:], ip[:])
	clear(s[24:])
	return unix.SizeofSockaddrInet6
}

// get returns the address, without a zone.
func (s *sockaddr) get() netip.AddrPort {
	port := binary.BigEndian.Uint16(s[2:])
	if binary.NativeEndian.Uint16(s[:]) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(s[4:8])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(s[8:24])), port)
}

// Accept returns a non-blocking connection and its client.
func Accept(fd int) (int, netip.AddrPort, error) {
	var sa sockaddr
	size := uint32(len(sa))
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(&sa)), uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if errno != 0 {
		return -1, netip.AddrPort{}, errno
	}
	return int(n), sa.get(), nil
}

func Connect(fd int, to netip.AddrPort) error {
	var sa sockaddr
	size := sa.put(to)
	if _, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), uintptr(size)); errno != 0 {
		return errno
	}
	return nil
}

func LocalAddr(fd int) (netip.AddrPort, error) {
	var sa sockaddr
	size := uint32(len(sa))
	if _, _, errno := unix.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(&sa)), uintptr(unsafe.Pointer(&size))); errno != 0 {
		return netip.AddrPort{}, fmt.Errorf("asking for a socket's address: %w", errno)
	}
	return sa.get(), nil
}

// OriginalDestination returns where a client connected to, before the destination was
// translated, if connection tracking knows it, else the connection's own address.
func OriginalDestination(fd int, four bool) (netip.AddrPort, error) {
	const originalDestination = 80 // SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST
	var sa sockaddr
	size := uint32(len(sa))
	level := unix.IPPROTO_IPV6
	if four {
		level = unix.IPPROTO_IP
		size = unix.SizeofSockaddrInet4
	}
	if _, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), originalDestination, uintptr(unsafe.Pointer(&sa)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
		return LocalAddr(fd)
	}
	return sa.get(), nil
}

func domain(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// Option is one setsockopt with a whole number.
type Option struct {
	level, name, value int
	what               string // for errors
}

func setOptions(fd int, options ...Option) error {
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("setting %s: %w", o.what, err)
		}
	}
	return nil
}

// Config is what a listening socket is bound to.
type Config struct {
	Protocol    plan.Protocol  // TCP or UDP
	Addr        netip.AddrPort // port 0: the kernel's choice. IPv6 sockets take IPv6 only.
	FreeBind    bool           // the address need not be the node's
	Transparent bool           // the address may be one that is only routed to the node
}

// Listen returns a bound socket, which Prepare makes listen; of UDP several at the same
// address, over which the kernel spreads the clients, each always to the same one. The
// first is bound before it shares its address, so that nobody else's are joined.
func Listen(c Config, several int) ([]int, error) {
	kind := unix.SOCK_STREAM
	switch c.Protocol {
	case plan.TCP:
		several = 1
	case plan.UDP:
		kind = unix.SOCK_DGRAM
	default:
		return nil, fmt.Errorf("%s is not relayed: only TCP and UDP are", c.Protocol)
	}
	var fds []int
	for range several {
		fd, err := unix.Socket(domain(c.Addr.Addr()), kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			CloseAll(fds)
			return nil, fmt.Errorf("creating a socket: %w", err)
		}
		fds = append(fds, fd)
		shared := func() error {
			return setOptions(fd, Option{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1, "SO_REUSEPORT"})
		}
		if len(fds) > 1 {
			err = shared()
		}
		if err == nil {
			err = bindListener(fd, c)
		}
		if err == nil && len(fds) == 1 && several > 1 {
			if err = shared(); err == nil {
				c.Addr, err = LocalAddr(fd)
			}
		}
		if err != nil {
			CloseAll(fds)
			return nil, err
		}
	}
	return fds, nil
}

// CloseAll closes descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func bindListener(fd int, c Config) error {
	var options []Option
	four := c.Addr.Addr().Is4()
	if !four {
		options = append(options, Option{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1, "IPV6_V6ONLY"})
	}
	if c.Protocol == plan.TCP {
		// Connections of a closed listener must not keep the next one from the address.
		options = append(options, Option{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1, "SO_REUSEADDR"})
	}
	if c.FreeBind {
		options = append(options, byFamily(four, unix.IP_FREEBIND, unix.IPV6_FREEBIND, "IP_FREEBIND"))
	}
	if c.Transparent {
		options = append(options, byFamily(four, unix.IP_TRANSPARENT, unix.IPV6_TRANSPARENT, "IP_TRANSPARENT"))
	}
	if err := setOptions(fd, options...); err != nil {
		return err
	}
	if err := bind(fd, c.Addr); err != nil {
		return fmt.Errorf("binding: %w", err)
	}
	return nil
}

// byFamily is an option that IPv4 and IPv6 have under different names, switched on.
func byFamily(four bool, v4, v6 int, what string) Option {
	if four {
		return Option{unix.IPPROTO_IP, v4, 1, what}
	}
	return Option{unix.IPPROTO_IPV6, v6, 1, what}
}

func bind(fd int, a netip.AddrPort) error {
	var sa sockaddr
	size := sa.put(a)
	if _, _, errno := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(&sa)), uintptr(size)); errno != 0 {
		return errno
	}
	return nil
}

// Prepare sets the options of a listening socket that may have been a predecessor's.
// Those of TCP are inherited by the connections that it accepts.
func Prepare(fd int, c Config, keepAlive time.Duration) error {
	if c.Protocol == plan.UDP {
		four := c.Addr.Addr().Is4()
		joinDatagrams(fd)
		// A burst waits here while the loop is elsewhere; the second is without privileges.
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, datagramBuffer) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, datagramBuffer)
		}
		return setOptions(fd, byFamily(four, unix.IP_PKTINFO, unix.IPV6_RECVPKTINFO, "IP_PKTINFO"))
	}
	if err := setOptions(fd, StreamOptions()...); err != nil {
		return err
	}
	if keepAlive > 0 {
		if err := KeepAlive(fd, keepAlive); err != nil {
			return err
		}
	}
	if err := unix.Listen(fd, backlog); err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	return nil
}

// backlog is what a listening socket queues; net.core.somaxconn has the last word.
const backlog = 65535

// datagramBuffer is what may wait at a UDP listener, in bytes as the kernel counts.
const datagramBuffer = 4 << 20

// joinDatagrams has the kernel deliver datagrams that came as one in one (UDP_GRO),
// where it can.
func joinDatagrams(fd int) { _ = unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO, 1) }

// DatagramOptions are the options of a UDP socket that is connected to an endpoint:
// ICMP errors are queued.
func DatagramOptions(a netip.Addr) []Option {
	return []Option{byFamily(a.Is4(), unix.IP_RECVERR, unix.IPV6_RECVERR, "IP_RECVERR")}
}

// StreamOptions are the options of every TCP socket.
func StreamOptions() []Option {
	return []Option{{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1, "TCP_NODELAY"}}
}

// KeepAlive has a TCP socket, and those that it accepts, ask for the peer after a time
// without a byte from it; it is at least a second.
func KeepAlive(fd int, after time.Duration) error {
	seconds := int(max(after/time.Second, 1))
	return setOptions(fd,
		Option{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1, "SO_KEEPALIVE"},
		Option{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, seconds, "TCP_KEEPIDLE"},
		Option{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, seconds, "TCP_KEEPINTVL"})
}

// Reset closes a TCP socket so that its peer sees a reset.
func Reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Close(fd)
}
