package handover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"time"
)

// Estate is what a process has to hand over. Its functions are called one at a time.
type Estate struct {
	// Sockets lists the listening sockets. The process goes on serving them.
	Sockets func() []Socket
	// Stop stops serving these, as the successor does, and returns the rest, which is
	// closed here once it was sent.
	Stop func([]Socket) Rest
	// Retire takes nothing new any more, as another way than these sockets serves it
	// now. nil: that cannot be asked for.
	Retire func() error
	Log    *slog.Logger
}

// Offer waits at a Unix socket for a successor process of the same user, gives it the
// listening sockets, and stops accepting when the successor says that it serves them:
// no connection is lost in between, as both have the same queue. It returns nil then,
// and ctx's error if nobody came. A path that begins with "@" is in the abstract
// namespace. A successor that breaks off changes nothing. Who only asks that nothing
// new is taken is answered, and more may come.
func Offer(ctx context.Context, path string, e Estate) error {
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
		given, err := e.answer(ctx, conn)
		conn.Close()
		if err != nil {
			e.Log.Warn("handing over the listening sockets failed; going on", "err", err)
		}
		if given {
			return nil
		}
	}
}

// answer serves one successor, and reports whether it has everything now.
func (e *Estate) answer(ctx context.Context, conn *net.UnixConn) (given bool, err error) {
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := sameUser(conn); err != nil {
		return false, err
	}
	_ = conn.SetDeadline(time.Now().Add(wait))
	var asked [1]byte
	if _, err := io.ReadFull(conn, asked[:]); err != nil {
		return false, fmt.Errorf("reading what a successor asks for: %w", err)
	}
	switch {
	case asked[0] == askSockets:
		return e.handOver(conn)
	case asked[0] == askRetire && e.Retire != nil:
		if err := e.Retire(); err != nil {
			return false, err
		}
		_, err := conn.Write(asked[:])
		return false, err
	}
	return false, fmt.Errorf("a successor asked for %q, which there is not", asked)
}

func (e *Estate) handOver(conn *net.UnixConn) (given bool, err error) {
	sockets := e.Sockets()
	for i := range sockets {
		if err := send(conn, message{Socket: &sockets[i]}); err != nil {
			return false, err
		}
	}
	if err := send(conn, message{}); err != nil {
		return false, err
	}
	// The successor may take its time to plan; it either confirms or goes away.
	_ = conn.SetDeadline(time.Time{})
	var done [1]byte
	if _, err := io.ReadFull(conn, done[:]); err != nil {
		return false, fmt.Errorf("waiting for the successor to serve: %w", err)
	}
	rest := e.Stop(sockets)
	defer rest.Close()
	_ = conn.SetDeadline(time.Now().Add(wait))
	if err := rest.send(conn); err != nil {
		return true, fmt.Errorf("telling the successor that accepting has stopped: %w", err)
	}
	return true, nil
}

func (r *Rest) send(conn *net.UnixConn) error {
	for i := range r.Flows {
		if err := send(conn, message{Flow: &r.Flows[i]}); err != nil {
			return err
		}
	}
	for _, a := range r.Affinity {
		for len(a.Clients) > 0 {
			n := min(len(a.Clients), stickyAtOnce)
			if err := send(conn, message{Affinity: &Affinity{a.Listener, a.Clients[:n]}}); err != nil {
				return err
			}
			a.Clients = a.Clients[n:]
		}
	}
	return send(conn, message{})
}
