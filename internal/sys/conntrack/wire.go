package conntrack

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Numbers of linux/netfilter/nfnetlink_conntrack.h. Attribute values are big
// endian.
const (
	msgNew    = unix.NFNL_SUBSYS_CTNETLINK << 8
	msgGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	msgDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2

	attrOrig   = 1
	attrReply  = 2
	attrStatus = 3
	attrProto  = 4
	attrNATSrc = 6
	attrLife   = 7
	attrID     = 12
	attrNATDst = 13
	attrZone   = 18
	attrFilter = 25

	tupleIP    = 1
	tupleProto = 2

	ipv4Src = 1
	ipv4Dst = 2
	ipv6Src = 3
	ipv6Dst = 4

	protoNum     = 1
	protoSrcPort = 2
	protoDstPort = 3

	// statusSeenReply is IPS_SEEN_REPLY of linux/netfilter/nf_conntrack_common.h.
	statusSeenReply = 1 << 1
	statusAssured   = 1 << 2
	statusConfirmed = 1 << 3

	natV4Min = 1
	natV4Max = 2
	natPorts = 3
	natV6Min = 4
	natV6Max = 5
	portMin  = 1
	portMax  = 2

	protoTCP       = 1
	tcpState       = 1
	tcpFlagsOrig   = 4
	tcpFlagsReply  = 5
	stateEstab     = 3
	flagBeLiberal  = 1 << 3 // the window is not known
	secondsToReset = 300    // the life of an entry whose client is silent

	filterOrigFlags = 1
	// Which fields of the tuple a listing must match (the kernel's
	// nf_internals.h; Linux 5.8 and later).
	filterIPDst    = 1 << 1
	filterProtoNum = 1 << 3
	filterDstPort  = 1 << 5

	headerLen  = 4 // struct nfgenmsg
	attrHeader = 4 // struct nlattr
)

func header(family uint8) []byte { return []byte{family, unix.NFNETLINK_V0, 0, 0} }

// listRequest asks for flows of a protocol, of one original destination if dst is valid.
// Without filter the kernel hands out everything of the family. Of an IPv6
// destination only the port is asked for: seen on Linux 6.18, the kernel returns
// just the flows to other addresses than the one in the filter.
func listRequest(family uint8, p protocol, dst netip.AddrPort, filter bool) []byte {
	if !filter {
		return header(family)
	}
	flags := uint32(filterProtoNum)
	if dst.IsValid() {
		flags |= filterDstPort
	}
	byAddr := dst.IsValid() && dst.Addr().Is4()
	if byAddr {
		flags |= filterIPDst
	}
	b := nested(header(family), attrOrig, func(b []byte) []byte {
		if byAddr {
			// The kernel wants both addresses there, and looks at the one that
			// the flags name.
			a := dst.Addr().AsSlice()
			b = nested(b, tupleIP, func(b []byte) []byte { return attribute(attribute(b, ipv4Src, a...), ipv4Dst, a...) })
		}
		return nested(b, tupleProto, func(b []byte) []byte {
			b = attribute(b, protoNum, p.number())
			if dst.IsValid() {
				b = attribute(b, protoDstPort, bytes2(dst.Port())...)
			}
			return b
		})
	})
	return nested(b, attrFilter, func(b []byte) []byte {
		// Unlike everything else the flags are in the host's byte order.
		return attribute(b, filterOrigFlags, binary.NativeEndian.AppendUint32(nil, flags)...)
	})
}

// createRequest asks for an established connection from f.Src to f.Dst that is
// translated so that replies come from f.From and are sent to f.To.
func createRequest(family uint8, f *Flow) []byte {
	b := append(make([]byte, 0, 256), header(family)...)
	b = nested(b, attrOrig, func(b []byte) []byte { return tuple(b, protocol(f.TCP), f.Src, f.Dst) })
	b = nested(b, attrReply, func(b []byte) []byte { return tuple(b, protocol(f.TCP), f.Dst, f.Src) })
	b = attribute(b, attrStatus, 0, 0, 0, statusSeenReply|statusAssured|statusConfirmed)
	b = attribute(b, attrLife, 0, 0, secondsToReset>>8, secondsToReset&0xff)
	b = nested(b, attrProto, func(b []byte) []byte {
		return nested(b, protoTCP, func(b []byte) []byte {
			b = attribute(b, tcpState, stateEstab)
			b = attribute(b, tcpFlagsOrig, flagBeLiberal, flagBeLiberal) // and which of them are meant
			return attribute(b, tcpFlagsReply, flagBeLiberal, flagBeLiberal)
		})
	})
	if f.To != f.Src {
		b = nested(b, attrNATSrc, func(b []byte) []byte { return translation(b, f.To) })
	}
	b = nested(b, attrNATDst, func(b []byte) []byte { return translation(b, f.From) })
	if f.Zone != 0 {
		b = attribute(b, attrZone, bytes2(f.Zone)...)
	}
	return b
}

