package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/fault"
)

// Kernel is the table of the network namespace of the thread that makes the first
// call, or the first one after Close. The zero value is ready.
//
// A kernel that has ip_vs and its schedulers as modules loads them itself, with its
// own helper and on the machine's root folder, wherever the caller runs. Load is for
// those whose helper is switched off.
type Kernel struct {
	// Load loads a kernel module by name; nil does not.
	Load func(ctx context.Context, module string) error
	// Dial opens the socket; nil opens a real one.
	Dial func() (*genetlink.Conn, error)

	mu     sync.Mutex // guards all below; the connection has a lock of its own
	conn   *genetlink.Conn
	family uint16 // number of generic netlink's family IPVS
}

var _ IPVS = (*Kernel)(nil)

// Close closes the socket, if there is one. The next call opens another.
func (k *Kernel) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn == nil {
		return nil
	}
	err := k.conn.Close()
	k.conn = nil
	return err
}

// open returns the socket and the family's number, as last seen.
func (k *Kernel) open() (*genetlink.Conn, uint16, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		return k.conn, k.family, nil
	}
	return k.resolve()
}

// reopen asks for the family's number again: it is another one if the module was
// unloaded and loaded since.
func (k *Kernel) reopen() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, _, err := k.resolve()
	return err
}

// resolve opens the socket if need be and asks for the family's number, which makes the
// kernel load the module; k.mu is held.
func (k *Kernel) resolve() (*genetlink.Conn, uint16, error) {
	c := k.conn
	if c == nil {
		dial := k.Dial
		if dial == nil {
			dial = func() (*genetlink.Conn, error) { return genetlink.Dial(nil) }
		}
		var err error
		if c, err = dial(); err != nil {
			return nil, 0, fmt.Errorf("open a netlink socket: %w", err)
		}
	}
	f, err := c.GetFamily(genlName)
	if err != nil {
		_ = c.Close()
		k.conn = nil
		if errors.Is(err, os.ErrNotExist) {
			err = ErrMissing
		}
		return nil, 0, err
	}
	k.conn, k.family = c, f.ID
	return c, f.ID, nil
}

// do sends one message and returns the answers.
func (k *Kernel) do(cmd uint8, flags netlink.HeaderFlags, fill func(*netlink.AttributeEncoder)) ([]genetlink.Message, error) {
	c, family, err := k.open()
	if err != nil {
		return nil, err
	}
	m, err := message(cmd, fill)
	if err != nil {
		return nil, err
	}
	return c.Execute(m, family, netlink.Request|flags)
}

// change sends one message that changes something. notExist says what ENOENT means.
func (k *Kernel) change(cmd uint8, notExist error, fill func(*netlink.AttributeEncoder)) error {
	if err := fault.Inject(); err != nil {
		return err
	}
	_, err := k.do(cmd, netlink.Acknowledge, fill)
	return refusal(err, notExist)
}

// refusal returns what a number of the kernel means here; none comes with a text.
func refusal(err, notExist error) error {
	switch {
	case errors.Is(err, unix.EEXIST):
		return ErrExist
	case errors.Is(err, unix.ESRCH):
		return ErrNoServer
	case errors.Is(err, unix.ENOENT):
		return notExist
	case errors.Is(err, unix.EAFNOSUPPORT):
		return ErrFamily
	}
	return err
}

func (k *Kernel) Probe(ctx context.Context, f Family, scheduler string) error {
	err := k.reopen()
	if errors.Is(err, ErrMissing) {
		if err := k.load(ctx, "ip_vs"); err != nil {
			return fmt.Errorf("probe ip_vs: %w: it is neither built in nor loaded, and %w", ErrMissing, err)
		}
		err = k.reopen()
	}
	if err != nil {
		return fmt.Errorf("probe ip_vs: %w", err)
	}
	// An address that is nobody's (RFC 5737, RFC 3849), and a port that is no Service's.
	addr := netip.MustParseAddr("192.0.2.0")
	if f == IPv6 {
		addr = netip.MustParseAddr("2001:db8::")
	}
	v := VirtualServer{Key: ByAddr(TCP, netip.AddrPortFrom(addr, 65535)), Scheduler: scheduler, ClientBits: f.bits()}
	err = k.CreateServer(v)
	if errors.Is(err, ErrNoScheduler) {
		module := "ip_vs_" + scheduler
		if err := k.load(ctx, module); err != nil {
			return fmt.Errorf("probe ip_vs: %w as %s: it is neither built in nor loaded, and %w", ErrNoScheduler, scheduler, err)
		}
		err = k.CreateServer(v)
	}
	switch {
	case errors.Is(err, ErrExist): // left by one that was killed here, or tries the same just now
		err = k.UpdateServer(v)
		fallthrough
	case err == nil:
		if gone := k.DeleteServer(v.Key); !errors.Is(gone, ErrNoServer) {
			err = errors.Join(err, gone)
		}
	}
	if err != nil {
		return fmt.Errorf("probe ip_vs for %s: %w", f, err)
	}
	return nil
}

func (k *Kernel) load(ctx context.Context, module string) error {
	if k.Load == nil {
		return fmt.Errorf("kernel module %s is not loaded; load it with: modprobe %s", module, module)
	}
	return k.Load(ctx, module)
}

