package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"time"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
)

// Names and numbers of <linux/ip_vs.h>.
const (
	genlName    = "IPVS"
	genlVersion = 1
)

// Commands.
const (
	cmdNewService = 1 + iota
	cmdSetService
	cmdDelService
	cmdGetService
	cmdNewDest
	cmdSetDest
	cmdDelDest
	cmdGetDest
	_ // of the sync daemon
	_
	_
	cmdSetConfig
	cmdGetConfig
)

// Attributes of a message.
const (
	attrService       = 1
	attrDest          = 2
	attrTimeoutTCP    = 4
	attrTimeoutTCPFin = 5
	attrTimeoutUDP    = 6
)

// Attributes of a virtual server ("service").
const (
	svcFamily    = 1
	svcProtocol  = 2
	svcAddr      = 3
	svcPort      = 4
	svcMark      = 5
	svcScheduler = 6
	svcFlags     = 7
	svcTimeout   = 8
	svcNetmask   = 9
)

// Attributes of a real server ("destination").
const (
	destAddr            = 1
	destPort            = 2
	destForwarding      = 3
	destWeight          = 4
	destUpperThreshold  = 5
	destLowerThreshold  = 6
	destActiveConns     = 7
	destInactiveConns   = 8
	destPersistentConns = 9
	destFamily          = 11 // not before Linux 3.18
)

// message is a request with the attributes that fill adds.
func message(cmd uint8, fill func(*netlink.AttributeEncoder)) (genetlink.Message, error) {
	e := netlink.NewAttributeEncoder()
	if fill != nil {
		fill(e)
	}
	data, err := e.Encode()
	if err != nil {
		return genetlink.Message{}, fmt.Errorf("encode the request: %w", err)
	}
	return genetlink.Message{Header: genetlink.Header{Command: cmd, Version: genlVersion}, Data: data}, nil
}

// encodeKey adds what the kernel finds a virtual server by.
func encodeKey(e *netlink.AttributeEncoder, k Key) {
	e.Nested(attrService, func(e *netlink.AttributeEncoder) error {
		encodeKeyFields(e, k)
		return nil
	})
}

func encodeKeyFields(e *netlink.AttributeEncoder, k Key) {
	e.Uint16(svcFamily, uint16(k.Family))
	if k.Mark != 0 {
		e.Uint32(svcMark, k.Mark)
		return
	}
	e.Uint16(svcProtocol, uint16(k.Protocol))
	e.Bytes(svcAddr, padded(k.Addr.Addr()))
	e.Bytes(svcPort, binary.BigEndian.AppendUint16(nil, k.Addr.Port()))
}

// encodeServer adds a virtual server. All four behind the key must be there when one
// is created or updated.
func encodeServer(e *netlink.AttributeEncoder, v VirtualServer) {
	e.Nested(attrService, func(e *netlink.AttributeEncoder) error {
		encodeKeyFields(e, v.Key)
		e.String(svcScheduler, v.Scheduler)
		// The second word is the mask of what is set: everything. Flag "hashed" is the
		// kernel's own: a new server that came with it would never be found.
		flags := binary.NativeEndian.AppendUint32(nil, uint32(v.Flags))
		e.Bytes(svcFlags, binary.NativeEndian.AppendUint32(flags, ^uint32(0)))
		e.Uint32(svcTimeout, uint32(v.Timeout/time.Second))
		if v.Family == IPv6 {
			e.Uint32(svcNetmask, uint32(v.ClientBits)) // a length here, a mask in IPv4
		} else {
			mask := ^uint32(0) << (32 - uint32(v.ClientBits))
			e.Bytes(svcNetmask, binary.BigEndian.AppendUint32(nil, mask))
		}
		return nil
	})
}

// encodeReal adds a real server; one that is deleted needs its address only.
func encodeReal(e *netlink.AttributeEncoder, r RealServer, full bool) {
	e.Nested(attrDest, func(e *netlink.AttributeEncoder) error {
		e.Uint16(destFamily, uint16(familyOf(r.Addr.Addr())))
		e.Bytes(destAddr, padded(r.Addr.Addr()))
		e.Bytes(destPort, binary.BigEndian.AppendUint16(nil, r.Addr.Port()))
		if full {
			e.Uint32(destForwarding, uint32(r.Forwarding))
			e.Uint32(destWeight, r.Weight)
			e.Uint32(destUpperThreshold, 0)
			e.Uint32(destLowerThreshold, 0)
		}
		return nil
	})
}

func encodeTimeouts(e *netlink.AttributeEncoder, t Timeouts) {
	e.Uint32(attrTimeoutTCP, uint32(t.TCP/time.Second))
	e.Uint32(attrTimeoutTCPFin, uint32(t.TCPFin/time.Second))
	e.Uint32(attrTimeoutUDP, uint32(t.UDP/time.Second))
}