// translation appends a range of one address and port.
func translation(b []byte, to netip.AddrPort) []byte {
	low, high := uint16(natV4Min), uint16(natV4Max)
	if to.Addr().Is6() {
		low, high = natV6Min, natV6Max
	}
	b = attribute(b, low, to.Addr().AsSlice()...)
	b = attribute(b, high, to.Addr().AsSlice()...)
	return nested(b, natPorts, func(b []byte) []byte {
		return attribute(attribute(b, portMin, bytes2(to.Port())...), portMax, bytes2(to.Port())...)
	})
}

// tuple appends the addresses and ports of one direction.
func tuple(b []byte, p protocol, from, to netip.AddrPort) []byte {
	src, dst := uint16(ipv4Src), uint16(ipv4Dst)
	if from.Addr().Is6() {
		src, dst = ipv6Src, ipv6Dst
	}
	b = nested(b, tupleIP, func(b []byte) []byte {
		return attribute(attribute(b, src, from.Addr().AsSlice()...), dst, to.Addr().AsSlice()...)
	})
	return nested(b, tupleProto, func(b []byte) []byte {
		b = attribute(b, protoNum, p.number())
		b = attribute(b, protoSrcPort, bytes2(from.Port())...)
		return attribute(b, protoDstPort, bytes2(to.Port())...)
	})
}

func deleteRequest(family uint8, f *Flow) []byte {
	b := append(make([]byte, 0, 128), header(family)...)
	b = nested(b, attrOrig, func(b []byte) []byte { return tuple(b, protocol(f.TCP), f.Src, f.Dst) })
	b = attribute(b, attrID, byte(f.ID>>24), byte(f.ID>>16), byte(f.ID>>8), byte(f.ID))
	if f.Zone != 0 {
		b = attribute(b, attrZone, bytes2(f.Zone)...)
	}
	return b
}

// attribute appends a netlink attribute, padded as the kernel wants it.
func attribute(b []byte, typ uint16, value ...byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attrHeader+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// nested appends an attribute that holds those which fill appends.
func nested(b []byte, typ uint16, fill func([]byte) []byte) []byte {
	start := len(b)
	b = fill(attribute(b, typ|unix.NLA_F_NESTED))
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

func bytes2(v uint16) []byte { return []byte{byte(v >> 8), byte(v)} }

// decode reads one entry; ok is false if it is neither UDP nor TCP.
func decode(msg []byte) (f Flow, ok bool, err error) {
	if len(msg) < headerLen {
		return f, false, fmt.Errorf("decode a flow: message of %d bytes", len(msg))
	}
	var number uint8
	for typ, v := range attributes(msg[headerLen:]) {
		switch {
		case typ == attrOrig:
			number = decodeTuple(v, &f.Src, &f.Dst)
		case typ == attrReply:
			decodeTuple(v, &f.From, &f.To)
		case typ == attrStatus && len(v) == 4:
			f.Answered = binary.BigEndian.Uint32(v)&statusSeenReply != 0
		case typ == attrID && len(v) == 4:
			f.ID = binary.BigEndian.Uint32(v)
		case typ == attrZone && len(v) == 2:
			f.Zone = binary.BigEndian.Uint16(v)
		}
	}
	f.TCP = number == unix.IPPROTO_TCP
	ok = f.TCP || number == unix.IPPROTO_UDP
	if ok && !(f.Src.IsValid() && f.Dst.IsValid() && f.From.IsValid() && f.To.IsValid()) {
		return f, false, fmt.Errorf("decode a flow: an address is missing in %s", f)
	}
	return f, ok, nil
}

// decodeTuple returns the tuple's protocol.
func decodeTuple(b []byte, src, dst *netip.AddrPort) (proto uint8) {
	var srcAddr, dstAddr netip.Addr
	var srcPort, dstPort uint16
	for typ, v := range attributes(b) {
		switch typ {
		case tupleIP:
			for typ, v := range attributes(v) {
				switch typ {
				case ipv4Src, ipv6Src:
					srcAddr, _ = netip.AddrFromSlice(v)
				case ipv4Dst, ipv6Dst:
					dstAddr, _ = netip.AddrFromSlice(v)
				}
			}
		case tupleProto:
			for typ, v := range attributes(v) {
				switch {
				case typ == protoNum && len(v) == 1:
					proto = v[0]
				case typ == protoSrcPort && len(v) == 2:
					srcPort = binary.BigEndian.Uint16(v)
				case typ == protoDstPort && len(v) == 2:
					dstPort = binary.BigEndian.Uint16(v)
				}
			}
		}
	}
	*src, *dst = netip.AddrPortFrom(srcAddr, srcPort), netip.AddrPortFrom(dstAddr, dstPort)
	return proto
}

// attributes yields the attributes in b by type. It stops at one that is cut off.
// A library's decoder would do, but at thirty allocations for each entry of a
// table that may hold a million.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attrHeader {
			size := int(binary.NativeEndian.Uint16(b))
			typ := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
			if size < attrHeader || size > len(b) || !yield(typ, b[attrHeader:size]) {
				return
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}
