package socket

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Unreachable is an ICMP error (of the version that goes with the addresses) about a
// datagram: that it, or an equal one, did not arrive.
type Unreachable struct{ Type, Code uint8 }

// PortUnreachable is the error of a port that nobody listens on.
func PortUnreachable(a netip.Addr) Unreachable {
	if a.Is4() {
		return Unreachable{3, 3}
	}
	return Unreachable{1, 4}
}

// NextError takes an ICMP error from the queue of a connected UDP socket. ok is false
// if there is none, or none that a sender has to know of: that a datagram is too big
// is between the relay and the endpoint.
func NextError(fd int) (u Unreachable, ok bool) {
	var control [256]byte
	for {
		h := unix.Msghdr{Control: &control[0]}
		h.SetControllen(len(control))
		if _, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&h)), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT); errno != 0 {
			return Unreachable{}, false
		}
		rest := control[:h.Controllen]
		for len(rest) >= unix.SizeofCmsghdr {
			c := (*unix.Cmsghdr)(unsafe.Pointer(&rest[0]))
			size := int(c.Len)
			if size < unix.SizeofCmsghdr || size > len(rest) {
				break
			}
			// struct sock_extended_err: errno, origin, type, code, pad, info, data.
			data := rest[unix.CmsgLen(0):size]
			isError := c.Level == unix.IPPROTO_IP && c.Type == unix.IP_RECVERR || c.Level == unix.IPPROTO_IPV6 && c.Type == unix.IPV6_RECVERR
			if isError && len(data) >= 7 {
				u = Unreachable{data[5], data[6]}
				switch origin := data[4]; {
				case origin == unix.SO_EE_ORIGIN_ICMP && u.Type == 3 && u.Code != 4, origin == unix.SO_EE_ORIGIN_ICMP6 && u.Type == 1:
					return u, true
				}
			}
			rest = rest[min(unix.CmsgSpace(len(data)), len(rest)):]
		}
	}
}

// ICMP sends errors through raw sockets, which need CAP_NET_RAW.
type ICMP struct{ four, six int }

// NewICMP returns an ICMP that has no sockets yet.
func NewICMP() *ICMP { return &ICMP{-1, -1} }

// Close closes its sockets.
func (c *ICMP) Close() {
	for _, fd := range []int{c.four, c.six} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	c.four, c.six = -1, -1
}

// Send tells client that what it sent to local did not arrive, as local would.
func (c *ICMP) Send(u Unreachable, client, local netip.AddrPort) error {
	fd := &c.four
	protocol := unix.IPPROTO_ICMP
	packet := append([]byte{u.Type, u.Code, 0, 0, 0, 0, 0, 0}, quoted(client, local)...)
	if client.Addr().Is4() {
		binary.BigEndian.PutUint16(packet[2:], checksum(packet))
	} else { // the kernel adds the checksum
		fd, protocol = &c.six, unix.IPPROTO_ICMPV6
	}
	if *fd < 0 {
		n, err := unix.Socket(domain(client.Addr()), unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
		if err != nil {
			return fmt.Errorf("creating a raw socket for ICMP errors, which needs CAP_NET_RAW: %w", err)
		}
		*fd = n
		// local may be an address that is only routed here.
		_ = setOptions(n, byFamily(client.Addr().Is4(), unix.IP_FREEBIND, unix.IPV6_FREEBIND, "IP_FREEBIND"))
		takeNothing(n, client.Addr().Is4())
	}
	var sa sockaddr
	h := unix.Msghdr{Name: &sa[0], Namelen: sa.put(netip.AddrPortFrom(client.Addr(), 0))}
	v := unix.Iovec{Base: &packet[0]}
	v.SetLen(len(packet))
	h.Iov = &v
	h.SetIovlen(1)
	var buffer [controlSize]byte
	control := appendSource(buffer[:0], local.Addr())
	h.Control = &control[0]
	h.SetControllen(len(control))
	if _, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(*fd), uintptr(unsafe.Pointer(&h)), unix.MSG_DONTWAIT); errno != 0 {
		return fmt.Errorf("sending an ICMP error to %s: %w", client.Addr(), errno)
	}
	return nil
}

// takeNothing keeps a raw socket from collecting what the node receives.
func takeNothing(fd int, four bool) {
	const filter = 1 // ICMP_FILTER and ICMPV6_FILTER: a bit for each type to block
	if four {
		_ = unix.SetsockoptInt(fd, unix.SOL_RAW, filter, -1)
		return
	}
	_ = unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, filter, &unix.ICMPv6Filter{Data: [8]uint32{
		0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff,
	}})
}

// quoted is the beginning of the datagram that an error is about, as ICMP errors
// quote it.
func quoted(client, local netip.AddrPort) []byte {
	udp := make([]byte, 8)
	binary.BigEndian.PutUint16(udp[0:], client.Port())
	binary.BigEndian.PutUint16(udp[2:], local.Port())
	binary.BigEndian.PutUint16(udp[4:], 8)
	if client.Addr().Is4() {
		ip := make([]byte, 20, 28)
		ip[0] = 0x45
		binary.BigEndian.PutUint16(ip[2:], 28)
		ip[8], ip[9] = 64, unix.IPPROTO_UDP
		from, to := client.Addr().As4(), local.Addr().As4()
		copy(ip[12:], from[:])
		copy(ip[16:], to[:])
		binary.BigEndian.PutUint16(ip[10:], checksum(ip))
		return append(ip, udp...)
	}
	ip := make([]byte, 40, 48)
	ip[0] = 0x60
	binary.BigEndian.PutUint16(ip[4:], 8)
	ip[6], ip[7] = unix.IPPROTO_UDP, 64
	from, to := client.Addr().As16(), local.Addr().As16()
	copy(ip[8:], from[:])
	copy(ip[24:], to[:])
	return append(ip, udp...)
}

// checksum is the Internet checksum (RFC 1071) of a packet of even length whose own
// field is zero.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
