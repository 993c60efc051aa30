package relay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
)

// proxied is what a header of the PROXY protocol says.
type proxied struct {
	version       uint8
	client, local netip.AddrPort
}

// parseProxy reads the header as an endpoint does, written after the protocol's text.
func parseProxy(b []byte) (proxied, []byte, error) {
	if rest, ok := bytes.CutPrefix(b, []byte(proxySignature)); ok {
		return parseProxy2(rest)
	}
	line, _, ok := bytes.Cut(b[:min(len(b), 107)], []byte("\r\n"))
	if !ok {
		return proxied{}, nil, errors.New("no end of line in 107 bytes")
	}
	rest := b[len(line)+2:]
	f := strings.Split(string(line), " ")
	if len(f) != 6 || f[0] != "PROXY" || f[1] != "TCP4" && f[1] != "TCP6" {
		return proxied{}, nil, fmt.Errorf("line %q", line)
	}
	var ends [2]netip.AddrPort
	for i := range ends {
		a, err := netip.ParseAddr(f[2+i])
		port, portErr := strconv.ParseUint(f[4+i], 10, 16)
		if err := errors.Join(err, portErr); err != nil {
			return proxied{}, nil, err
		}
		if a.Is4() != (f[1] == "TCP4") || a.Zone() != "" || strconv.FormatUint(port, 10) != f[4+i] {
			return proxied{}, nil, fmt.Errorf("%s and %s in a line for %s", f[2+i], f[4+i], f[1])
		}
		ends[i] = netip.AddrPortFrom(a, uint16(port))
	}
	return proxied{1, ends[0], ends[1]}, rest, nil
}

func parseProxy2(b []byte) (proxied, []byte, error) {
	if len(b) < 4 || b[0] != 0x21 {
		return proxied{}, nil, errors.New("no PROXY command of version 2")
	}
	size, length := 0, int(binary.BigEndian.Uint16(b[2:]))
	switch b[1] {
	case 0x11:
		size = 4
	case 0x21:
		size = 16
	default:
		return proxied{}, nil, fmt.Errorf("family and protocol %#x", b[1])
	}
	b = b[4:]
	if length != 2*size+4 || len(b) < length {
		return proxied{}, nil, fmt.Errorf("length %d with %d bytes there", length, len(b))
	}
	from, _ := netip.AddrFromSlice(b[:size])
	to, _ := netip.AddrFromSlice(b[size : 2*size])
	return proxied{2,
		netip.AddrPortFrom(from, binary.BigEndian.Uint16(b[2*size:])),
		netip.AddrPortFrom(to, binary.BigEndian.Uint16(b[2*size+2:])),
	}, b[length:], nil
}

// FuzzProxyHeader: what the writer writes is what the parser reads, for all addresses.
func FuzzProxyHeader(f *testing.F) {
	f.Add(uint8(1), []byte{10, 0, 0, 1}, []byte{10, 96, 0, 1}, uint16(40000), uint16(80))
	f.Add(uint8(2), []byte{10, 0, 0, 1}, []byte{10, 96, 0, 1}, uint16(0), uint16(65535))
	f.Add(uint8(1), bytes.Repeat([]byte{0xfd}, 16), make([]byte, 16), uint16(1), uint16(2))
	f.Add(uint8(2), bytes.Repeat([]byte{0xfd}, 16), make([]byte, 16), uint16(1), uint16(2))
	f.Add(uint8(1), append(make([]byte, 10), 255, 255, 1, 2, 3, 4), make([]byte, 16), uint16(1), uint16(2))
	f.Fuzz(func(t *testing.T, version uint8, from, to []byte, fromPort, toPort uint16) {
		a, ok := netip.AddrFromSlice(from)
		b, ok2 := netip.AddrFromSlice(to)
		if !ok || !ok2 || a.Is4() != b.Is4() {
			return
		}
		want := proxied{version%2 + 1, netip.AddrPortFrom(a, fromPort), netip.AddrPortFrom(b, toPort)}
		header := proxyHeader(want.version, want.client, want.local)
		have, rest, err := parseProxy(append(header, "GET /"...))
		if err != nil || have != want || string(rest) != "GET /" {
			t.Errorf("%+v became %q, which is read as %+v, rest %q, err %v", want, header, have, rest, err)
		}
	})
}

// FuzzParseProxy: whatever comes, the parser neither fails hard nor takes what the
// writer would not write.
func FuzzParseProxy(f *testing.F) {
	client, local := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.96.0.1:80")
	f.Add(proxyHeader(1, client, local))
	f.Add(proxyHeader(2, client, local))
	f.Add([]byte("PROXY TCP4 1.2.3.4 5.6.7.8 1 99999\r\n"))
	f.Add([]byte("PROXY UNKNOWN\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, rest, err := parseProxy(b)
		if err != nil {
			return
		}
		if len(rest) > len(b) || !h.client.IsValid() || !h.local.IsValid() {
			t.Errorf("%q is read as %+v", b, h)
		}
		if h.version == 2 && !bytes.Equal(append(proxyHeader(2, h.client, h.local), rest...), b) {
			t.Errorf("%q is read as %+v, which is written differently", b, h)
		}
	})
}
