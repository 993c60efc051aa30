package socket

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// maxDatagram is the most that a read can bring, with or without UDP_GRO.
	maxDatagram = 64 << 10
	// maxSegments is how many datagrams the kernel takes as one (UDP_MAX_SEGMENTS).
	maxSegments = 64
	// maxJoined is how many bytes it takes as one, headers of both families considered.
	maxJoined = 65535 - 60 - 8
	// controlSize holds UDP_GRO or UDP_SEGMENT and the packet information of IPv6.
	controlSize = 96
)

// message is the kernel's struct mmsghdr.
type message struct {
	header unix.Msghdr
	n      uint32
	_      [4]byte
}

// Peer is whom datagrams are sent to on one socket. Datagrams of one Peer that follow
// each other and have the same size are handed to the kernel as one (UDP_SEGMENT).
type Peer struct {
	name       sockaddr // with the zone of IPv6
	nameLen    uint32   // 0: the socket is connected
	local      netip.Addr
	maxSegment int // larger ones cannot be joined on the way to this peer; 0: not known
}

// Inbox receives datagrams into slots.
type Inbox struct {
	messages []message
	vectors  []unix.Iovec
	names    []sockaddr
	controls [][controlSize]byte
	buffer   []byte // maxDatagram for each slot; the kernel backs only what is used
}

// NewInbox returns an Inbox with the given number of slots.
func NewInbox(slots int) *Inbox {
	in := &Inbox{
		messages: make([]message, slots),
		vectors:  make([]unix.Iovec, slots),
		names:    make([]sockaddr, slots),
		controls: make([][controlSize]byte, slots),
		buffer:   make([]byte, slots*maxDatagram),
	}
	for i := range in.messages {
		in.vectors[i].Base = &in.buffer[i*maxDatagram]
		in.vectors[i].SetLen(maxDatagram)
		h := &in.messages[i].header
		h.Name = &in.names[i][0]
		h.Iov = &in.vectors[i]
		h.SetIovlen(1)
		h.Control = &in.controls[i][0]
	}
	return in
}

// Slots returns the number of slots.
func (in *Inbox) Slots() int { return len(in.messages) }

// Receive fills slots from the given one on with what a socket has, and returns how many.
func (in *Inbox) Receive(fd, from int) (int, error) {
	for i := from; i < len(in.messages); i++ {
		h := &in.messages[i].header
		h.Namelen = uint32(len(in.names[i]))
		h.SetControllen(controlSize)
		h.Flags = 0
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&in.messages[from])), uintptr(len(in.messages)-from), unix.MSG_DONTWAIT, 0, 0)
	return result(n, errno)
}

// Data returns what slot i received: one datagram, or several of one sender.
func (in *Inbox) Data(i int) []byte {
	return in.buffer[i*maxDatagram:][:in.messages[i].n:maxDatagram]
}

// From returns the sender of slot i.
func (in *Inbox) From(i int) netip.AddrPort { return in.names[i].get() }

// Details returns the address that the datagrams of slot i were sent to, if the socket
// was prepared to tell, and the size of each but the last; 0: there is only one.
func (in *Inbox) Details(i int) (local netip.Addr, segment int) {
	rest := in.controls[i][:in.messages[i].header.Controllen]
	for len(rest) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&rest[0]))
		size := int(h.Len)
		if size < unix.SizeofCmsghdr || size > len(rest) {
			break
		}
		data := rest[unix.CmsgLen(0):size]
		switch {
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			local = netip.AddrFrom4([4]byte(data[8:12])) // ipi_addr
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			local = netip.AddrFrom16([16]byte(data[:16]))
		case h.Level == unix.SOL_UDP && h.Type == unix.UDP_GRO && len(data) >= 4:
			segment = int(int32(binary.NativeEndian.Uint32(data)))
		}
		rest = rest[min(unix.CmsgSpace(len(data)), len(rest)):]
	}
	return local, segment
}

// Answer returns the Peer that reaches the sender of slot i from the given address.
func (in *Inbox) Answer(i int, local netip.Addr) Peer {
	return Peer{name: in.names[i], nameLen: in.messages[i].header.Namelen, local: local}
}

// PeerAt returns the Peer that reaches an address, without a zone, from another one.
func PeerAt(to netip.AddrPort, local netip.Addr) Peer {
	p := Peer{local: local}
	p.nameLen = p.name.put(to)
	return p
}

// Outbox collects datagrams for one socket. What is put into it is kept until Send.
type Outbox struct {
	fd       int
	messages []message
	parcels  []parcel
	vectors  []unix.Iovec
	controls [][controlSize]byte
	n, nv    int
}

// parcel is what is known of a message besides its header.
type parcel struct {
	peer    *Peer
	vector  int // of its vectors, the first
	vectors int
	bytes   int
	segment int // the size of its datagrams
	count   int // of datagrams
	closed  bool
}

// NewOutbox returns an Outbox for the given number of messages.
func NewOutbox(size int) *Outbox {
	return &Outbox{
		messages: make([]message, size),
		parcels:  make([]parcel, size),
		vectors:  make([]unix.Iovec, size),
		controls: make([][controlSize]byte, size),
	}
}

