// Package ipvs is the seam to the kernel's IP Virtual Server: virtual servers, their
// real servers and the time-outs of connections, over generic netlink. [Kernel] is
// the running kernel, [Fake] one in memory that refuses the same.
//
// Whose a virtual server is, is decided by the caller: everything is listed, foreign
// ones too. Schedulers' modules are loaded by the kernel itself when a virtual server
// asks for one; see [Kernel] for a kernel that cannot.
//
// It encodes its messages itself, above github.com/mdlayher/genetlink. What is there
// was looked at: github.com/cloudflare/ipvs (0.12) is kept and complete, but cannot be
// given a connection, so nothing of it can be tested where the kernel lacks ip_vs; a
// message without an address makes it panic; an empty listing and a missing family
// are one error; and a listing decodes the counters of every real server twice.
// github.com/moby/ipvs (1.1) starts modprobe, keeps the family in a global variable,
// reports success when the kernel has no ip_vs, cuts weights to 16 bits and knows no
// persistent connections.
//
// What the kernel has no call for: there is none that ends connections. Those of a
// real server that was deleted stay, with their packets dropped, until their time is
// over, unless the sysctl net.ipv4.vs.expire_nodest_conn is 1: then the next packet of
// a connection ends it (and, but for tracked ones, chooses anew), and from Linux 5.9 on
// the kernel ends all of them, idle ones included, right after the deletion. With the
// sysctl, too, the SYN of a client that connects again from the same port leaves a real
// server of weight 0. Templates of persistence are ended by it in the same way; those
// of a real server of weight 0 only count as gone if
// net.ipv4.vs.expire_quiescent_template is 1. A real server that is created again while
// connections of its former self are left takes these over, with their counts.
//
// Limits: no sync daemon, no persistence engines, no thresholds, no tunnels: what a
// foreign virtual server has of these is not read, and must not be updated from here.
package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Family is the address family of a virtual server.
type Family uint16

const (
	IPv4 Family = unix.AF_INET
	IPv6 Family = unix.AF_INET6
)

func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	}
	return fmt.Sprintf("family(%d)", uint16(f))
}

// bits is the length of the family's addresses.
func (f Family) bits() uint8 {
	if f == IPv6 {
		return 128
	}
	return 32
}

// Protocol is a transport that ip_vs balances, by its number in the IP header. The
// zero value is that of a virtual server by mark.
type Protocol uint16

const (
	TCP  Protocol = unix.IPPROTO_TCP
	UDP  Protocol = unix.IPPROTO_UDP
	SCTP Protocol = unix.IPPROTO_SCTP
)

func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return fmt.Sprintf("protocol(%d)", uint16(p))
}

// Key is what a virtual server catches: the packets to an address and port, or those
// with a mark. It is comparable; make it with [ByAddr] or [ByMark].
type Key struct {
	Family   Family
	Protocol Protocol       // 0 by mark
	Addr     netip.AddrPort // unset by mark
	Mark     uint32         // 0 by address
}

// ByAddr is the key of the virtual server at an address and port. Port 0 stands for
// all ports, and needs persistence.
func ByAddr(p Protocol, a netip.AddrPort) Key {
	return Key{Family: familyOf(a.Addr()), Protocol: p, Addr: a}
}

// ByMark is the key of the virtual server for all packets of a family with a mark,
// which is not 0.
func ByMark(f Family, mark uint32) Key { return Key{Family: f, Mark: mark} }

func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// String is as in ipvsadm(8), "TCP 10.96.0.1:443", but for marks, which lack their
// family there: "FWM 16 IPv6".
func (k Key) String() string {
	if k.Mark != 0 {
		return fmt.Sprintf("FWM %d %s", k.Mark, k.Family)
	}
	return fmt.Sprintf("%s %s", k.Protocol, k.Addr)
}

// Compare orders keys: marks last, then by family, address, port and protocol.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Mark, o.Mark), cmp.Compare(k.Family, o.Family),
		k.Addr.Compare(o.Addr), cmp.Compare(k.Protocol, o.Protocol))
}

// Flags of a virtual server.
type Flags uint32

// Flags of every virtual server.
const (
	Persistent Flags = 0x1 // a client keeps its real server, for VirtualServer.Timeout
	OnePacket  Flags = 0x4 // UDP: every packet is balanced by itself
)

// Flags that the schedulers sh and mh know.
const (
	SHFallback Flags = 0x08 // another real server if the chosen one has weight 0
	SHPort     Flags = 0x10 // the client's port counts
	MHFallback Flags = 0x08
	MHPort     Flags = 0x10
)

