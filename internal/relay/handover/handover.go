// Package handover passes what a relay holds to the process that takes its place: the
// listening sockets, and when the successor serves these, the UDP flows with the
// sockets to their endpoints, and which clients stick to which endpoints.
//
// Both processes run as the same user and meet at a Unix socket. The successor asks
// first, with one byte; what follows are messages of a length and a gob, each with at
// most one descriptor.
package handover

import (
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/balance"
)

// Name is what a listening socket is known by in both processes.
type Name struct {
	Key      string
	Protocol plan.Protocol
	Addr     netip.AddrPort
	Index    int // where several share the address
}

// Socket is a listening socket.
type Socket struct {
	Name
	FD int // in this process
}

// Flow is a UDP flow: a client of a listening socket, and a connected socket to its
// endpoint.
type Flow struct {
	Listener Name
	Client   netip.AddrPort
	Local    netip.Addr // where the client's datagrams arrive
	Endpoint netip.AddrPort
	FD       int // in this process
}

// Affinity are the clients that stick to endpoints of the Service behind a listening
// socket, the longest unused first.
type Affinity struct {
	Listener Name
	Clients  []balance.Sticky
}

// Rest is what goes to the successor when it serves the listening sockets.
type Rest struct {
	Flows    []Flow
	Affinity []Affinity
}

// Close closes the descriptors.
func (r *Rest) Close() {
	for _, f := range r.Flows {
		unix.Close(f.FD)
	}
	r.Flows = nil
}

// What a successor asks for.
const (
	askSockets = 'S' // the listening sockets
	askRetire  = 'R' // that nothing new is taken, as another way serves it now
)

// wait is how long one step of the other side may take.
const wait = 30 * time.Second

// stickyAtOnce bounds the clients of one message.
const stickyAtOnce = 1000

// longest bounds a message, in bytes.
const longest = 1 << 20

// message is one thing that is handed over; the zero message ends a row of them.
type message struct {
	Socket   *Socket
	Flow     *Flow
	Affinity *Affinity
}

// descriptor is the one that goes with a message; nil: there is none.
func (m *message) descriptor() *int {
	switch {
	case m.Socket != nil:
		return &m.Socket.FD
	case m.Flow != nil:
		return &m.Flow.FD
	}
	return nil
}

func (m *message) String() string {
	switch {
	case m.Socket != nil:
		return fmt.Sprintf("the listening socket of %s %s", m.Socket.Protocol, m.Socket.Addr)
	case m.Flow != nil:
		return fmt.Sprintf("the flow from %s", m.Flow.Client)
	}
	return "what clients stick to"
}

// send writes the length of m, with its descriptor, and then m.
func send(conn *net.UnixConn, m message) error {
	body := bytes.NewBuffer(make([]byte, 4))
	if err := gob.NewEncoder(body).Encode(m); err != nil {
		return fmt.Errorf("handing over %s: %w", &m, err)
	}
	b := body.Bytes()
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	var rights []byte
	if fd := m.descriptor(); fd != nil {
		rights = unix.UnixRights(*fd)
	}
	_, _, err := conn.WriteMsgUnix(b[:4], rights, nil)
	if err == nil {
		_, err = conn.Write(b[4:])
	}
	if err != nil {
		return fmt.Errorf("handing over %s: %w", &m, err)
	}
	return nil
}

// receive reads what send wrote. The caller owns the descriptor.
func receive(conn *net.UnixConn) (message, error) {
	m, err := receiveOne(conn)
	if err != nil {
		return message{}, fmt.Errorf("receiving what a predecessor hands over: %w", err)
	}
	return m, nil
}

func receiveOne(conn *net.UnixConn) (m message, err error) {
	head, control := make([]byte, 4), make([]byte, unix.CmsgSpace(4))
	n, cn, _, _, err := conn.ReadMsgUnix(head, control)
	if err == nil && n == 0 {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && n < len(head) {
		_, err = io.ReadFull(conn, head[n:])
	}
	if err != nil {
		return m, err
	}
	fd, err := received(control[:cn])
	if err != nil {
		return m, err
	}
	defer func() {
		if err != nil && fd >= 0 {
			unix.Close(fd)
		}
	}()
	size := binary.BigEndian.Uint32(head)
	if size > longest {
		return m, fmt.Errorf("a message of %d bytes", size)
	}
	body := make([]byte, size)
	if _, err = io.ReadFull(conn, body); err != nil {
		return m, err
	}
	if err = gob.NewDecoder(bytes.NewReader(body)).Decode(&m); err != nil {
		return m, err
	}
	place := m.descriptor()
	if (place != nil) != (fd >= 0) {
		return message{}, errors.New("a message and its descriptor do not fit")
	}
	if place != nil {
		*place = fd
	}
	return m, nil
}

// received returns the descriptor of a message, -1 if it has none.
func received(control []byte) (int, error) {
	if len(control) == 0 {
		return -1, nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) != 1 {
		return -1, fmt.Errorf("%d control messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, fmt.Errorf("%d descriptors: %w", len(fds), err)
	}
	unix.CloseOnExec(fds[0])
	return fds[0], nil
}

// errOtherUser: the process at the other end of the Unix socket runs as somebody else.
// Names in the abstract namespace are anybody's who comes first.
var errOtherUser = errors.New("the process at the other end runs as another user")

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
		return fmt.Errorf("%w, %d", errOtherUser, cred.Uid)
	}
	return nil
}