// nested decodes the attributes inside the attribute of a message.
func nested(data []byte, attr uint16, field func(*netlink.AttributeDecoder)) error {
	found := false
	outer, err := netlink.NewAttributeDecoder(data)
	if err != nil {
		return err
	}
	for outer.Next() {
		if outer.Type() != attr {
			continue
		}
		found = true
		outer.Nested(func(d *netlink.AttributeDecoder) error {
			for d.Next() {
				field(d)
			}
			return d.Err()
		})
	}
	if err := outer.Err(); err != nil {
		return err
	}
	if !found {
		return fmt.Errorf("attribute %d is missing", attr)
	}
	return nil
}

// decodeServer reads a virtual server out of a message of the kernel.
func decodeServer(data []byte) (VirtualServer, error) {
	var (
		v          VirtualServer
		addr, mask []byte
		port       uint16
	)
	err := nested(data, attrService, func(d *netlink.AttributeDecoder) {
		switch d.Type() {
		case svcFamily:
			v.Family = Family(d.Uint16())
		case svcProtocol:
			v.Protocol = Protocol(d.Uint16())
		case svcAddr:
			addr = d.Bytes()
		case svcPort:
			d.Do(portInto(&port))
		case svcMark:
			v.Mark = d.Uint32()
		case svcScheduler:
			v.Scheduler = d.String()
		case svcFlags:
			d.Do(func(b []byte) error { // the mask follows
				if len(b) != 8 {
					return fmt.Errorf("flags of %d bytes", len(b))
				}
				v.Flags = Flags(binary.NativeEndian.Uint32(b)) &^ hashed
				return nil
			})
		case svcTimeout:
			v.Timeout = time.Duration(d.Uint32()) * time.Second
		case svcNetmask:
			mask = d.Bytes()
		}
	})
	if err != nil {
		return v, err
	}
	if len(mask) != 4 {
		return v, fmt.Errorf("netmask of %d bytes", len(mask))
	}
	// A mask with holes is somebody else's, and its length says enough.
	if ones := binary.NativeEndian.Uint32(mask); v.Family != IPv6 {
		v.ClientBits = uint8(bits.OnesCount32(ones))
	} else if ones <= 128 {
		v.ClientBits = uint8(ones)
	} else {
		return v, fmt.Errorf("netmask of %d bits", ones)
	}
	if v.Mark == 0 {
		a, err := decodeAddr(addr, v.Family)
		if err != nil {
			return v, err
		}
		v.Addr = netip.AddrPortFrom(a, port)
	} else {
		v.Protocol = 0
	}
	return v, v.Key.check()
}

// decodeReal reads a real server of a virtual server of the family out of a message of
// the kernel.
func decodeReal(data []byte, family Family) (Live, error) {
	var (
		l    Live
		addr []byte
		port uint16
	)
	err := nested(data, attrDest, func(d *netlink.AttributeDecoder) {
		switch d.Type() {
		case destAddr:
			addr = d.Bytes()
		case destPort:
			d.Do(portInto(&port))
		case destForwarding:
			l.Forwarding = Forwarding(d.Uint32() & 7) // flags of connections are above
		case destWeight:
			l.Weight = d.Uint32()
		case destActiveConns:
			l.Active = d.Uint32()
		case destInactiveConns:
			l.Inactive = d.Uint32()
		case destPersistentConns:
			l.Persistent = d.Uint32()
		case destFamily:
			family = Family(d.Uint16()) // a foreign tunnel may lead into another one
		}
	})
	if err != nil {
		return l, err
	}
	a, err := decodeAddr(addr, family)
	if err != nil {
		return l, err
	}
	l.Addr = netip.AddrPortFrom(a, port)
	return l, nil
}

// decodeTimeouts reads the answer to a request for the configuration.
func decodeTimeouts(data []byte) (Timeouts, error) {
	var t Timeouts
	d, err := netlink.NewAttributeDecoder(data)
	if err != nil {
		return t, err
	}
	for d.Next() {
		switch d.Type() {
		case attrTimeoutTCP:
			t.TCP = time.Duration(d.Uint32()) * time.Second
		case attrTimeoutTCPFin:
			t.TCPFin = time.Duration(d.Uint32()) * time.Second
		case attrTimeoutUDP:
			t.UDP = time.Duration(d.Uint32()) * time.Second
		}
	}
	return t, d.Err()
}

// padded returns an address in the kernel's union of both families.
func padded(a netip.Addr) []byte {
	return append(a.AsSlice(), make([]byte, 16-a.BitLen()/8)...)
}

// decodeAddr reads an address; the kernel gives 16 bytes in both families.
func decodeAddr(b []byte, f Family) (netip.Addr, error) {
	n := int(f.bits() / 8)
	if f != IPv4 && f != IPv6 {
		return netip.Addr{}, fmt.Errorf("address of family %d", uint16(f))
	}
	if len(b) < n {
		return netip.Addr{}, fmt.Errorf("%s address of %d bytes", f, len(b))
	}
	a, _ := netip.AddrFromSlice(b[:n])
	if a.Is4In6() {
		return netip.Addr{}, fmt.Errorf("IPv4 address %s in the form of IPv6", a)
	}
	return a, nil
}

func portInto(port *uint16) func([]byte) error {
	return func(b []byte) error {
		if len(b) != 2 {
			return errors.New("port is not of 2 bytes")
		}
		*port = binary.BigEndian.Uint16(b)
		return nil
	}
}
