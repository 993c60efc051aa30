package ipvs

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/genetlink/genltest"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// recorded is a message of testdata/messages.txt.
type recorded struct {
	toKernel bool
	about    string
	data     []byte // with the header of generic netlink
}

func readRecorded(tb testing.TB) []recorded {
	tb.Helper()
	text, err := os.ReadFile("testdata/messages.txt")
	if err != nil {
		tb.Fatal(err)
	}
	var out []recorded
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "\t"):
			b, err := hex.DecodeString(line[1:])
			if err != nil {
				tb.Fatal(err)
			}
			out[len(out)-1].data = b
		default:
			out = append(out, recorded{toKernel: line[0] == '>', about: line[2:]})
		}
	}
	return out
}

// find returns the recorded message about something in one direction.
func find(tb testing.TB, toKernel bool, about string) []byte {
	tb.Helper()
	for _, r := range readRecorded(tb) {
		if r.toKernel == toKernel && r.about == about {
			return r.data
		}
	}
	tb.Fatalf("testdata/messages.txt has nothing about %q", about)
	return nil
}

// The objects that the recorded messages are about.
var (
	apiKey = ByAddr(TCP, ap("10.96.0.1:443"))
	dnsKey = ByAddr(UDP, ap("[fd00::a]:53"))

	apiServer  = VirtualServer{Key: apiKey, Scheduler: "rr", Flags: Persistent, Timeout: 3 * time.Hour, ClientBits: 32}
	dnsServer  = VirtualServer{Key: dnsKey, Scheduler: "mh", Flags: MHPort | MHFallback, ClientBits: 128}
	markServer = VirtualServer{Key: ByMark(IPv6, 7), Scheduler: "wlc", ClientBits: 128}

	apiReal = RealServer{Addr: ap("172.16.65.180:6443"), Weight: 1}
	dnsReal = RealServer{Addr: ap("[fd01::2]:53"), Weight: 5}

	inUse = Timeouts{TCP: 15 * time.Minute, TCPFin: 2 * time.Minute, UDP: 5 * time.Minute}
)

// answering returns a table whose kernel is answer, and the requests that were made.
func answering(answer func(m genetlink.Message, r netlink.Message) ([]genetlink.Message, error)) (*Kernel, *[][]byte) {
	var seen [][]byte
	family := genetlink.Family{ID: 0x20, Version: genlVersion, Name: genlName}
	return &Kernel{Dial: func() (*genetlink.Conn, error) {
		return genltest.Dial(genltest.ServeFamily(family, func(m genetlink.Message, r netlink.Message) ([]genetlink.Message, error) {
			b, err := m.MarshalBinary()
			if err != nil {
				return nil, err
			}
			seen = append(seen, b)
			return answer(m, r)
		})), nil
	}}, &seen
}

// acknowledge answers as a kernel that agrees.
func acknowledge(genetlink.Message, netlink.Message) ([]genetlink.Message, error) {
	return []genetlink.Message{{}}, nil
}

// What is asked of the kernel is, byte for byte, what ipvsadm asks.
func TestRequestsAsIpvsadm(t *testing.T) {
	for about, do := range map[string]func(*Kernel) error{
		"create " + apiServer.String():  func(k *Kernel) error { return k.CreateServer(apiServer) },
		"create " + dnsServer.String():  func(k *Kernel) error { return k.CreateServer(dnsServer) },
		"create " + markServer.String(): func(k *Kernel) error { return k.CreateServer(markServer) },
		"set " + inUse.String():         func(k *Kernel) error { return k.SetTimeouts(inUse) },
	} {
		k, seen := answering(acknowledge)
		if err := do(k); err != nil {
			t.Errorf("%s: %v", about, err)
			continue
		}
		if want := find(t, true, about); len(*seen) != 1 || !bytes.Equal((*seen)[0], want) {
			t.Errorf("%s:\nsent %x\nwant %x", about, *seen, want)
		}
	}
}

