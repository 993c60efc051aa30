// Package kernel is the seam to the nf_tables of the running kernel, by netlink:
// transactions (encode.go), listings (decode.go) and notifications. Package nft says
// what the words mean.
package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/fault"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

const (
	sendBuffer    = 16 << 20 // bytes; a transaction is one write
	receiveBuffer = 4 << 20
	eventBuffer   = 16 << 20
	// readSize is how much is received at once. The kernel hands out as much of a
	// listing, up to 32 KiB, and walks a set from its beginning for every piece.
	readSize = 64 << 10
	// mostKept is how much room of a transaction is kept for the next, in bytes.
	mostKept = 1 << 20
	// dumpTries is how often a listing is repeated that a commit of somebody
	// else's disturbed.
	dumpTries = 10
)

// Tables is the nf_tables of the network namespace in which its first call was made.
type Tables struct {
	mu      sync.Mutex // guards all below
	conn    *netlink.Conn
	writers []uint32 // port numbers of our sockets, newest last
	commits uint32   // that Commit made

	// Of Commit alone. The numbers begin anywhere: answers to what the library numbers by
	// itself are read before the next transaction, and the other way around.
	batch    batch
	sequence uint32

	eventBuffer int // bytes, in place of the constant; for tests
}

// dial opens the socket on first use.
func (k *Tables) dial() (*netlink.Conn, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		return k.conn, nil
	}
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: readSize})
	if err != nil {
		return nil, fmt.Errorf("open a netfilter socket: %w", err)
	}
	_ = c.SetWriteBuffer(sendBuffer) // if refused, transactions that are too large fail
	_ = c.SetReadBuffer(receiveBuffer)
	_ = c.SetOption(netlink.ExtendedAcknowledge, true) // only for better messages
	k.conn = c
	k.writers = append(k.writers, c.PID())
	return c, nil
}

// Close implements Tables.
func (k *Tables) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn == nil {
		return nil
	}
	err := k.conn.Close()
	k.conn = nil
	return err
}

// Commit implements Tables.
func (k *Tables) Commit(ctx context.Context, ops []nft.Op) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(ops) == 0 {
		return nil
	}
	if err := fault.Inject(); err != nil {
		return err
	}
	c, err := k.dial()
	if err != nil {
		return err
	}
	b := &k.batch
	b.reset(c.PID(), max(k.sequence, 1)) // 0 is nobody's
	b.bound(unix.NFNL_MSG_BATCH_BEGIN)
	ends := make([]uint32, len(ops)) // by step: the number of messages up to its end
	for i := range ops {
		b.step(&ops[i])
		ends[i] = b.count
	}
	if b.count == 1 {
		return nil
	}
	b.acknowledge()
	last := b.first + b.count - 1
	b.bound(unix.NFNL_MSG_BATCH_END)
	k.sequence = b.first + b.count
	if err := send(c, b.Buf); err != nil {
		return &nft.Error{Err: fmt.Errorf("send %d steps: %w", len(ops), err)}
	}
	if cap(b.Buf) > mostKept {
		b.Buf = nil
	}
	seq, err := outcome(c, b.first, last)
	if err == nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.commits++
		return nil
	}
	at := seq - b.first
	for i, end := range ends {
		if at > 0 && at < end {
			return &nft.Error{Op: &ops[i], Err: err}
		}
	}
	return &nft.Error{Err: err}
}

// send writes messages as they are. The library would copy each of them twice.
func send(c *netlink.Conn, b []byte) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		sent = unix.Sendto(int(fd), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return !errors.Is(sent, unix.EAGAIN)
	})
	return errors.Join(err, sent)
}

// outcome waits for the answer to a transaction whose messages are numbered from
// first to last; an error comes with the number of the message that it is about.
func outcome(c *netlink.Conn, first, last uint32) (uint32, error) {
	for {
		msgs, err := c.Receive()
		if oe, ok := errors.AsType[*netlink.OpError](err); ok {
			if oe.Sequence == 0 {
				return 0, fmt.Errorf("receive the answer: %w", err)
			}
			if oe.Sequence-first <= last-first {
				why := oe.Err
				if oe.Message != "" {
					why = fmt.Errorf("%w (%s)", why, oe.Message)
				}
				return oe.Sequence, why
			}
			continue // an older transaction's
		}
		if err != nil {
			return 0, fmt.Errorf("receive the answer: %w", err)
		}
		for _, m := range msgs {
			if m.Header.Type == netlink.Error && m.Header.Sequence == last {
				return 0, nil
			}
		}
	}
}

