package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// strayDistance is how far beyond what the peer expects a stray segment lies: more
// than any window.
const strayDistance = 1 << 30

// Stray sends on each connection of a TCP server one segment that lies far outside
// of the peer's window, and otherwise fits: connection tracking calls it INVALID,
// and where it arrives with another source address than the peer knows, the answer
// resets the connection. It returns how many segments were sent.
func (s *Server) Stray() (int, error) {
	if s.proto != TCP {
		return 0, fmt.Errorf("stray segment of %s: want a tcp server, have %s", s.name, s.proto)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sent := 0
	for f := range s.open {
		c, err := connectionOf(f)
		if errors.Is(err, unix.ENOTCONN) {
			continue // the listener, or a connection that just ended
		}
		if err == nil {
			err = s.host.ns.do(func() error { return c.sendStray() })
		}
		if err != nil {
			return sent, fmt.Errorf("stray segment of %s to %s: %w", s.name, c.peer, err)
		}
		sent++
	}
	return sent, nil
}

// connection is an established TCP connection as its own side knows it.
type connection struct {
	local, peer netip.AddrPort
	next        uint32 // sequence number of the next byte it sends
	expected    uint32 // and of the next one that it wants
}

func connectionOf(f *os.File) (c connection, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return c, err
	}
	failed := raw.Control(func(p uintptr) {
		fd := int(p)
		var local, peer unix.Sockaddr
		if peer, err = unix.Getpeername(fd); err != nil {
			return
		}
		if local, err = unix.Getsockname(fd); err != nil {
			return
		}
		c.local, c.peer = addrPort(local), addrPort(peer)
		c.next, c.expected, err = sequence(fd)
	})
	return c, errors.Join(failed, err)
}

// sequence reads both sequence numbers, which the kernel tells in repair mode only.
func sequence(fd int) (next, expected uint32, err error) {
	const repairOff = -1 // without a probe to the peer
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1); err != nil {
		return 0, 0, fmt.Errorf("repair mode: %w", err)
	}
	defer func() { err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, repairOff)) }()
	for queue, into := range map[int]*uint32{1: &expected, 2: &next} { // TCP_RECV_QUEUE, TCP_SEND_QUEUE
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queue); err != nil {
			return 0, 0, fmt.Errorf("choose queue %d: %w", queue, err)
		}
		v, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ)
		if err != nil {
			return 0, 0, fmt.Errorf("sequence of queue %d: %w", queue, err)
		}
		*into = uint32(v)
	}
	return next, expected, nil
}

// sendStray sends the segment from the connection's address; call it on the
// namespace's thread.
func (c connection) sendStray() error {
	domain := unix.AF_INET
	if c.peer.Addr().Is6() {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, kernelSockaddr(netip.AddrPortFrom(c.local.Addr(), 0))); err != nil {
		return err
	}
	return unix.Sendto(fd, c.segment(), 0, kernelSockaddr(netip.AddrPortFrom(c.peer.Addr(), 0)))
}

// segment is a TCP header with one byte of data.
func (c connection) segment() []byte {
	const ack, push = 0x10, 0x08
	b := make([]byte, 20, 21)
	binary.BigEndian.PutUint16(b[0:], c.local.Port())
	binary.BigEndian.PutUint16(b[2:], c.peer.Port())
	binary.BigEndian.PutUint32(b[4:], c.next+strayDistance)
	binary.BigEndian.PutUint32(b[8:], c.expected)
	b[12], b[13] = 20/4<<4, ack|push
	binary.BigEndian.PutUint16(b[14:], 0xffff)
	b = append(b, '\n')
	binary.BigEndian.PutUint16(b[16:], c.checksum(b))
	return b
}

// checksum is that of RFC 9293, section 3.1, over the pseudo-header and the segment.
func (c connection) checksum(segment []byte) uint16 {
	var sum uint32
	add := func(b []byte) {
		for i, v := range b {
			sum += uint32(v) << (8 * (1 - i%2))
		}
	}
	add(c.local.Addr().AsSlice())
	add(c.peer.Addr().AsSlice())
	sum += uint32(unix.IPPROTO_TCP) + uint32(len(segment))
	add(segment)
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
