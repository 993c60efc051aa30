package handover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Inheritance is what a predecessor process left: its listening sockets, which it serves
// until Done.
type Inheritance struct {
	conn *net.UnixConn

	mu      sync.Mutex // guards sockets
	sockets map[Name]int
}

// Inherit asks the process that offers its sockets at path for them; nil without an
// error if there is none.
func Inherit(ctx context.Context, path string) (*Inheritance, error) {
	conn, err := ask(ctx, path, askSockets)
	if conn == nil || err != nil {
		return nil, err
	}
	in := &Inheritance{conn: conn, sockets: make(map[Name]int)}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		m, err := receive(conn)
		if err != nil {
			in.Abandon()
			return nil, err
		}
		if m.Socket == nil {
			_ = conn.SetDeadline(time.Time{})
			return in, nil
		}
		in.sockets[m.Socket.Name] = m.Socket.FD
	}
}

// Retire asks the process that offers its sockets at path to take nothing new any
// more, and waits until it does not; false without an error if there is none. One of
// another user counts as none: anybody with the host's network could keep other modes
// waiting.
func Retire(ctx context.Context, path string) (bool, error) {
	conn, err := ask(ctx, path, askRetire)
	if errors.Is(err, errOtherUser) {
		return false, nil
	}
	if conn == nil || err != nil {
		return false, err
	}
	defer conn.Close()
	var done [1]byte
	if _, err := io.ReadFull(conn, done[:]); err != nil {
		return false, fmt.Errorf("waiting for a predecessor to take nothing new: %w", err)
	}
	return true, nil
}

// ask connects to who offers at path; nil without an error if nobody does. Each step
// of the other side has its time.
func ask(ctx context.Context, path string, what byte) (*net.UnixConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("asking a predecessor: %w", err)
	}
	conn := c.(*net.UnixConn)
	_ = conn.SetDeadline(time.Now().Add(wait))
	err = sameUser(conn)
	if err == nil {
		_, err = conn.Write([]byte{what})
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("asking a predecessor: %w", err)
	}
	return conn, nil
}

// Take returns the socket of a name, if there is one; with port 0 any of its address.
// A nil Inheritance has none.
func (in *Inheritance) Take(n Name) (fd int, ok bool) {
	if in == nil || n.Key == "" {
		return -1, false
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	fd, ok = in.sockets[n]
	if !ok && n.Addr.Port() == 0 {
		for have := range in.sockets {
			if have.Key == n.Key && have.Protocol == n.Protocol && have.Index == n.Index && have.Addr.Addr() == n.Addr.Addr() {
				n, fd, ok = have, in.sockets[have], true
				break
			}
		}
	}
	delete(in.sockets, n)
	if !ok {
		return -1, false
	}
	return fd, true
}

// Done tells the predecessor to stop serving, waits until it has, and returns what it
// leaves besides. Sockets that nobody took are closed. After an error what came before
// it is returned with it.
func (in *Inheritance) Done() (Rest, error) {
	defer in.Abandon()
	var rest Rest
	_ = in.conn.SetDeadline(time.Now().Add(wait))
	if _, err := in.conn.Write([]byte{askSockets}); err != nil {
		return rest, fmt.Errorf("telling the predecessor to stop accepting: %w", err)
	}
	for {
		m, err := receive(in.conn)
		switch {
		case err != nil:
			return rest, fmt.Errorf("waiting for the predecessor to stop accepting: %w", err)
		case m.Flow != nil:
			rest.Flows = append(rest.Flows, *m.Flow)
		case m.Affinity != nil:
			rest.Affinity = append(rest.Affinity, *m.Affinity)
		default:
			return rest, nil
		}
	}
}

// Abandon closes everything that was not taken.
func (in *Inheritance) Abandon() {
	in.conn.Close()
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, fd := range in.sockets {
		unix.Close(fd)
	}
	clear(in.sockets)
}
