package ipvs

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"
)

// eventually waits until have is want.
func eventually[T comparable](t *testing.T, what string, want T, have func() T) {
	t.Helper()
	var last T
	for limit := time.Now().Add(time.Minute); time.Now().Before(limit); time.Sleep(10 * time.Millisecond) {
		if last = have(); last == want {
			return
		}
	}
	t.Fatalf("%s: have %v, want %v", what, last, want)
}

// connections lists the kernel's entries, templates too, by their protocol, virtual
// server and real server as /proc has them.
func connections(t *testing.T) (all []string) {
	t.Helper()
	text, err := os.ReadFile("/proc/thread-self/net/ip_vs_conn")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n")[1:] {
		f := strings.Fields(line)
		all = append(all, fmt.Sprintf("%s %s:%s > %s:%s", f[0], f[3], f[4], f[5], f[6]))
	}
	return all
}

func setSysctl(t *testing.T, name, value string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/net/ipv4/vs/"+name, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

// The addresses of the virtual server and its real servers, all of lo.
var (
	vip   = ap("10.9.9.9:80")
	realA = ap("10.9.9.1:8080")
	realB = ap("10.9.9.2:8080")
)

// balance makes a virtual server with one real server, on lo, and something that
// accepts connections and datagrams at both.
func balance(t *testing.T, k *Kernel, p Protocol, persistent bool) Key {
	t.Helper()
	for _, a := range []netip.AddrPort{vip, realA, realB} {
		runIP(t, "addr", "add", a.Addr().String()+"/32", "dev", "lo")
	}
	for _, a := range []netip.AddrPort{realA, realB} {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(a))
		if err != nil {
			t.Fatal(err)
		}
		u, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(a))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close(); u.Close() })
	}
	v := VirtualServer{Key: ByAddr(p, vip), Scheduler: "rr", ClientBits: 32}
	if persistent {
		v.Flags, v.Timeout = Persistent, time.Hour
	}
	if err := k.CreateServer(v); err != nil {
		t.Fatal(err)
	}
	if err := k.CreateReal(v.Key, RealServer{Addr: realA, Weight: 1}); err != nil {
		t.Fatal(err)
	}
	return v.Key
}

// use connects to the virtual server once and keeps the connection.
func use(t *testing.T, p Protocol) net.Conn {
	t.Helper()
	network := "tcp"
	if p == UDP {
		network = "udp"
	}
	c, err := net.DialTimeout(network, vip.String(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	return c
}

func live(t *testing.T, k *Kernel, key Key) []Live {
	t.Helper()
	out, err := k.RealServers(key)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// What is counted as active, inactive and persistent; what a deleted real server
// leaves, and gets back when it returns.
func TestKernelCounts(t *testing.T) {
	for _, c := range []struct {
		proto      Protocol
		persistent bool
		want       Live
	}{
		{TCP, false, Live{Active: 1}},
		{UDP, false, Live{Inactive: 1}},
		{TCP, true, Live{Active: 1, Persistent: 1}},
	} {
		t.Run(fmt.Sprint(c.proto, " persistent ", c.persistent), func(t *testing.T) {
			k := inKernel(t)
			setSysctl(t, "expire_nodest_conn", "0")
			key := balance(t, k, c.proto, c.persistent)
			real := RealServer{Addr: realA, Weight: 1}
			c.want.RealServer = real
			use(t, c.proto)
			counts := func() Live { return live(t, k, key)[0] }
			eventually(t, "counts", c.want, counts)
			if counts().Idle() {
				t.Error("it counts as idle")
			}
			if err := k.DeleteReal(key, realA); err != nil {
				t.Fatal(err)
			}
			if len(connections(t)) == 0 {
				t.Error("no connection is left of the deleted real server")
			}
			if err := k.CreateReal(key, real); err != nil {
				t.Fatal(err)
			}
			if have := counts(); have != c.want {
				t.Errorf("created again it has %+v, want %+v", have, c.want)
			}
		})
	}
}

// With expire_nodest_conn the connections of a deleted real server and of a deleted
// virtual server end by themselves, idle ones and templates too.
func TestKernelExpiresWithoutRealServer(t *testing.T) {
	for _, whole := range []bool{false, true} {
		for _, proto := range []Protocol{TCP, UDP} {
			t.Run(fmt.Sprint(proto, " whole server ", whole), func(t *testing.T) {
				k := inKernel(t)
				setSysctl(t, "expire_nodest_conn", "1")
				key := balance(t, k, proto, true)
				use(t, proto)
				eventually(t, "entries", 2, func() int { return len(connections(t)) }) // one is the template
				del := func() error { return k.DeleteReal(key, realA) }
				if whole {
					del = func() error { return k.DeleteServer(key) }
				}
				if err := del(); err != nil {
					t.Fatal(err)
				}
				eventually(t, "entries left", 0, func() int { return len(connections(t)) })
			})
		}
	}
}

// A client that is remembered leaves a real server of weight 0 if and only if
// expire_quiescent_template is 1.
func TestKernelQuiescentTemplate(t *testing.T) {
	for value, want := range map[string]netip.AddrPort{"0": realA, "1": realB} {
		t.Run(value, func(t *testing.T) {
			k := inKernel(t)
			setSysctl(t, "expire_quiescent_template", value)
			key := balance(t, k, TCP, true)
			use(t, TCP)
			for _, err := range []error{
				k.CreateReal(key, RealServer{Addr: realB, Weight: 1}),
				k.UpdateReal(key, RealServer{Addr: realA, Weight: 0}),
			} {
				if err != nil {
					t.Fatal(err)
				}
			}
			use(t, TCP)
			used := func() uint32 {
				for _, l := range live(t, k, key) {
					if l.Addr == want {
						return l.Active
					}
				}
				return 0
			}
			eventually(t, "connections of "+want.String(), map[string]uint32{"0": 2, "1": 1}[value], used)
		})
	}
}