// dump carries out a listing; reset is called before each attempt.
func (k *Tables) dump(ctx context.Context, kind uint16, f nft.Family, fill func(*wire.Message), reset func(), each func([]byte)) error {
	c, err := k.dial()
	if err != nil {
		return err
	}
	req := request(kind, netlink.Dump, f)
	w := &wire.Message{Buf: req.Data}
	fill(w)
	req.Data = w.Buf
	for try := 0; ; try++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		reset()
		sent, err := c.Send(req)
		if err != nil {
			return err
		}
		torn := false
		for m, err := range c.ReceiveIter() {
			if oe, ok := errors.AsType[*netlink.OpError](err); ok && oe.Sequence != 0 && oe.Sequence != sent.Header.Sequence {
				continue
			}
			if err != nil {
				return err
			}
			if m.Header.Sequence != sent.Header.Sequence {
				continue
			}
			torn = torn || m.Header.Flags&netlink.DumpInterrupted != 0
			each(body(m.Data))
		}
		if !torn {
			return nil
		}
		if try >= dumpTries {
			return errors.New("the tables change too fast to be listed")
		}
	}
}

// Exists implements Tables.
func (k *Tables) Exists(ctx context.Context, t nft.Table) (bool, error) {
	_, err := k.askTable(ctx, t)
	if errors.Is(err, nft.ErrNoTable) {
		return false, nil
	}
	return err == nil, err
}

// Others implements Tables: the kernel counts all commits of the network namespace.
func (k *Tables) Others(ctx context.Context) (uint32, error) {
	b, err := k.get(ctx, request(unix.NFT_MSG_GETGEN, 0, 0))
	if err != nil {
		return 0, fmt.Errorf("ask for the generation of nf_tables: %w", err)
	}
	var all uint32
	wire.EachAttr(b, func(typ uint16, d []byte) {
		if typ == unix.NFTA_GEN_ID {
			all = binary.BigEndian.Uint32(d)
		}
	})
	k.mu.Lock()
	defer k.mu.Unlock()
	return all - k.commits, nil
}

// askTable asks for one table. Of the answer only what is the table's own is filled in.
func (k *Tables) askTable(ctx context.Context, t nft.Table) (*nft.Contents, error) {
	req := request(unix.NFT_MSG_GETTABLE, 0, t.Family)
	w := &wire.Message{Buf: req.Data}
	w.Text(unix.NFTA_TABLE_NAME, t.Name)
	req.Data = w.Buf
	b, err := k.get(ctx, req)
	switch {
	case errors.Is(err, nft.ErrNotExist):
		return nil, nft.ErrNoTable
	case err != nil:
		return nil, fmt.Errorf("ask for table %s: %w", t, err)
	}
	c := &nft.Contents{Table: t}
	wire.EachAttr(b, func(typ uint16, d []byte) {
		switch typ {
		case tableUserdata:
			c.Comment = wire.CommentOf(d, commentOfTable)
		case unix.NFTA_TABLE_FLAGS:
			const dormant = 1 // NFT_TABLE_F_DORMANT
			c.Dormant = u32(d)&dormant != 0
		}
	})
	return c, nil
}

// get asks for one object and returns its attributes.
func (k *Tables) get(ctx context.Context, req netlink.Message) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c, err := k.dial()
	if err != nil {
		return nil, err
	}
	sent, err := c.Send(req)
	if err != nil {
		return nil, err
	}
	for {
		msgs, err := c.Receive()
		if oe, ok := errors.AsType[*netlink.OpError](err); ok && oe.Sequence != 0 && oe.Sequence != sent.Header.Sequence {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, m := range msgs {
			if m.Header.Sequence == sent.Header.Sequence {
				return body(m.Data), nil
			}
		}
	}
}

