// Package conntrack is the seam to the kernel's connection tracking: removing UDP
// and TCP flows, and the sysctls of the table. [Kernel] is the running kernel, [Fake]
// one in memory.
//
// Which flows are to go is decided by the caller. A TCP flow whose entry is removed
// begins anew with its next packet, as if that were the first: to an endpoint that
// knows nothing of it and answers with a reset. Where the kernel takes up no
// connection in its middle (nf_conntrack_tcp_loose is 0), an entry that leads to such
// an endpoint takes the place of the removed one.
package conntrack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Flow is one entry of the table.
type Flow struct {
	TCP bool // else UDP
	// Answered: there was a packet in the reply direction.
	Answered bool
	// Src and Dst are of the original direction, before any translation.
	Src, Dst netip.AddrPort
	// From is the source of the reply direction: the endpoint of a flow whose
	// destination is translated, else Dst.
	From netip.AddrPort
	// To is the destination of the reply direction: another than Src if the
	// source is translated.
	To   netip.AddrPort
	Zone uint16
	ID   uint32 // tells an entry from a later one of the same addresses
}

func (f Flow) String() string {
	return fmt.Sprintf("%s %s > %s, reply %s > %s", protocol(f.TCP), f.Src, f.Dst, f.From, f.To)
}

// protocol names one of the two.
type protocol bool

const (
	udp protocol = false
	tcp protocol = true
)

func (p protocol) String() string {
	if p == tcp {
		return "TCP"
	}
	return "UDP"
}

func (p protocol) number() byte {
	if p == tcp {
		return unix.IPPROTO_TCP
	}
	return unix.IPPROTO_UDP
}

const (
	// exact is up to how many destinations the kernel is asked for each by
	// itself. One walk over the table costs about 0.1 s for a million entries;
	// handing all UDP entries to user space costs ten times that.
	exact = 4
	// chunk is how many flows are remembered before they are deleted.
	chunk = 4096
	// batchSize is how many deletions go to the kernel at once; the answers to all
	// of them fit into the socket's receive buffer.
	batchSize = 128
	// passes is how often a listing is repeated that the kernel calls incomplete
	// because the table changed its shape meanwhile.
	passes = 5
	// receive is the size of the receive buffer, which bounds how many entries
	// the kernel hands out at once.
	receive = 64 << 10
)

// Kernel is the table of the calling thread's network namespace. It may be used
// concurrently.
type Kernel struct {
	unfiltered atomic.Bool // the kernel refused a filter once (Linux before 5.8)
}

// DeleteUDP removes the UDP flows whose original destination is among to and for
// which stale is true; from is the source of the reply direction. All of to are
// of one family. It returns how many it deleted, also with an error. Memory does
// not grow with the table.
func (k *Kernel) DeleteUDP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort) bool) (int, error) {
	return k.deleteTo(ctx, udp, to, func(f *Flow) bool { return stale(f.Dst, f.From) })
}

// DeleteTCP does the same to TCP flows; answered: the endpoint sent something. instead
// returns an endpoint that answers packets in the middle of an unknown connection to
// to with a reset, which the clients of flows that were answered are to see; invalid:
// there is none.
func (k *Kernel) DeleteTCP(ctx context.Context, to []netip.AddrPort, stale func(to, from netip.AddrPort, answered bool) bool, instead func(to netip.AddrPort) netip.AddrPort) (int, error) {
	strict := k.strict()
	var replaced []Flow
	n, err := k.deleteTo(ctx, tcp, to, func(f *Flow) bool {
		ends := stale(f.Dst, f.From, f.Answered)
		if ends && strict && f.Answered && len(replaced) < mostReplaced {
			r := *f
			if r.From = instead(f.Dst); r.From.IsValid() {
				replaced = append(replaced, r)
			}
		}
		return ends
	})
	if err != nil || len(replaced) == 0 {
		return n, err
	}
	return n, replace(replaced)
}

// mostReplaced bounds the memory for flows that are replaced.
const mostReplaced = 1 << 16