// attributes returns the values of attributes by their path, as in "2.4".
func attributes(tb testing.TB, prefix string, b []byte) map[string]string {
	tb.Helper()
	d, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		tb.Fatal(err)
	}
	out := map[string]string{}
	for d.Next() {
		path := fmt.Sprintf("%s%d", prefix, d.Type())
		if d.TypeFlags()&netlink.Nested != 0 {
			maps.Copy(out, attributes(tb, path+".", d.Bytes()))
			continue
		}
		out[path] = hex.EncodeToString(d.Bytes())
	}
	if err := d.Err(); err != nil {
		tb.Fatal(err)
	}
	return out
}

// A request about a real server is what ipvsadm asks, but for what the kernel does not
// read with it: the virtual server's options and those of tunnels.
func TestRequestsAboutRealServers(t *testing.T) {
	unread := []string{"1.6", "1.7", "1.8", "1.9", "2.13", "2.14", "2.15"}
	for _, c := range []struct {
		key  Key
		real RealServer
	}{{apiKey, apiReal}, {dnsKey, dnsReal}} {
		k, seen := answering(acknowledge)
		if err := k.CreateReal(c.key, c.real); err != nil {
			t.Fatal(err)
		}
		about := fmt.Sprintf("create %s of %s", c.real, c.key)
		recorded := find(t, true, about)
		want := attributes(t, "", recorded[4:])
		maps.DeleteFunc(want, func(path, _ string) bool { return slices.Contains(unread, path) })
		if have := attributes(t, "", (*seen)[0][4:]); !maps.Equal(have, want) {
			t.Errorf("%s: sent (+), want (-):\n%s", about, cmp.Diff(want, have))
		}
		if !bytes.Equal((*seen)[0][:4], recorded[:4]) {
			t.Errorf("%s: header %x, want %x", about, (*seen)[0][:4], recorded[:4])
		}
	}
}

// The bytes of each command, of which no program was recorded.
func TestRequestBytes(t *testing.T) {
	const (
		api     = "30000180 0600010002000000 0600020006000000 140003000a600001000000000000000000000000 0600040001bb0000"
		apiReal = "06000b0002000000 14000100ac1041b4000000000000000000000000 06000200192b0000"
	)
	real := RealServer{Addr: ap("172.16.65.180:6443"), Weight: 3, Forwarding: DirectRoute}
	for _, c := range []struct {
		name string
		do   func(*Kernel) error
		want string
	}{
		{"update server", func(k *Kernel) error { return k.UpdateServer(markServer) },
			"02010000" + hex.EncodeToString(find(t, true, "create "+markServer.String())[4:])},
		{"delete server", func(k *Kernel) error { return k.DeleteServer(apiKey) }, "03010000" + api},
		{"create real", func(k *Kernel) error { return k.CreateReal(apiKey, real) },
			"05010000" + api + "48000280" + apiReal + "0800030003000000 0800040003000000 0800050000000000 0800060000000000"},
		{"update real", func(k *Kernel) error { return k.UpdateReal(apiKey, real) },
			"06010000" + api + "48000280" + apiReal + "0800030003000000 0800040003000000 0800050000000000 0800060000000000"},
		{"delete real", func(k *Kernel) error { return k.DeleteReal(apiKey, real.Addr) }, "07010000" + api + "28000280" + apiReal},
	} {
		k, seen := answering(acknowledge)
		if err := c.do(k); err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		want := strings.ReplaceAll(c.want, " ", "")
		if len(*seen) != 1 || hex.EncodeToString((*seen)[0]) != want {
			t.Errorf("%s:\nsent %x\nwant %s", c.name, *seen, want)
		}
	}
}

