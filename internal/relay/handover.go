package relay

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// bequest names one socket of a handover; the descriptor comes with it.
type bequest struct {
	Key      string
	Protocol plan.Protocol
	Addr     netip.AddrPort
}

// handoverWait is how long one step of the other side may take.
const handoverWait = 30 * time.Second

// Offer waits at a Unix socket for a successor process of the same user, gives it the
// listening sockets that have a key, and stops accepting when the successor says that
// it serves them: no connection is lost in between, as both have the same queue. It
// returns nil then, and ctx's error if nobody came. A path that begins with "@" is in
// the abstract namespace. A successor that breaks off changes nothing.
func (r *Relay) Offer(ctx context.Context, path string) error {
	if path != "" && path[0] != '@' {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("offering the listening sockets at %s: %w", path, err)
		}
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return fmt.Errorf("offering the listening sockets at %s: %w", path, err)
	}
	defer ln.Close()
	// A successor that offers at the same path puts its own socket there.
	ln.SetUnlinkOnClose(false)
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	for {
		conn, err := ln.AcceptUnix()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("offering the listening sockets at %s: %w", path, err)
		}
		err = r.handOver(ctx, conn)
		conn.Close()
		if err == nil {
			return nil
		}
		r.opts.Log.Warn("handing over the listening sockets failed; going on", "err", err)
	}
}

// handOver serves one successor.
func (r *Relay) handOver(ctx context.Context, conn *net.UnixConn) error {
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := sameUser(conn); err != nil {
		return err
	}
	given, err := r.give(conn)
	if err != nil {
		return err
	}
	// The successor may take its time to plan; it either confirms or goes away.
	var done [1]byte
	if _, err := io.ReadFull(conn, done[:]); err != nil {
		return fmt.Errorf("waiting for the successor to serve: %w", err)
	}
	for _, ln := range given {
		r.mu.Lock()
		delete(r.listeners, ln)
		r.mu.Unlock()
		ln.stop(false)
	}
	_ = conn.SetDeadline(time.Now().Add(handoverWait))
	_, err = conn.Write(done[:])
	if err != nil {
		r.opts.Log.Warn("telling the successor that accepting has stopped", "err", err)
	}
	return nil
}

// give sends the sockets, one message each: its length is bounded and the kernel
// limits the descriptors of a message.
func (r *Relay) give(conn *net.UnixConn) ([]*Listener, error) {
	r.mu.Lock()
	var given []*Listener
	for ln := range r.listeners {
		if ln.config.Key != "" {
			given = append(given, ln)
		}
	}
	r.mu.Unlock()
	_ = conn.SetDeadline(time.Now().Add(handoverWait))
	defer func() { _ = conn.SetDeadline(time.Time{}) }()
	for _, ln := range given {
		if err := sendSocket(conn, bequest{ln.config.Key, ln.config.Protocol, ln.config.Addr}, ln.fd); err != nil {
			return nil, err
		}
	}
	return given, sendSocket(conn, bequest{}, -1)
}

