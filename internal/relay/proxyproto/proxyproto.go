// Package proxyproto writes and reads the header of the PROXY protocol, versions 1 and 2,
// for TCP over IPv4 and IPv6, without extensions
// (https://www.haproxy.org/download/2.8/doc/proxy-protocol.txt).
package proxyproto

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// signature begins every header of version 2.
const signature = "\r\n\r\n\x00\r\nQUIT\n"

// Header is what a header says of a connection.
type Header struct {
	Version       uint8          // 1 or 2
	Client, Local netip.AddrPort // of one family; Local is where the client connected to
}

// Bytes returns the header as it is sent.
func (h Header) Bytes() []byte {
	client, local := h.Client, h.Local
	four := client.Addr().Is4() && local.Addr().Is4()
	if h.Version == 1 {
		family := "TCP6"
		if four {
			family = "TCP4"
		}
		return fmt.Appendf(nil, "PROXY %s %s %s %d %d\r\n", family, client.Addr(), local.Addr(), client.Port(), local.Port())
	}
	b := append(make([]byte, 0, 52), signature...)
	b = append(b, 0x21) // version 2, PROXY
	if four {
		b = append(b, 0x11, 0, 12) // TCP over IPv4, length of the rest
		from, to := client.Addr().As4(), local.Addr().As4()
		b = append(append(b, from[:]...), to[:]...)
	} else {
		b = append(b, 0x21, 0, 36)
		from, to := client.Addr().As16(), local.Addr().As16()
		b = append(append(b, from[:]...), to[:]...)
	}
	b = binary.BigEndian.AppendUint16(b, client.Port())
	return binary.BigEndian.AppendUint16(b, local.Port())
}

// Parse reads the header at the beginning of b, and returns what follows it.
func Parse(b []byte) (Header, []byte, error) {
	if rest, ok := bytes.CutPrefix(b, []byte(signature)); ok {
		return parse2(rest)
	}
	line, _, ok := bytes.Cut(b[:min(len(b), 107)], []byte("\r\n"))
	if !ok {
		return Header{}, nil, errors.New("no end of line in 107 bytes")
	}
	rest := b[len(line)+2:]
	f := strings.Split(string(line), " ")
	if len(f) != 6 || f[0] != "PROXY" || f[1] != "TCP4" && f[1] != "TCP6" {
		return Header{}, nil, fmt.Errorf("line %q", line)
	}
	var ends [2]netip.AddrPort
	for i := range ends {
		a, err := netip.ParseAddr(f[2+i])
		port, portErr := strconv.ParseUint(f[4+i], 10, 16)
		if err := errors.Join(err, portErr); err != nil {
			return Header{}, nil, err
		}
		if a.Is4() != (f[1] == "TCP4") || a.Zone() != "" || strconv.FormatUint(port, 10) != f[4+i] {
			return Header{}, nil, fmt.Errorf("%s and %s in a line for %s", f[2+i], f[4+i], f[1])
		}
		ends[i] = netip.AddrPortFrom(a, uint16(port))
	}
	return Header{1, ends[0], ends[1]}, rest, nil
}

// parse2 reads what follows the signature of version 2.
func parse2(b []byte) (Header, []byte, error) {
	if len(b) < 4 || b[0] != 0x21 {
		return Header{}, nil, errors.New("no PROXY command of version 2")
	}
	size, length := 0, int(binary.BigEndian.Uint16(b[2:]))
	switch b[1] {
	case 0x11:
		size = 4
	case 0x21:
		size = 16
	default:
		return Header{}, nil, fmt.Errorf("family and protocol %#x", b[1])
	}
	b = b[4:]
	if length != 2*size+4 || len(b) < length {
		return Header{}, nil, fmt.Errorf("length %d with %d bytes there", length, len(b))
	}
	from, _ := netip.AddrFromSlice(b[:size])
	to, _ := netip.AddrFromSlice(b[size : 2*size])
	return Header{2,
		netip.AddrPortFrom(from, binary.BigEndian.Uint16(b[2*size:])),
		netip.AddrPortFrom(to, binary.BigEndian.Uint16(b[2*size+2:])),
	}, b[length:], nil
}
