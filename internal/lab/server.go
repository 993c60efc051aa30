package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Server answers on one port of a host, on all its addresses, both families, with
// its name and the source address it sees: each line of a connection, and each
// datagram, gets the line "NAME ADDR:PORT LINE" back. A connection that begins
// like an HTTP GET gets that line as the body of a response, whose status is 200 or
// the one that a path like /status/503 names.
type Server struct {
	host  *Host
	name  string
	proto Proto
	port  uint16

	mu    sync.Mutex // guards open
	open  map[*os.File]struct{}
	ended bool
}

// Serve starts a server.
func (h *Host) Serve(name string, p Proto, port uint16) (*Server, error) {
	s := &Server{host: h, name: name, proto: p, port: port, open: map[*os.File]struct{}{}}
	addrs := []netip.Addr{netip.IPv4Unspecified()}
	if h.lab.ipv6 {
		addrs = append(addrs, netip.IPv6Unspecified())
	}
	for _, a := range addrs {
		l, err := h.listen(p, netip.AddrPortFrom(a, port))
		if err != nil {
			s.shut()
			return nil, fmt.Errorf("serve %s port %d on %s: %w", p, port, h.name, err)
		}
		s.track(l.File)
		if p == UDP {
			go s.datagrams(l)
		} else {
			go s.accept(l)
		}
	}
	h.mu.Lock()
	h.servers = append(h.servers, s)
	h.mu.Unlock()
	return s, nil
}

// Close ends the server and its connections.
func (s *Server) Close() {
	s.host.mu.Lock()
	s.host.servers = slices.DeleteFunc(s.host.servers, func(o *Server) bool { return o == s })
	s.host.mu.Unlock()
	s.shut()
}

func (s *Server) shut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for f := range s.open {
		f.Close()
	}
}

// track remembers a file for shut; it reports false, and closes it, if that is
// over already.
func (s *Server) track(f *os.File) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		f.Close()
		return false
	}
	s.open[f] = struct{}{}
	return true
}

func (s *Server) drop(f *os.File) {
	s.mu.Lock()
	delete(s.open, f)
	s.mu.Unlock()
	f.Close()
}

func (h *Host) listen(p Proto, a netip.AddrPort) (*socket, error) {
	fd := -1
	err := h.ns.do(func() (err error) {
		if fd, err = open(p, a.Addr().Is6()); err != nil {
			return err
		}
		if p == UDP {
			// The answer must come from the address that was asked.
			level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
			if a.Addr().Is6() {
				level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
			}
			if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
				return err
			}
		}
		if err := unix.Bind(fd, kernelSockaddr(a)); err != nil {
			return err
		}
		if p == UDP {
			return nil
		}
		return unix.Listen(fd, 1024)
	})
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, err
	}
	return newSocket(fd, p)
}

// Listen opens a TCP listener of the host for a server of another kind; address
// is IP:port.
func (h *Host) Listen(address string) (net.Listener, error) {
	var l net.Listener
	err := h.ns.do(func() (err error) {
		// A literal address is not resolved, so the socket is made on this thread.
		l, err = (&net.ListenConfig{}).Listen(context.Background(), "tcp", address)
		return err
	})
	return l, err
}

func (s *Server) accept(l *socket) {
	for {
		fd := -1
		var peer unix.Sockaddr
		err := l.raw.Read(func(lfd uintptr) bool {
			var err error
			fd, peer, err = unix.Accept4(int(lfd), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			return !errors.Is(err, unix.EAGAIN)
		})
		if err != nil {
			return // closed
		}
		if fd < 0 {
			continue // the peer gave up before we took it
		}
		if c, err := newSocket(fd, s.proto); err == nil && s.track(c.File) {
			go s.serve(c, addrPort(peer))
		}
	}
}

func (s *Server) serve(c *socket, peer netip.AddrPort) {
	defer s.drop(c.File)
	r := bufio.NewReader(c)
	for {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return
		}
		answer := answerTo(s.name, peer, line)
		if bytes.HasPrefix(line, []byte("GET ")) {
			status := "200 OK"
			if rest, ok := bytes.CutPrefix(line, []byte("GET /status/")); ok {
				code, _, _ := bytes.Cut(rest, []byte(" "))
				status = string(code) + " Status"
			}
			fmt.Fprintf(c, "HTTP/1.0 %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s", status, len(answer), answer)
			for len(bytes.TrimSpace(line)) > 0 { // unread headers would turn the close into a reset
				if line, err = r.ReadBytes('\n'); err != nil {
					return
				}
			}
			return
		}
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}

func (s *Server) datagrams(c *socket) {
	defer s.drop(c.File)
	var b, oob [2048]byte
	for {
		var n, noob int
		var peer unix.Sockaddr
		var failed error
		err := c.raw.Read(func(fd uintptr) bool {
			n, noob, _, peer, failed = unix.Recvmsg(int(fd), b[:], oob[:], 0)
			return !errors.Is(failed, unix.EAGAIN)
		})
		if err != nil {
			return // closed
		}
		if failed != nil {
			continue // an ICMP error of an earlier answer
		}
		answer := answerTo(s.name, addrPort(peer), b[:n])
		c.raw.Write(func(fd uintptr) bool {
			err := unix.Sendmsg(int(fd), answer, replySource(oob[:noob]), peer, 0)
			return !errors.Is(err, unix.EAGAIN)
		})
	}
}

// replySource turns the control message that says where a datagram arrived into
// one that sends the answer from there.
func replySource(oob []byte) []byte {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for _, m := range msgs {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			// Layout: interface, local address of the route, destination.
			return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: [4]byte(m.Data[8:12])})
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: [16]byte(m.Data[0:16])})
		}
	}
	return nil
}