// strict reports whether the kernel takes up no connection in its middle.
func (k *Kernel) strict() bool {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_loose")
	return err == nil && strings.TrimSpace(string(b)) == "0"
}

// replace puts entries into the table that lead established connections to f.From.
func replace(flows []Flow) error {
	c, err := dial()
	if err != nil {
		return err
	}
	defer c.Close()
	family, err := familyOf([]netip.AddrPort{flows[0].Dst})
	if err != nil {
		return err
	}
	var failed error
	for i := range flows {
		_, err := c.Execute(netlink.Message{
			Header: netlink.Header{Type: msgNew, Flags: netlink.Request | netlink.Create | netlink.Excl | netlink.Acknowledge},
			Data:   createRequest(family, &flows[i]),
		})
		// The client was faster: it began anew with this very port.
		if err != nil && !errors.Is(err, fs.ErrExist) && failed == nil {
			failed = fmt.Errorf("lead %s to another endpoint: %w", &flows[i], err)
		}
	}
	return failed
}

// deleteTo deletes the flows of one protocol with an original destination among to.
func (k *Kernel) deleteTo(ctx context.Context, p protocol, to []netip.AddrPort, stale func(*Flow) bool) (int, error) {
	if len(to) == 0 {
		return 0, nil
	}
	del, err := dial()
	if err != nil {
		return 0, err
	}
	defer del.Close()
	family, err := familyOf(to)
	if err != nil {
		return 0, err
	}
	wanted := make(map[netip.AddrPort]struct{}, len(to))
	for _, dst := range to {
		wanted[dst] = struct{}{}
	}
	queries := []netip.AddrPort{{}} // all of the protocol
	if len(to) <= exact {
		queries = slices.Clone(to)
		if family == unix.AF_INET6 { // these are told apart by port alone, see listRequest
			slices.SortFunc(queries, func(a, b netip.AddrPort) int { return int(a.Port()) - int(b.Port()) })
			queries = slices.CompactFunc(queries, func(a, b netip.AddrPort) bool { return a.Port() == b.Port() })
		}
	}
	deleted := 0
	for _, q := range queries {
		n, err := k.deleteMatching(ctx, del, family, p, q, func(f *Flow) bool {
			_, ours := wanted[f.Dst]
			return ours && stale(f)
		})
		deleted += n
		if err != nil {
			return deleted, err
		}
	}
	return deleted, nil
}

func familyOf(to []netip.AddrPort) (uint8, error) {
	for _, dst := range to[1:] {
		if dst.Addr().Is4() != to[0].Addr().Is4() {
			return 0, fmt.Errorf("destinations %s and %s are of different families", to[0], dst)
		}
	}
	if to[0].Addr().Is4() {
		return unix.AF_INET, nil
	}
	return unix.AF_INET6, nil
}

// deleteMatching walks the flows to dst (all of the protocol if it is zero) and deletes
// those that match, in chunks, while the walk goes on: the kernel keeps its place.
func (k *Kernel) deleteMatching(ctx context.Context, del *netlink.Conn, family uint8, p protocol, dst netip.AddrPort, match func(*Flow) bool) (int, error) {
	deleted := 0
	pending := make([]Flow, 0, 64)
	flush := func() error {
		n, err := remove(del, family, pending)
		deleted += n
		pending = pending[:0]
		return err
	}
	for range passes {
		complete, err := k.list(ctx, family, p, dst, func(f *Flow) error {
			if !match(f) {
				return nil
			}
			if pending = append(pending, *f); len(pending) < chunk {
				return nil
			}
			return flush()
		})
		if ferr := flush(); ferr != nil && err == nil {
			err = ferr
		}
		if err != nil || complete {
			return deleted, err
		}
	}
	return deleted, fmt.Errorf("list %s flows: the table changed during each of %d attempts", p, passes)
}