// replies returns the recorded messages of the kernel about these.
func replies(tb testing.TB, about ...string) []genetlink.Message {
	tb.Helper()
	var out []genetlink.Message
	for _, a := range about {
		var m genetlink.Message
		if err := m.UnmarshalBinary(find(tb, false, a)); err != nil {
			tb.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

// A listing asks what ipvsadm asks, and reads what the kernel answered it.
func TestDumpOfRecorded(t *testing.T) {
	byRequest := map[string][]genetlink.Message{
		string(find(t, true, "list")):                          replies(t, markServer.String(), dnsServer.String(), apiServer.String()),
		string(find(t, true, "list "+apiKey.String())):         replies(t, apiReal.String()),
		string(find(t, true, "list "+dnsKey.String())):         replies(t, dnsReal.String()),
		string(find(t, true, "list "+markServer.Key.String())): nil,
	}
	k, seen := answering(func(m genetlink.Message, r netlink.Message) ([]genetlink.Message, error) {
		b, err := m.MarshalBinary()
		if err != nil {
			return nil, err
		}
		answer, ok := byRequest[string(b)]
		if !ok || r.Header.Flags&netlink.Dump != netlink.Dump {
			return nil, genltest.Error(int(unix.EINVAL))
		}
		if len(answer) == 0 {
			return nil, io.EOF
		}
		return answer, nil
	})
	have, err := k.Dump(context.Background())
	if err != nil {
		t.Fatalf("%v, having sent %x", err, *seen)
	}
	want := []Entry{
		{apiServer, []Live{{RealServer: apiReal}}},
		{dnsServer, []Live{{RealServer: dnsReal}}},
		{markServer, []Live{}},
	}
	if diff := cmp.Diff(want, have, equalAddrs...); diff != "" {
		t.Errorf("read (+), want (-):\n%s", diff)
	}
	if len(*seen) != 4 {
		t.Errorf("%d requests, want 4", len(*seen))
	}
}

func TestTimeoutsOfRecorded(t *testing.T) {
	k, seen := answering(func(genetlink.Message, netlink.Message) ([]genetlink.Message, error) {
		return replies(t, inUse.String()), nil
	})
	have, err := k.Timeouts()
	if err != nil || have != inUse {
		t.Errorf("read %s, %v; want %s", have, err, inUse)
	}
	if want := find(t, true, "timeouts"); !bytes.Equal((*seen)[0], want) {
		t.Errorf("sent %x, want %x", (*seen)[0], want)
	}
}

// Counts are read, and flags of connections are no part of the way of forwarding.
func TestDecodeCounts(t *testing.T) {
	e := netlink.NewAttributeEncoder()
	e.Nested(attrDest, func(e *netlink.AttributeEncoder) error {
		e.Bytes(destAddr, []byte{10, 0, 0, 1}) // Linux before 3.18: no family, and 4 bytes
		e.Bytes(destPort, []byte{0, 80})
		e.Uint32(destForwarding, 0x10000|uint32(Tunnel))
		e.Uint32(destWeight, 1<<31-1)
		e.Uint32(destActiveConns, 1)
		e.Uint32(destInactiveConns, 1<<31)
		e.Uint32(destPersistentConns, 3)
		return nil
	})
	b, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	have, err := decodeReal(b, IPv4)
	want := Live{RealServer{ap("10.0.0.1:80"), 1<<31 - 1, Tunnel}, 1, 1 << 31, 3}
	if err != nil || have != want {
		t.Errorf("read %+v, %v; want %+v", have, err, want)
	}
}

// Refusals of the kernel are told apart, and say what was tried.
func TestErrors(t *testing.T) {
	create := func(k *Kernel) error { return k.CreateServer(apiServer) }
	for _, c := range []struct {
		name   string
		do     func(*Kernel) error
		number unix.Errno
		want   error
		text   string
	}{
		{"exists", create, unix.EEXIST, ErrExist, "create virtual server TCP 10.96.0.1:443 rr persistent 10800"},
		{"no scheduler", create, unix.ENOENT, ErrNoScheduler, "create virtual server TCP 10.96.0.1:443 rr"},
		{"no family", create, unix.EAFNOSUPPORT, ErrFamily, "create virtual server"},
		{"not allowed", create, unix.EPERM, os.ErrPermission, "create virtual server"},
		{"update of none", func(k *Kernel) error { return k.UpdateServer(apiServer) }, unix.ESRCH, ErrNoServer, "update virtual server"},
		{"delete of none", func(k *Kernel) error { return k.DeleteServer(apiKey) }, unix.ESRCH, ErrNoServer, "delete virtual server TCP 10.96.0.1:443"},
		{"real of none", func(k *Kernel) error { return k.CreateReal(apiKey, apiReal) }, unix.ESRCH, ErrNoServer, "create real server 172.16.65.180:6443 Masq 1 of TCP"},
		{"real exists", func(k *Kernel) error { return k.CreateReal(apiKey, apiReal) }, unix.EEXIST, ErrExist, "create real server"},
		{"no broadcast", func(k *Kernel) error { return k.CreateReal(apiKey, apiReal) }, unix.EINVAL, unix.EINVAL, "create real server"},
		{"update no real", func(k *Kernel) error { return k.UpdateReal(apiKey, apiReal) }, unix.ENOENT, ErrNoReal, "update real server"},
		{"delete no real", func(k *Kernel) error { return k.DeleteReal(apiKey, apiReal.Addr) }, unix.ENOENT, ErrNoReal, "delete real server 172.16.65.180:6443 of TCP"},
	} {
		k, _ := answering(func(genetlink.Message, netlink.Message) ([]genetlink.Message, error) {
			return nil, genltest.Error(int(c.number))
		})
		if err := c.do(k); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v; want %v, and %q", c.name, err, c.want, c.text)
		}
	}
}

// Without ip_vs every call says so, and Probe what to do.
func TestMissing(t *testing.T) {
	dials := 0
	k := &Kernel{Dial: func() (*genetlink.Conn, error) {
		dials++
		return genltest.Dial(func(genetlink.Message, netlink.Message) ([]genetlink.Message, error) {
			return nil, genltest.Error(int(unix.ENOENT))
		}), nil
	}}
	f := &Fake{Missing: true}
	for i, c := range []func(IPVS) error{
		func(t IPVS) error { return t.Probe(context.Background(), IPv4, "rr") },
		func(t IPVS) error { _, err := t.Dump(context.Background()); return err },
		func(t IPVS) error { _, err := t.RealServers(apiKey); return err },
		func(t IPVS) error { return t.CreateServer(apiServer) },
		func(t IPVS) error { return t.UpdateServer(apiServer) },
		func(t IPVS) error { return t.DeleteServer(apiKey) },
		func(t IPVS) error { return t.CreateReal(apiKey, apiReal) },
		func(t IPVS) error { return t.UpdateReal(apiKey, apiReal) },
		func(t IPVS) error { return t.DeleteReal(apiKey, apiReal.Addr) },
		func(t IPVS) error { _, err := t.Timeouts(); return err },
		func(t IPVS) error { return t.SetTimeouts(inUse) },
	} {
		if err := c(k); !errors.Is(err, ErrMissing) {
			t.Errorf("call %d of the kernel: %v, want %v", i, err, ErrMissing)
		}
		if err := c(f); !errors.Is(err, ErrMissing) {
			t.Errorf("call %d of the fake: %v, want %v", i, err, ErrMissing)
		}
	}
	if err := k.Probe(context.Background(), IPv4, "rr"); !strings.Contains(err.Error(), "modprobe ip_vs") {
		t.Errorf("probe: %v, want the remedy", err)
	}
	k.Load = func(context.Context, string) error { return errors.New("no module of that name for Linux 1.0") }
	err := k.Probe(context.Background(), IPv4, "rr")
	if !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "no module of that name for Linux 1.0") {
		t.Errorf("probe: %v, want what loading said", err)
	}
	if dials < 12 {
		t.Errorf("%d sockets: what was missing once must be asked for again", dials)
	}
}

// What the kernel would misread, or refuse without saying why, is not sent.
func TestRefusedHere(t *testing.T) {
	k, seen := answering(acknowledge)
	f := &Fake{}
	server := func(change func(*VirtualServer)) func(IPVS) error {
		v := apiServer
		change(&v)
		return func(t IPVS) error { return t.CreateServer(v) }
	}
	real := func(addr string, weight uint32, fwd Forwarding) func(IPVS) error {
		return func(t IPVS) error {
			var a netip.AddrPort
			if addr != "" {
				a = ap(addr)
			}
			return t.CreateReal(apiKey, RealServer{a, weight, fwd})
		}
	}
	for _, c := range []struct {
		do   func(IPVS) error
		want string
	}{
		{server(func(v *VirtualServer) { v.Key = Key{} }), "family 0"},
		{server(func(v *VirtualServer) { v.Key = Key{Family: IPv4} }), "neither an address nor a mark"},
		{server(func(v *VirtualServer) { v.Mark = 1 }), "a mark and an address"},
		{server(func(v *VirtualServer) { v.Protocol = 1 }), "none of TCP, UDP and SCTP"},
		{server(func(v *VirtualServer) { v.Key = ByAddr(TCP, ap("[::ffff:10.0.0.1]:80")); v.ClientBits = 128 }), "no plain IPv6 address"},
		{server(func(v *VirtualServer) { v.Scheduler = "" }), "cannot name a scheduler"},
		{server(func(v *VirtualServer) { v.Scheduler = "a-name-of-16-let" }), "cannot name a scheduler"},
		{server(func(v *VirtualServer) { v.Flags |= hashed }), "flags 0x2 are unknown"},
		{server(func(v *VirtualServer) { v.Timeout = 1500 * time.Millisecond }), "whole seconds"},
		{server(func(v *VirtualServer) { v.Timeout = 0 }), "persistence without a time-out"},
		{server(func(v *VirtualServer) { v.Flags = 0 }), "without persistence"},
		{server(func(v *VirtualServer) { v.ClientBits = 33 }), "33 bits"},
		{real("", 1, Masquerade), "no plain IPv4 address"},
		{real("[fd00::1]:80", 1, Masquerade), "no plain IPv4 address"},
		{real("224.0.0.1:80", 1, Masquerade), "not of one host"},
		{real("0.0.0.0:80", 1, Masquerade), "not of one host"},
		{real("10.0.0.1:80", 1<<31, Masquerade), "weight 2147483648"},
		{real("10.0.0.1:80", 1, 5), "forwarding 5"},
	} {
		for _, table := range []IPVS{k, f} {
			if err := c.do(table); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%T: %v, want %q", table, err, c.want)
			}
		}
	}
	if len(*seen) != 0 {
		t.Errorf("sent %x", *seen)
	}
}

