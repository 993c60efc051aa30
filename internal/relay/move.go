package relay

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// turn is how much a connection moves one way before others get their turn.
const turn = 4 << 20

// transit holds bytes that were read from one side and could not be written to the
// other yet: in a pipe, or, before the first or without a pipe, in memory.
type transit struct {
	in, out int // the pipe; -1: none
	piped   int // bytes in the pipe
	held    []byte
}

// hold keeps b to be written to s before anything else.
func (s *side) hold(b []byte) {
	if s.transit == nil {
		s.transit = &transit{in: -1, out: -1}
	}
	s.transit.held = append(s.transit.held, b...)
}

// moveTo moves bytes to the other side until there are none, there is no room, or it
// is the others' turn. It returns how many the other side has taken, and an error if
// one of the two is broken.
func (s *side) moveTo(to *side) (int, error) {
	l := s.conn.loop
	moved := 0
	for {
		for to.transit != nil && to.transit.piped+len(to.transit.held) > 0 {
			if !to.writable {
				return moved, nil
			}
			n, err := to.drain()
			moved += n
			if err != nil {
				return moved, err
			}
		}
		switch {
		case s.eof:
			l.pipes.put(to.transit, l.relay.limit)
			to.transit = nil
			return moved, s.passEnd(to)
		case !s.readable || !to.writable:
			l.pipes.put(to.transit, l.relay.limit)
			to.transit = nil
			return moved, nil
		case moved >= turn:
			s.conn.later()
			return moved, nil
		}
		n, err := s.take(to)
		moved += n
		if err != nil {
			return moved, err
		}
	}
}

// later has the loop come back to the connection when others had their turn.
func (c *conn) later() {
	if !c.queued {
		c.queued = true
		c.loop.again = append(c.loop.again, c)
	}
}

// passEnd passes the end of s's stream on to the other side.
func (s *side) passEnd(to *side) error {
	if s.ended {
		return nil
	}
	s.ended = true
	if to.ended {
		return nil // both have ended: closing does it
	}
	if err := unix.Shutdown(to.fd, unix.SHUT_WR); err != nil && !errors.Is(err, unix.ENOTCONN) {
		return err
	}
	return nil
}

// take reads once, and writes what it can at once. It returns how many bytes the
// other side has taken.
func (s *side) take(to *side) (int, error) {
	l := s.conn.loop
	if s.bulk {
		if to.transit == nil {
			to.transit = l.pipes.get(l.relay.limit)
		}
		if to.transit != nil && to.transit.in >= 0 {
			return 0, s.spliceIn(to.transit)
		}
	}
	n, err := socket.Read(s.fd, l.buf)
	switch {
	case errors.Is(err, unix.EAGAIN):
		s.readable = false
		return 0, nil
	case errors.Is(err, unix.EINTR):
		return 0, nil
	case err != nil:
		return 0, err
	case n == 0:
		s.eof = true
		return 0, nil
	}
	if s.bulk = n == len(l.buf); s.bulk && s.conn.streamOf == nil {
		s.conn.becomesStream()
	}
	if !s.bulk && !s.hungUp {
		s.readable = false // all was read; more is a new event
	}
	sent, err := socket.Send(to.fd, l.buf[:n])
	if err != nil {
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return 0, err
		}
		sent = 0
		to.writable = errors.Is(err, unix.EINTR)
	}
	if sent < n {
		to.hold(l.buf[sent:n])
	}
	return sent, nil
}

// smallSplice is the size below which reading and writing is cheaper than splicing.
const smallSplice = 16 << 10

// spliceIn fills an empty pipe.
func (s *side) spliceIn(t *transit) error {
	n, err := socket.Splice(s.fd, t.in, pipeSize)
	switch {
	case errors.Is(err, unix.EAGAIN):
		s.readable = false
	case errors.Is(err, unix.EINTR):
	case err != nil:
		return err
	case n == 0:
		s.eof = true
	default:
		t.piped = n
		s.bulk = n >= smallSplice
	}
	return nil
}

// drain writes what is in transit to s, first what is in memory.
func (s *side) drain() (int, error) {
	t := s.transit
	var n int
	var err error
	if len(t.held) > 0 {
		if n, err = socket.Send(s.fd, t.held); err == nil {
			if t.held = t.held[n:]; len(t.held) == 0 {
				t.held = nil
			}
		}
	} else if n, err = socket.Splice(t.out, s.fd, t.piped); err == nil {
		t.piped -= n
	}
	switch {
	case errors.Is(err, unix.EAGAIN):
		s.writable = false
		return 0, nil
	case errors.Is(err, unix.EINTR):
		return 0, nil
	case err != nil:
		return 0, err
	}
	return n, nil
}

// pipeSize is what a pipe is asked to hold. The kernel may refuse, and a pipe holds
// less when packets are small.
const pipeSize = 1 << 20

// maxPipes bounds the pipes of a loop, and with them what readers that are slow keep in
// the kernel besides their sockets. Streams beyond it are read and written.
const maxPipes = 512

// pipesKept is how many pipes a loop keeps for the next stream.
const pipesKept = 16

// pipes lends pipes to streams that flow. A connection that is idle has none.
type pipes struct {
	free []*transit
	n    int // of all, lent ones included
}

// get returns an empty pipe, nil if there are no descriptors for one: the stream is
// then read and written.
func (p *pipes) get(limit *budget) *transit {
	if n := len(p.free); n > 0 {
		t := p.free[n-1]
		p.free = p.free[:n-1]
		return t
	}
	// The last quarter of the descriptors is for connections.
	if p.n >= maxPipes || limit.used.Load()+2 > limit.limit*3/4 || !limit.take(2) {
		return nil
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		limit.give(2)
		return nil
	}
	// A smaller one will do if the user's share of pipe buffers is used up.
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize)
	p.n++
	return &transit{in: fds[1], out: fds[0]}
}

// put takes a transit back, nil too. One that is not empty is closed with what is in it.
func (p *pipes) put(t *transit, limit *budget) {
	if t == nil || t.in < 0 {
		return
	}
	if t.piped == 0 && len(p.free) < pipesKept {
		t.held = nil
		p.free = append(p.free, t)
		return
	}
	p.n--
	unix.Close(t.in)
	unix.Close(t.out)
	limit.give(2)
}

// close closes the pipes that are kept.
func (p *pipes) close(limit *budget) {
	for _, t := range p.free {
		unix.Close(t.in)
		unix.Close(t.out)
		limit.give(2)
	}
	p.free = nil
}
