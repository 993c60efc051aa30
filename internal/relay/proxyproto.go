package relay

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// proxySignature begins every header of version 2.
const proxySignature = "\r\n\r\n\x00\r\nQUIT\n"

// proxyHeader returns the header of the PROXY protocol, version 1 or 2, for a TCP
// connection from client that arrived at local
// (https://www.haproxy.org/download/2.8/doc/proxy-protocol.txt).
func proxyHeader(version uint8, client, local netip.AddrPort) []byte {
	four := client.Addr().Is4() && local.Addr().Is4()
	if version == 1 {
		family := "TCP6"
		if four {
			family = "TCP4"
		}
		return fmt.Appendf(nil, "PROXY %s %s %s %d %d\r\n", family, client.Addr(), local.Addr(), client.Port(), local.Port())
	}
	b := append(make([]byte, 0, 52), proxySignature...)
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
