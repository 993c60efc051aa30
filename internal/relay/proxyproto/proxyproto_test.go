package proxyproto

import (
	"bytes"
	"net/netip"
	"testing"
)

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
		want := Header{version%2 + 1, netip.AddrPortFrom(a, fromPort), netip.AddrPortFrom(b, toPort)}
		header := want.Bytes()
		have, rest, err := Parse(append(header, "GET /"...))
		if err != nil || have != want || string(rest) != "GET /" {
			t.Errorf("%+v became %q, which is read as %+v, rest %q, err %v", want, header, have, rest, err)
		}
	})
}

// FuzzParseProxy: whatever comes, the parser neither fails hard nor takes what the
// writer would not write.
func FuzzParseProxy(f *testing.F) {
	client, local := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.96.0.1:80")
	f.Add(Header{1, client, local}.Bytes())
	f.Add(Header{2, client, local}.Bytes())
	f.Add([]byte("PROXY TCP4 1.2.3.4 5.6.7.8 1 99999\r\n"))
	f.Add([]byte("PROXY UNKNOWN\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, rest, err := Parse(b)
		if err != nil {
			return
		}
		if len(rest) > len(b) || !h.Client.IsValid() || !h.Local.IsValid() {
			t.Errorf("%q is read as %+v", b, h)
		}
		if h.Version == 2 && !bytes.Equal(append(h.Bytes(), rest...), b) {
			t.Errorf("%q is read as %+v, which is written differently", b, h)
		}
	})
}