// Lookup implements Tables.
func (k *Tables) Lookup(ctx context.Context, t nft.Table, s *nft.Set, keys []nft.Tuple) ([]nft.Element, error) {
	var out []nft.Element
	for i := range keys {
		ask := request(unix.NFT_MSG_GETSETELEM, 0, t.Family)
		w := &wire.Message{Buf: ask.Data}
		putElements(w, t, s, []nft.Element{{Key: keys[i]}}, false)
		ask.Data = w.Buf
		b, err := k.get(ctx, ask)
		if errors.Is(err, nft.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("ask for an element of %s in table %s: %w", s.Name, t, err)
		}
		eachElement(b, func(e nft.Element) { out = append(out, e) })
	}
	return out, nil
}

// Read implements Tables.
func (k *Tables) Read(ctx context.Context, t nft.Table) (*nft.Contents, error) {
	return k.ReadSome(ctx, t, func(*nft.Set) bool { return true })
}

// ReadSome implements Tables.
func (k *Tables) ReadSome(ctx context.Context, t nft.Table, want func(*nft.Set) bool) (*nft.Contents, error) {
	c, err := k.askTable(ctx, t)
	if err != nil {
		return nil, err
	}
	fail := func(what string, err error) error { return fmt.Errorf("list %s of table %s: %w", what, t, err) }
	err = k.dump(ctx, unix.NFT_MSG_GETCHAIN, t.Family, func(*wire.Message) {},
		func() { c.Chains = map[string]*nft.ChainContents{} },
		func(b []byte) {
			if table, ch := parseChain(b); table == t.Name {
				c.Chains[ch.Name] = &nft.ChainContents{Chain: ch}
			}
		})
	if err != nil {
		return nil, fail("chains", err)
	}
	err = k.dump(ctx, unix.NFT_MSG_GETRULE, t.Family,
		func(w *wire.Message) { w.Text(unix.NFTA_RULE_TABLE, t.Name) },
		func() {
			for _, ch := range c.Chains {
				ch.Rules = nil
			}
		},
		func(b []byte) {
			chain, r := parseRule(t.Family, b)
			if ch := c.Chains[chain]; ch != nil {
				ch.Rules = append(ch.Rules, r)
			}
		})
	if err != nil {
		return nil, fail("rules", err)
	}
	err = k.dump(ctx, unix.NFT_MSG_GETSET, t.Family,
		func(w *wire.Message) { w.Text(unix.NFTA_SET_TABLE, t.Name) },
		func() { c.Sets = map[string]*nft.Set{} },
		func(b []byte) {
			s := parseSet(b)
			c.Sets[s.Name] = s
		})
	if err != nil {
		return nil, fail("sets", err)
	}
	c.Elements = map[string][]nft.Element{}
	for _, s := range c.Sets {
		if s.Dynamic || !want(s) {
			continue
		}
		if c.Elements[s.Name], err = k.elements(ctx, t, s); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (k *Tables) elements(ctx context.Context, t nft.Table, s *nft.Set) ([]nft.Element, error) {
	var out []nft.Element
	type place struct { // keys and ends of ranges apart
		key nft.Tuple
		end bool
	}
	var seen map[place]struct{}
	// A set that grows its hash table meanwhile is walked from its beginning again,
	// so that some elements come twice and others not at all.
	twice := false
	for try := 0; try < dumpTries && (try == 0 || twice); try++ {
		twice = false
		err := k.dump(ctx, unix.NFT_MSG_GETSETELEM, t.Family,
			func(w *wire.Message) {
				w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
				w.Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name)
			},
			func() { out, seen, twice = nil, map[place]struct{}{}, false },
			func(b []byte) {
				eachElement(b, func(e nft.Element) {
					key := place{e.Key, e.End}
					_, again := seen[key]
					twice = twice || again
					seen[key] = struct{}{}
					if !again {
						out = append(out, e)
					}
				})
			})
		if errors.Is(err, nft.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list elements of %s in table %s: %w", s.Name, t, err)
		}
	}
	return out, nil
}

// Elements implements Tables.
func (k *Tables) Elements(ctx context.Context, t nft.Table, s *nft.Set, f func(nft.Element)) error {
	all, err := k.elements(ctx, t, s)
	for _, e := range all {
		f(e)
	}
	return err
}