// sendSocket writes the length of b, with the descriptor (-1: none), and then b.
func sendSocket(conn *net.UnixConn, b bequest, fd int) error {
	var body bytes.Buffer
	if err := gob.NewEncoder(&body).Encode(b); err != nil {
		return fmt.Errorf("handing over %s %s: %w", b.Protocol, b.Addr, err)
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	head := []byte{byte(body.Len() >> 8), byte(body.Len())}
	if _, _, err := conn.WriteMsgUnix(head, rights, nil); err != nil {
		return fmt.Errorf("handing over %s %s: %w", b.Protocol, b.Addr, err)
	}
	if _, err := conn.Write(body.Bytes()); err != nil {
		return fmt.Errorf("handing over %s %s: %w", b.Protocol, b.Addr, err)
	}
	return nil
}

func receiveSocket(conn *net.UnixConn) (bequest, int, error) {
	var b bequest
	head, control := make([]byte, 2), make([]byte, unix.CmsgSpace(4))
	n, cn, _, _, err := conn.ReadMsgUnix(head, control)
	if err == nil && n < len(head) {
		_, err = io.ReadFull(conn, head[n:])
	}
	if err != nil {
		return b, -1, fmt.Errorf("receiving a listening socket: %w", err)
	}
	fd, err := received(control[:cn])
	if err != nil {
		return b, -1, err
	}
	body := make([]byte, int(head[0])<<8|int(head[1]))
	if _, err = io.ReadFull(conn, body); err == nil {
		err = gob.NewDecoder(bytes.NewReader(body)).Decode(&b)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return b, -1, fmt.Errorf("receiving a listening socket: %w", err)
	}
	return b, fd, nil
}

// received returns the descriptor of a message, -1 if it has none.
func received(control []byte) (int, error) {
	if len(control) == 0 {
		return -1, nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) != 1 {
		return -1, fmt.Errorf("receiving a listening socket: %d control messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, fmt.Errorf("receiving a listening socket: %d descriptors: %w", len(fds), err)
	}
	unix.CloseOnExec(fds[0])
	return fds[0], nil
}

// sameUser refuses a peer that runs as somebody else.
func sameUser(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("asking who the other side is: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return fmt.Errorf("asking who the other side is: %w", err)
	}
	if credErr != nil {
		return fmt.Errorf("asking who the other side is: %w", credErr)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("a process of user %d asked for the listening sockets", cred.Uid)
	}
	return nil
}

// Inheritance is what a predecessor process left: its listening sockets, which both
// serve until Done.
type Inheritance struct {
	conn *net.UnixConn

	mu      sync.Mutex // guards sockets
	sockets map[socketName]map[netip.AddrPort]int
}

// socketName is what sockets of a handover are looked up by.
type socketName struct {
	key      string
	protocol plan.Protocol
}

// Inherit asks the process that offers its sockets at path for them; nil without an
// error if there is none. Options.Inherited gives them to a relay.
func Inherit(ctx context.Context, path string) (*Inheritance, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("asking for the listening sockets of a predecessor: %w", err)
	}
	conn := c.(*net.UnixConn)
	in := &Inheritance{conn: conn, sockets: make(map[socketName]map[netip.AddrPort]int)}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := sameUser(conn); err != nil {
		in.abandon()
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(handoverWait))
	for {
		b, fd, err := receiveSocket(conn)
		if err != nil {
			in.abandon()
			return nil, err
		}
		if fd < 0 {
			_ = conn.SetDeadline(time.Time{})
			return in, nil
		}
		name := socketName{b.Key, b.Protocol}
		if in.sockets[name] == nil {
			in.sockets[name] = make(map[netip.AddrPort]int)
		}
		in.sockets[name][b.Addr] = fd
	}
}

// take returns the socket for c, if there is one.
func (in *Inheritance) take(c ListenConfig) (int, bool) {
	if in == nil || c.Key == "" {
		return -1, false
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	sockets := in.sockets[socketName{c.Key, c.Protocol}]
	for addr, fd := range sockets {
		if addr == c.Addr || c.Addr.Port() == 0 && addr.Addr() == c.Addr.Addr() {
			delete(sockets, addr)
			return fd, true
		}
	}
	return -1, false
}

// Addrs returns the addresses of the sockets with a key that nobody has taken yet.
func (in *Inheritance) Addrs(key string, p plan.Protocol) []netip.AddrPort {
	in.mu.Lock()
	defer in.mu.Unlock()
	return slices.SortedFunc(maps.Keys(in.sockets[socketName{key, p}]), netip.AddrPort.Compare)
}

// Done tells the predecessor to stop accepting and waits until it has. Sockets that
// nobody took are closed.
func (in *Inheritance) Done() error {
	defer in.abandon()
	_ = in.conn.SetDeadline(time.Now().Add(handoverWait))
	var done [1]byte
	if _, err := in.conn.Write(done[:]); err != nil {
		return fmt.Errorf("telling the predecessor to stop accepting: %w", err)
	}
	if _, err := io.ReadFull(in.conn, done[:]); err != nil {
		return fmt.Errorf("waiting for the predecessor to stop accepting: %w", err)
	}
	return nil
}

// abandon closes everything that was not taken.
func (in *Inheritance) abandon() {
	in.conn.Close()
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, sockets := range in.sockets {
		for _, fd := range sockets {
			unix.Close(fd)
		}
	}
	clear(in.sockets)
}