// Whatever the kernel answers, it is read or refused; what is read, is written as it
// was.
func FuzzDecode(f *testing.F) {
	for _, r := range readRecorded(f) {
		f.Add(r.data[4:], false)
		f.Add(r.data[4:], true)
	}
	f.Fuzz(func(t *testing.T, b []byte, v6 bool) {
		family := IPv4
		if v6 {
			family = IPv6
		}
		if v, err := decodeServer(b); err == nil && v.check() == nil {
			e := netlink.NewAttributeEncoder()
			encodeServer(e, v)
			b, err := e.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if again, err := decodeServer(b); err != nil || again != v {
				t.Errorf("%s is read back as %s, %v", v, again, err)
			}
		}
		if l, err := decodeReal(b, family); err == nil {
			key := ByMark(familyOf(l.Addr.Addr()), 1)
			if key.checkReal(l.RealServer) == nil {
				e := netlink.NewAttributeEncoder()
				encodeReal(e, l.RealServer, true)
				b, err := e.Encode()
				if err != nil {
					t.Fatal(err)
				}
				if again, err := decodeReal(b, key.Family); err != nil || again.RealServer != l.RealServer {
					t.Errorf("%s is read back as %s, %v", l, again, err)
				}
			}
		}
		_, _ = decodeTimeouts(b)
	})
}