// List calls f for every UDP flow of a family, for tests and diagnostics.
func (k *Kernel) List(ctx context.Context, v6 bool, f func(Flow)) error {
	family := uint8(unix.AF_INET)
	if v6 {
		family = unix.AF_INET6
	}
	complete, err := k.list(ctx, family, udp, netip.AddrPort{}, func(fl *Flow) error { f(*fl); return nil })
	if err == nil && !complete {
		err = errors.New("list UDP flows: the table changed meanwhile, some may be missing or double")
	}
	return err
}

// list hands the flows of a protocol to f one by one. complete is false if the kernel says that
// it may have missed some.
func (k *Kernel) list(ctx context.Context, family uint8, p protocol, dst netip.AddrPort, f func(*Flow) error) (complete bool, err error) {
	filter := !k.unfiltered.Load()
	complete, err = k.listOnce(ctx, family, p, dst, filter, f)
	if filter && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)) {
		k.unfiltered.Store(true)
		return k.listOnce(ctx, family, p, dst, false, f)
	}
	return complete, err
}

func (k *Kernel) listOnce(ctx context.Context, family uint8, p protocol, dst netip.AddrPort, filter bool, f func(*Flow) error) (bool, error) {
	c, err := dial()
	if err != nil {
		return false, err
	}
	defer c.Close()
	_, err = c.Send(netlink.Message{
		Header: netlink.Header{Type: msgGet, Flags: netlink.Request | netlink.Dump},
		Data:   listRequest(family, p, dst, filter),
	})
	if err != nil {
		return false, fmt.Errorf("ask for %s flows: %w", p, err)
	}
	complete := true
	for m, err := range c.ReceiveIter() {
		if err != nil {
			if errors.Is(err, unix.EINTR) {
				return false, nil
			}
			return false, fmt.Errorf("list %s flows: %w", p, err)
		}
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			complete = false
		}
		if err := ctx.Err(); err != nil {
			return false, fmt.Errorf("list %s flows: %w", p, err)
		}
		fl, ok, err := decode(m.Data)
		if err != nil {
			return false, err
		}
		if !ok || protocol(fl.TCP) != p {
			continue
		}
		if err := f(&fl); err != nil {
			return false, err
		}
	}
	return complete, nil
}

// remove deletes entries and returns how many of them were still there. Many go
// in one system call: the kernel answers only failures, and the last.
func remove(c *netlink.Conn, family uint8, flows []Flow) (int, error) {
	deleted := 0
	for batch := range slices.Chunk(flows, batchSize) {
		msgs := make([]netlink.Message, len(batch))
		for i := range batch {
			msgs[i] = netlink.Message{
				Header: netlink.Header{Type: msgDelete, Flags: netlink.Request},
				Data:   deleteRequest(family, &batch[i]),
			}
		}
		msgs[len(msgs)-1].Header.Flags |= netlink.Acknowledge
		sent, err := c.SendMessages(msgs)
		if err != nil {
			return deleted, fmt.Errorf("delete %d flows: %w", len(batch), err)
		}
		failed, err := answers(c, sent[len(sent)-1].Header.Sequence)
		deleted += len(batch) - failed
		if err != nil {
			return deleted, fmt.Errorf("delete %d flows, the first of them %s: %w", len(batch), &batch[0], err)
		}
	}
	return deleted, nil
}

// answers reads until the answer to the message with the sequence number last. It
// counts the failures and returns the first that is not of an entry that was gone
// already.
func answers(c *netlink.Conn, last uint32) (failed int, first error) {
	for {
		msgs, err := c.Receive()
		if e, ok := errors.AsType[*netlink.OpError](err); ok && e.Sequence != 0 {
			failed++
			if first == nil && !errors.Is(err, fs.ErrNotExist) {
				first = err
			}
			if e.Sequence == last {
				return failed, first
			}
			continue
		}
		if err != nil {
			return failed, err
		}
		for _, m := range msgs {
			if m.Header.Sequence == last {
				return failed, first
			}
		}
	}
}

func dial() (*netlink.Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: receive})
	if err != nil {
		return nil, fmt.Errorf("open connection tracking (netlink, needs CAP_NET_ADMIN): %w", err)
	}
	return c, nil
}
