package relay

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// What the node needs so that answers to a client's address come back to the relay's
// socket; in the product the mode does that.
const bringBack = `set -e
ip rule add fwmark 1 lookup 100
ip route add local default dev lo table 100
ip -6 rule add fwmark 1 lookup 100
ip -6 route add local default dev lo table 100
nft -f - <<RULES
table inet relay-test {
	chain mangle {
		type filter hook prerouting priority mangle
		meta l4proto { tcp, udp } socket transparent 1 meta mark set 1
	}
}
RULES
`

// On the node's addresses, a port keeps the client's address, the next one does not,
// and the one after has an endpoint that is closed.
const (
	keepPort = 7000 + iota
	hidePort
	deadPort
	serverPort = 8080
)

var packetAddrs = map[string][]netip.Addr{
	"client": {netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00:1::2")},
	"node":   {netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")},
	"server": {netip.MustParseAddr("10.2.0.2"), netip.MustParseAddr("fd00:2::2")},
}

const packetVariable = "RELAY_TEST_PACKETS"

// TestPackets relays between network namespaces.
func TestPackets(t *testing.T) {
	if os.Getenv(packetVariable) != "" {
		packetRelay()
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	node := packetAddrs["node"]
	l, err := lab.Build(lab.Topology{
		Hosts: []lab.HostSpec{{Name: "node", Forwards: true, Addrs: node}},
		Leaves: []lab.LeafSpec{
			{Name: "client", Behind: "node", Addrs: packetAddrs["client"], From: node},
			{Name: "server", Behind: "node", Addrs: packetAddrs["server"], From: node},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	setUp := exec.Command("sh", "-c", bringBack)
	setUp.Stderr = os.Stderr
	if err := errors.Join(l.Host("node").Start(setUp), setUp.Wait()); err != nil {
		t.Fatal(err)
	}
	for _, p := range []lab.Proto{lab.TCP, lab.UDP} {
		if _, err := l.Host("server").Serve("server", p, serverPort); err != nil {
			t.Fatal(err)
		}
	}
	relay := exec.Command(os.Args[0], "-test.run=^TestPackets$")
	relay.Env = append(os.Environ(), packetVariable+"=1")
	relay.Stderr = os.Stderr
	out, err := relay.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Host("node").Start(relay); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = relay.Process.Kill()
		_ = relay.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the relay says %q, %v", line, err)
	}

	for family := range 2 {
		for _, p := range []lab.Proto{lab.TCP, lab.UDP} {
			client, node := packetAddrs["client"][family], packetAddrs["node"][family]
			t.Run(client.String()+"/"+map[lab.Proto]string{lab.TCP: "tcp", lab.UDP: "udp"}[p], func(t *testing.T) {
				for port, want := range map[uint16]netip.Addr{keepPort: client, hidePort: node} {
					// Two, as addresses and ports are used again.
					for range 2 {
						got, err := seen(l.Host("client"), lab.Dialing{Proto: p, To: netip.AddrPortFrom(node, port)})
						if err != nil || got != want {
							t.Errorf("port %d: the endpoint sees %v, err %v; want %s", port, got, err, want)
						}
					}
				}
				_, err := seen(l.Host("client"), lab.Dialing{Proto: p, To: netip.AddrPortFrom(node, deadPort)})
				refused := errors.Is(err, syscall.ECONNREFUSED) || p == lab.TCP && (errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF))
				if !refused {
					t.Errorf("an endpoint that is closed: %v", err)
				}
			})
		}
	}
}

// seen asks once and returns whose question the server has seen.
func seen(h *lab.Host, d lab.Dialing) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	f, err := h.Dial(ctx, d)
	if err != nil {
		return netip.Addr{}, err
	}
	defer f.Close()
	a, err := f.Ask(10 * time.Second)
	return a.Seen.Addr(), err
}

// packetRelay is the relay on the node.
func packetRelay() {
	r := New(Options{UDPTimeout: time.Minute, Mark: 0})
	if err := r.Start(); err != nil {
		panic(err)
	}
	for family := range 2 {
		for _, p := range []plan.Protocol{plan.TCP, plan.UDP} {
			for _, port := range []uint16{keepPort, hidePort, deadPort} {
				s := r.NewService("packets")
				to := netip.AddrPortFrom(packetAddrs["server"][family], serverPort)
				if port == deadPort {
					to = netip.AddrPortFrom(to.Addr(), serverPort+1)
				}
				sp := servicePort(to)
				sp.ID.Protocol = p
				s.Update(sp)
				any := netip.IPv4Unspecified()
				if family == 1 {
					any = netip.IPv6Unspecified()
				}
				route := func(Flow) (*Service, plan.Route) { return s, plan.Route{SNAT: port != keepPort} }
				if _, err := r.Listen(ListenConfig{Protocol: p, Addr: netip.AddrPortFrom(any, port), Router: route}); err != nil {
					panic(err)
				}
			}
		}
	}
	os.Stdout.WriteString("ready\n")
	select {}
}