func (k *Kernel) Dump(ctx context.Context) ([]Entry, error) {
	if err := k.reopen(); err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	msgs, err := k.do(cmdGetService, netlink.Dump, nil)
	if err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	out := make([]Entry, len(msgs))
	for i, m := range msgs {
		if out[i].VirtualServer, err = decodeServer(m.Data); err != nil {
			return nil, fmt.Errorf("list virtual servers: the kernel's answer: %w", err)
		}
	}
	for i := range out {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("list virtual servers: %w", err)
		}
		if out[i].Real, err = k.listReal(out[i].Key); err != nil {
			return nil, fmt.Errorf("list the real servers of %s: %w", out[i].Key, err)
		}
	}
	slices.SortFunc(out, func(a, b Entry) int { return a.Key.Compare(b.Key) })
	return out, nil
}

// listReal returns none for a virtual server that does not exist: the kernel tells no
// difference.
func (k *Kernel) listReal(key Key) ([]Live, error) {
	if err := key.check(); err != nil {
		return nil, err
	}
	msgs, err := k.do(cmdGetDest, netlink.Dump, func(e *netlink.AttributeEncoder) { encodeKey(e, key) })
	if err != nil {
		return nil, err
	}
	out := make([]Live, len(msgs))
	for i, m := range msgs {
		if out[i], err = decodeReal(m.Data, key.Family); err != nil {
			return nil, fmt.Errorf("the kernel's answer: %w", err)
		}
	}
	sortLive(out)
	return out, nil
}

func (k *Kernel) RealServers(key Key) ([]Live, error) {
	out, err := k.listReal(key)
	if err == nil && len(out) == 0 {
		// Is it there at all?
		_, err = k.do(cmdGetService, 0, func(e *netlink.AttributeEncoder) { encodeKey(e, key) })
		err = refusal(err, ErrNoServer)
	}
	if err != nil {
		return nil, fmt.Errorf("list the real servers of %s: %w", key, err)
	}
	return out, nil
}

func (k *Kernel) CreateServer(v VirtualServer) error {
	if err := k.writeServer(cmdNewService, v); err != nil {
		return fmt.Errorf("create virtual server %s: %w", v, err)
	}
	return nil
}

func (k *Kernel) UpdateServer(v VirtualServer) error {
	if err := k.writeServer(cmdSetService, v); err != nil {
		return fmt.Errorf("update virtual server %s: %w", v, err)
	}
	return nil
}

func (k *Kernel) writeServer(cmd uint8, v VirtualServer) error {
	if err := v.check(); err != nil {
		return err
	}
	return k.change(cmd, ErrNoScheduler, func(e *netlink.AttributeEncoder) { encodeServer(e, v) })
}

func (k *Kernel) DeleteServer(key Key) error {
	err := key.check()
	if err == nil {
		err = k.change(cmdDelService, ErrNoServer, func(e *netlink.AttributeEncoder) { encodeKey(e, key) })
	}
	if err != nil {
		return fmt.Errorf("delete virtual server %s: %w", key, err)
	}
	return nil
}

func (k *Kernel) CreateReal(key Key, r RealServer) error {
	if err := k.writeReal(cmdNewDest, key, r); err != nil {
		return fmt.Errorf("create real server %s of %s: %w", r, key, err)
	}
	return nil
}

func (k *Kernel) UpdateReal(key Key, r RealServer) error {
	if err := k.writeReal(cmdSetDest, key, r); err != nil {
		return fmt.Errorf("update real server %s of %s: %w", r, key, err)
	}
	return nil
}

func (k *Kernel) DeleteReal(key Key, addr netip.AddrPort) error {
	if err := k.writeReal(cmdDelDest, key, RealServer{Addr: addr}); err != nil {
		return fmt.Errorf("delete real server %s of %s: %w", addr, key, err)
	}
	return nil
}

func (k *Kernel) writeReal(cmd uint8, key Key, r RealServer) error {
	if err := key.checkReal(r); err != nil {
		return err
	}
	return k.change(cmd, ErrNoReal, func(e *netlink.AttributeEncoder) {
		encodeKey(e, key)
		encodeReal(e, r, cmd != cmdDelDest)
	})
}

func (k *Kernel) Timeouts() (Timeouts, error) {
	msgs, err := k.do(cmdGetConfig, 0, nil)
	var t Timeouts
	switch {
	case err != nil:
	case len(msgs) != 1:
		err = fmt.Errorf("%d answers instead of one", len(msgs))
	default:
		t, err = decodeTimeouts(msgs[0].Data)
	}
	if err != nil {
		return t, fmt.Errorf("read the time-outs of ip_vs: %w", err)
	}
	return t, nil
}

func (k *Kernel) SetTimeouts(t Timeouts) error {
	err := t.check()
	if err == nil {
		err = k.change(cmdSetConfig, ErrMissing, func(e *netlink.AttributeEncoder) { encodeTimeouts(e, t) })
	}
	if err != nil {
		return fmt.Errorf("set the time-outs of ip_vs to %s: %w", t, err)
	}
	return nil
}
