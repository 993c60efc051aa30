package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Outcome is how an attempt to reach somebody ends.
type Outcome uint8

const (
	Answered    Outcome = iota
	Refused             // reset, or ICMP port unreachable, at once
	Dropped             // nothing came back in time
	Unreachable         // ICMP host or net unreachable, or no route
	Closed              // ended by the other side without an answer
	Broken              // anything else
)

func (o Outcome) String() string {
	return [...]string{"answered", "refused", "dropped", "unreachable", "closed", "broken"}[o]
}

// OutcomeOf classifies an error of Dial or Ask.
func OutcomeOf(err error) Outcome {
	switch {
	case err == nil:
		return Answered
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return Refused
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.Is(err, unix.ETIMEDOUT),
		errors.Is(err, unix.EPERM): // a datagram that the sender's own output filter dropped
		return Dropped
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EACCES):
		return Unreachable
	case errors.Is(err, io.EOF):
		return Closed
	}
	return Broken
}

// Answer is what a named server said.
type Answer struct {
	Server string
	Seen   netip.AddrPort // the peer, as the server sees it
	// Question is the number of the question that it answers, counted from 1.
	Question int
}

// Flow is an open connection, or a socket with a fixed destination for UDP. One
// goroutine may send while another receives, and a third closes it.
type Flow struct {
	s      *socket
	r      *bufio.Reader // used by the receiver
	asked  int           // used by the sender
	abrupt bool
}

// Dial opens a flow from the host. For UDP it succeeds without a packet.
func (h *Host) Dial(ctx context.Context, d Dialing) (*Flow, error) {
	s, err := h.connect(ctx, d)
	if err != nil {
		return nil, err
	}
	return &Flow{s: s, r: bufio.NewReader(s), abrupt: d.SourcePort != 0}, nil
}

// DialContext is for clients of other protocols, such as net/http; address is
// IP:port, network tcp.
func (h *Host) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, fmt.Errorf("dial from %s: %w", h.name, err)
	}
	s, err := h.connect(ctx, Dialing{Proto: TCP, To: to})
	if err != nil {
		return nil, fmt.Errorf("dial %s from %s: %w", to, h.name, err)
	}
	defer s.Close()
	return net.FileConn(s.File)
}

// HTTPClient returns a client that asks from the host, with a connection of its own for
// each request and limit for each answer. Addresses are IP:port.
func (h *Host) HTTPClient(limit time.Duration) *http.Client {
	return &http.Client{Timeout: limit, Transport: &http.Transport{DisableKeepAlives: true, DialContext: h.DialContext}}
}

// Local returns the flow's own address.
func (f *Flow) Local() netip.AddrPort { return f.s.local() }

// Proto returns the flow's protocol.
func (f *Flow) Proto() Proto { return f.s.proto }

// Send sends a question. For UDP the error may be the ICMP answer to an earlier one.
func (f *Flow) Send() error {
	f.asked++
	_, err := fmt.Fprintf(f.s, "%d\n", f.asked)
	return err
}

// Receive waits for the next answer, without limit unless Ask has set one.
func (f *Flow) Receive() (Answer, error) {
	line, err := f.line()
	if err != nil {
		return Answer{}, err
	}
	return parseAnswer(line)
}

// Ask sends a question and waits for the server's answer to it, for at most the
// time given. After an error the flow may be asked again if it is UDP.
func (f *Flow) Ask(within time.Duration) (Answer, error) {
	if err := f.s.SetDeadline(time.Now().Add(within)); err != nil {
		return Answer{}, err
	}
	defer f.s.SetDeadline(time.Time{})
	// An output filter of this host that rejects a datagram fails the call with EPERM, as
	// one that drops it does, and answers it by ICMP, which the socket reports next.
	if err := f.Send(); err != nil && !(f.s.proto == UDP && errors.Is(err, unix.EPERM)) {
		return Answer{}, err
	}
	for {
		a, err := f.Receive()
		// A late datagram answers an earlier question.
		if err == nil && a.Question != f.asked {
			continue
		}
		return a, err
	}
}

func (f *Flow) line() (string, error) {
	if f.s.proto != UDP {
		return f.r.ReadString('\n')
	}
	var b [2048]byte
	n, err := f.s.Read(b[:])
	return string(b[:n]), err
}

// answerTo is what a server says: its name, whom it sees, the line itself.
func answerTo(name string, seen netip.AddrPort, line []byte) []byte {
	b := append([]byte(name), ' ')
	b = append(seen.AppendTo(b), ' ')
	return append(append(b, bytes.TrimRight(line, "\r\n")...), '\n')
}

func parseAnswer(line string) (Answer, error) {
	f := strings.Fields(line)
	if len(f) != 3 {
		return Answer{}, fmt.Errorf("answer %q: want a name, an address and the question", line)
	}
	seen, err := netip.ParseAddrPort(f[1])
	if err != nil {
		return Answer{}, fmt.Errorf("answer %q: %w", line, err)
	}
	n, err := strconv.Atoi(f[2])
	if err != nil {
		return Answer{}, fmt.Errorf("answer %q: %w", line, err)
	}
	return Answer{Server: f[0], Seen: seen, Question: n}, nil
}

// Close ends the flow; one with a fixed source port by a reset, so that the port
// is free again at once.
func (f *Flow) Close() error {
	if f.abrupt && f.s.proto != UDP {
		f.s.control(func(fd int) error {
			return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		})
	}
	return f.s.Close()
}