// Put adds what a slot of an Inbox received, which is kept until Send. What is there
// for another socket, or too much, is sent first.
func (o *Outbox) Put(fd int, to *Peer, data []byte, segment int) {
	if o.n > 0 && (fd != o.fd || o.nv == len(o.vectors)) {
		o.Send()
	}
	o.fd = fd
	if len(data) == 0 {
		segment = 0
	}
	if segment == 0 || segment > len(data) {
		segment = len(data)
	}
	count := 1
	if segment > 0 {
		count = (len(data) + segment - 1) / segment
	}
	v := &o.vectors[o.nv]
	v.Base = unsafe.SliceData(data)
	v.SetLen(len(data))
	o.nv++
	if o.n > 0 {
		if last := &o.parcels[o.n-1]; last.joins(to, len(data), segment, count) {
			last.vectors++
			last.bytes += len(data)
			last.count += count
			last.closed = len(data)%last.segment != 0
			return
		}
	}
	o.parcels[o.n] = parcel{
		peer: to, vector: o.nv - 1, vectors: 1, bytes: len(data), segment: segment, count: count,
		closed: segment == 0 || len(data)%segment != 0,
	}
	o.n++
}

// joins reports whether more datagrams can become part of the message: all but the
// last of a message have the same size.
func (p *parcel) joins(to *Peer, size, segment, count int) bool {
	return p.peer == to && !p.closed && (segment == p.segment || count == 1 && size < p.segment && size > 0) &&
		p.bytes+size <= maxJoined && p.count+count <= maxSegments && (to.maxSegment == 0 || p.segment <= to.maxSegment)
}

// Send sends everything. Datagrams that the socket has no room for are lost, as
// datagrams are.
func (o *Outbox) Send() {
	for i := range o.n {
		o.seal(i)
	}
	for at := 0; at < o.n; {
		n, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(o.fd), uintptr(unsafe.Pointer(&o.messages[at])), uintptr(o.n-at), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		switch {
		case errno == 0:
			at += int(n)
		case errno == unix.EINTR:
		case errno == unix.EAGAIN || errno == unix.ENOBUFS:
			at = o.n
		default:
			// An error that an earlier datagram brought is reported here too: one more
			// try tells.
			o.sendOne(at)
			at++
		}
	}
	clear(o.vectors[:o.nv])
	o.n, o.nv = 0, 0
}

// seal completes the header of message i.
func (o *Outbox) seal(i int) {
	p, h := &o.parcels[i], &o.messages[i].header
	*h = unix.Msghdr{Iov: &o.vectors[p.vector]}
	h.SetIovlen(p.vectors)
	if p.peer.nameLen > 0 {
		h.Name, h.Namelen = &p.peer.name[0], p.peer.nameLen
	}
	control := o.controls[i][:0]
	control = appendSource(control, p.peer.local)
	if p.count > 1 {
		var size [2]byte
		binary.NativeEndian.PutUint16(size[:], uint16(p.segment))
		control = appendControl(control, unix.SOL_UDP, unix.UDP_SEGMENT, size[:])
	}
	if len(control) > 0 {
		h.Control = &control[0]
		h.SetControllen(len(control))
	}
}

// sendOne sends message i, if need be datagram by datagram.
func (o *Outbox) sendOne(i int) {
	p := &o.parcels[i]
	err := o.sendmsg(&o.messages[i].header)
	if p.count == 1 || !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EMSGSIZE) && !errors.Is(err, unix.EIO) {
		return
	}
	// The datagrams are larger than the link takes, or the link cannot cut them.
	p.peer.maxSegment = max(p.segment-1, 1)
	h := o.messages[i].header
	h.Control = nil
	h.SetControllen(0)
	control := appendSource(o.controls[i][:0], p.peer.local)
	if len(control) > 0 {
		h.Control = &control[0]
		h.SetControllen(len(control))
	}
	for _, v := range o.vectors[p.vector:][:p.vectors] {
		data := unsafe.Slice(v.Base, int(v.Len))
		for len(data) > 0 {
			n := min(p.segment, len(data))
			one := unix.Iovec{Base: &data[0]}
			one.SetLen(n)
			h.Iov = &one
			h.SetIovlen(1)
			_ = o.sendmsg(&h) // lost, as datagrams are
			data = data[n:]
		}
	}
}

func (o *Outbox) sendmsg(h *unix.Msghdr) error {
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(o.fd), uintptr(unsafe.Pointer(h)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if errno != 0 {
		return errno
	}
	return nil
}

// appendSource has a message leave from an address.
func appendSource(control []byte, from netip.Addr) []byte {
	switch {
	case from.Is4():
		var info [unix.SizeofInet4Pktinfo]byte
		ip := from.As4()
		copy(info[4:], ip[:]) // ipi_spec_dst
		return appendControl(control, unix.IPPROTO_IP, unix.IP_PKTINFO, info[:])
	case from.Is6():
		var info [unix.SizeofInet6Pktinfo]byte
		ip := from.As16()
		copy(info[:], ip[:])
		return appendControl(control, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, info[:])
	}
	return control
}

// appendControl appends a control message.
func appendControl(control []byte, level, kind int32, data []byte) []byte {
	start := len(control)
	control = control[:start+unix.CmsgSpace(len(data))]
	clear(control[start:])
	h := (*unix.Cmsghdr)(unsafe.Pointer(&control[start]))
	h.Level, h.Type = level, kind
	h.SetLen(unix.CmsgLen(len(data)))
	copy(control[start+unix.CmsgLen(0):], data)
	return control
}