// Flag 0x20, for schedulers, has no meaning yet; hashed is the kernel's own.
const (
	schedulerFlag3 Flags = 0x20
	hashed         Flags = 0x02
	known                = Persistent | OnePacket | SHFallback | SHPort | schedulerFlag3
)

// VirtualServer is a virtual server without its real servers. It is comparable: one
// that was created reads back equal.
type VirtualServer struct {
	Key
	Scheduler string // "rr" and so on: the module is ip_vs_rr; up to 15 bytes
	Flags     Flags
	// Timeout is how long a client is remembered behind its last connection, in whole
	// seconds. Persistence ends no sooner than the connections; the kernel looks every
	// minute whether there are any, so that less than that is no use. 0 unless
	// Persistent.
	Timeout time.Duration
	// ClientBits is how many leading bits of a client's address tell it from others
	// for persistence: 32 or 128 for each its own.
	ClientBits uint8
}

func (v VirtualServer) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", v.Key, v.Scheduler)
	if v.Flags&Persistent != 0 {
		fmt.Fprintf(&b, " persistent %d", int64(v.Timeout/time.Second))
		if v.ClientBits != v.Family.bits() {
			fmt.Fprintf(&b, " clients /%d", v.ClientBits)
		}
	}
	if v.Flags&OnePacket != 0 {
		b.WriteString(" ops")
	}
	for _, f := range []struct {
		flag Flags
		name string
	}{{SHFallback, "flag-1"}, {SHPort, "flag-2"}, {schedulerFlag3, "flag-3"}} {
		if v.Flags&f.flag != 0 {
			b.WriteString(" " + f.name)
		}
	}
	return b.String()
}

// Forwarding is how a packet reaches a real server.
type Forwarding uint8

// The zero value is destination NAT, the only one for which ports may differ.
const (
	Masquerade Forwarding = iota
	LocalNode
	Tunnel
	DirectRoute
	Bypass
)

func (f Forwarding) String() string {
	if int(f) < len(forwardings) {
		return forwardings[f]
	}
	return fmt.Sprintf("forwarding(%d)", uint8(f))
}

var forwardings = [...]string{"Masq", "Local", "Tunnel", "Route", "Bypass"}

// RealServer is one of those that a virtual server sends clients to. It is
// comparable: one that was created reads back equal.
type RealServer struct {
	Addr netip.AddrPort // of the virtual server's family
	// Weight is 0 to 2³¹-1; 0 takes no new connections.
	Weight     uint32
	Forwarding Forwarding
}

func (r RealServer) String() string {
	return fmt.Sprintf("%s %s %d", r.Addr, r.Forwarding, r.Weight)
}

// Live is a real server as it is listed.
type Live struct {
	RealServer
	// Active counts established TCP and SCTP connections, Inactive all others: those
	// that begin or end, and every UDP flow until its time-out.
	Active, Inactive uint32
	// Persistent counts the clients that are remembered.
	Persistent uint32
}

// Idle reports whether nobody uses the real server: no connection and nobody
// remembered.
func (l Live) Idle() bool { return l.Active == 0 && l.Inactive == 0 && l.Persistent == 0 }

// Entry is a virtual server as it is listed, with its real servers by address.
type Entry struct {
	VirtualServer
	Real []Live
}

// Timeouts end connections of which nothing is heard, in whole seconds. 0 leaves one
// as it is.
type Timeouts struct {
	TCP    time.Duration // established
	TCPFin time.Duration // after a FIN
	UDP    time.Duration
}

// Errors of the kernel that callers tell apart. They come wrapped in what was tried.
// Permission is fs.ErrPermission: CAP_NET_ADMIN of the machine's first user namespace
// is needed, also to list.
var (
	ErrMissing     = errors.New("the kernel has no ip_vs")
	ErrFamily      = errors.New("the kernel's ip_vs lacks this address family")
	ErrNoScheduler = errors.New("the kernel has no such scheduler")
	ErrNoServer    = errors.New("there is no such virtual server")
	ErrNoReal      = errors.New("there is no such real server")
	ErrExist       = errors.New("it exists already")
)

