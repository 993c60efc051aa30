package socket

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// listen accepts nothing, which a connect does not need.
func listen(t *testing.T) netip.AddrPort {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return netip.MustParseAddrPort(ln.Addr().String())
}

// Sockets with a client's address have ports below those that clients choose; one
// port serves for several endpoints, and one that the endpoint sees already is
// passed over.
func TestPortsOfClientsAddresses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: sockets with others' addresses")
	}
	client := netip.MustParseAddr("127.0.0.9")
	for _, udp := range []bool{false, true} {
		first, second := listen(t), listen(t)
		dial := func(to netip.AddrPort, next uint16) netip.AddrPort {
			t.Helper()
			fd, err := Dial(Dialing{To: to, From: client, Ports: &Ports{next: next}, UDP: udp})
			if err != nil && !errors.Is(err, unix.EINPROGRESS) {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Close(fd) })
			at, err := LocalAddr(fd)
			if err != nil {
				t.Fatal(err)
			}
			return at
		}
		if got := dial(first, 20000); got != netip.AddrPortFrom(client, 20000) {
			t.Errorf("UDP %t: from %s, want %s with port 20000", udp, got, client)
		}
		if got := dial(first, 20000).Port(); got != 20001 {
			t.Errorf("UDP %t: the same port and endpoint: from port %d, want the next one, 20001", udp, got)
		}
		if want, got := map[bool]uint16{false: 20000, true: 20002}[udp], dial(second, 20000).Port(); got != want {
			t.Errorf("UDP %t: another endpoint: from port %d, want %d", udp, got, want)
		}
		if got := dial(first, lastPort).Port(); got != lastPort {
			t.Errorf("UDP %t: from port %d, want %d", udp, got, lastPort)
		}
		if got := dial(first, lastPort).Port(); got != firstPort {
			t.Errorf("UDP %t: after the last port comes %d, want %d", udp, got, firstPort)
		}
	}
}