// IPVS is a table of virtual servers, that of one network namespace. It is safe for
// concurrent use; each call but Dump and Probe is one operation of the kernel.
type IPVS interface {
	// Probe returns nil if the kernel can do the family with the scheduler, having
	// tried to load what is missing, else ErrMissing, ErrFamily or ErrNoScheduler
	// with what to do. It creates a virtual server and deletes it.
	Probe(ctx context.Context, f Family, scheduler string) error
	// Dump lists all virtual servers of both families, by key. It is one call and one
	// more for each virtual server.
	Dump(ctx context.Context) ([]Entry, error)
	// RealServers lists those of one virtual server, by address.
	RealServers(k Key) ([]Live, error)
	// CreateServer fails with ErrExist or ErrNoScheduler.
	CreateServer(v VirtualServer) error
	// UpdateServer changes all but the key; connections stay. It fails with ErrNoServer
	// or ErrNoScheduler.
	UpdateServer(v VirtualServer) error
	// DeleteServer deletes the real servers too. It fails with ErrNoServer.
	DeleteServer(k Key) error
	// CreateReal fails with ErrNoServer or ErrExist.
	CreateReal(k Key, r RealServer) error
	// UpdateReal changes all but the address; connections stay. It fails with
	// ErrNoServer or ErrNoReal.
	UpdateReal(k Key, r RealServer) error
	// DeleteReal fails with ErrNoServer or ErrNoReal.
	DeleteReal(k Key, addr netip.AddrPort) error
	Timeouts() (Timeouts, error)
	SetTimeouts(t Timeouts) error
}

// check returns what the kernel would misread or refuse without a reason.
func (k Key) check() error {
	switch {
	case k.Family != IPv4 && k.Family != IPv6:
		return fmt.Errorf("family %d is neither IPv4 nor IPv6", uint16(k.Family))
	case k.Mark != 0 && (k.Protocol != 0 || k.Addr.IsValid()):
		return errors.New("it has a mark and an address")
	case k.Mark != 0:
		return nil
	case !k.Addr.IsValid():
		return errors.New("it has neither an address nor a mark")
	case familyOf(k.Addr.Addr()) != k.Family || k.Addr.Addr().Is4In6() || k.Addr.Addr().Zone() != "":
		return fmt.Errorf("%s is no plain %s address", k.Addr.Addr(), k.Family)
	case k.Protocol != TCP && k.Protocol != UDP && k.Protocol != SCTP:
		return fmt.Errorf("protocol %d is none of TCP, UDP and SCTP", uint16(k.Protocol))
	}
	return nil
}

func (v VirtualServer) check() error {
	switch {
	case v.Scheduler == "" || len(v.Scheduler) > 15 || strings.ContainsRune(v.Scheduler, 0):
		return fmt.Errorf("%q cannot name a scheduler", v.Scheduler)
	case v.Flags&^known != 0:
		return fmt.Errorf("flags %#x are unknown", uint32(v.Flags&^known))
	case v.Flags&Persistent == 0 && v.Timeout != 0:
		return fmt.Errorf("time-out %s without persistence", v.Timeout)
	case v.Flags&Persistent != 0 && v.Timeout == 0:
		return errors.New("persistence without a time-out")
	case v.Flags&Persistent == 0 && v.Mark == 0 && v.Addr.Port() == 0:
		return errors.New("all ports without persistence")
	case v.ClientBits > v.Family.bits() || v.ClientBits == 0 && v.Family == IPv6:
		return fmt.Errorf("%d bits of a client's %s address", v.ClientBits, v.Family)
	}
	if err := checkSeconds(v.Timeout); err != nil {
		return err
	}
	return v.Key.check()
}

func (k Key) checkReal(r RealServer) error {
	switch {
	case !r.Addr.IsValid() || familyOf(r.Addr.Addr()) != k.Family || r.Addr.Addr().Is4In6() || r.Addr.Addr().Zone() != "":
		return fmt.Errorf("%s is no plain %s address", r.Addr, k.Family)
	case r.Addr.Addr().IsMulticast() || r.Addr.Addr().IsUnspecified() || r.Addr.Addr() == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Errorf("address %s is not of one host", r.Addr.Addr())
	case r.Weight > math.MaxInt32:
		return fmt.Errorf("weight %d is above %d", r.Weight, math.MaxInt32)
	case r.Forwarding > Bypass:
		return fmt.Errorf("forwarding %d is unknown", r.Forwarding)
	}
	return k.check()
}

// checkSeconds refuses what the kernel cannot keep: it counts seconds, and jiffies in
// 31 bits at up to 1000 Hz.
func checkSeconds(d time.Duration) error {
	switch {
	case d < 0 || d%time.Second != 0:
		return fmt.Errorf("time-out %s is no number of whole seconds", d)
	case d > math.MaxInt32/1000*time.Second:
		return fmt.Errorf("time-out %s is above %s", d, math.MaxInt32/1000*time.Second)
	}
	return nil
}

func (t Timeouts) String() string {
	return fmt.Sprintf("tcp %s, tcpfin %s, udp %s", t.TCP, t.TCPFin, t.UDP)
}

func (t Timeouts) check() error {
	return errors.Join(checkSeconds(t.TCP), checkSeconds(t.TCPFin), checkSeconds(t.UDP))
}
