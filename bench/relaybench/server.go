package relaybench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"runtime/debug"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// Ports of the server, and of the relays in front of it.
const (
	echoPort   = 7001 // TCP: sends back what comes
	sourcePort = 7002 // TCP: sends for as long as somebody reads
	udpPort    = 7003 // UDP: counts; a datagram "?" is answered with the number
)

const chunk = 256 << 10

// serve is the server process: as little work per connection and byte as can be, so
// that it is not what is measured.
func serve(ctx context.Context, addr netip.Addr, ready io.Writer) error {
	runtime.GOMAXPROCS(4)
	debug.SetGCPercent(400)
	echoFD, err := mustBind(netip.AddrPortFrom(addr, echoPort))
	if err != nil {
		return err
	}
	sourceFD, err := mustBind(netip.AddrPortFrom(addr, sourcePort))
	if err != nil {
		return err
	}
	udpFD, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("creating a UDP socket: %w", err)
	}
	if err := unix.Bind(udpFD, &unix.SockaddrInet4{Port: udpPort, Addr: addr.As4()}); err != nil {
		return fmt.Errorf("binding a UDP socket: %w", err)
	}
	_ = unix.SetsockoptInt(udpFD, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20)
	_ = unix.SetsockoptInt(udpFD, unix.SOL_UDP, unix.UDP_GRO, 1)
	failed := make(chan error, 3)
	go func() { failed <- echo(echoFD) }()
	go func() { failed <- source(sourceFD) }()
	go func() { failed <- count(udpFD) }()
	fmt.Fprintln(ready, "ready")
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return nil
	}
}

// mustBind returns a listening, blocking socket.
func mustBind(at netip.AddrPort) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("creating a socket: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // inherited
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}); err != nil {
		return -1, fmt.Errorf("binding to %s: %w", at, err)
	}
	if err := unix.Listen(fd, 65535); err != nil {
		return -1, fmt.Errorf("listening on %s: %w", at, err)
	}
	return fd, nil
}

// echo serves all connections in one thread, without waiting in the runtime.
func echo(listener int) error {
	runtime.LockOSThread()
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("creating an epoll set: %w", err)
	}
	if err := unix.SetNonblock(listener, true); err != nil {
		return fmt.Errorf("setting a socket non-blocking: %w", err)
	}
	watch := func(fd int) error {
		return unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
	}
	if err := watch(listener); err != nil {
		return fmt.Errorf("watching a socket: %w", err)
	}
	events := make([]unix.EpollEvent, 256)
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.EpollWait(epoll, events, -1)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("waiting: %w", err)
		}
		for i := range max(n, 0) {
			fd := int(events[i].Fd)
			if fd == listener {
				for {
					c, _, err := socket.Accept(listener)
					if err != nil {
						break
					}
					if watch(c) != nil {
						unix.Close(c)
					}
				}
				continue
			}
			n, err := socket.Read(fd, buf)
			if n > 0 {
				_, err = socket.Send(fd, buf[:n])
			}
			if n == 0 || err != nil && !errors.Is(err, unix.EAGAIN) {
				unix.Close(fd)
			}
		}
	}
}

// source sends to every connection, a thread each.
func source(listener int) error {
	data := make([]byte, chunk)
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		if err != nil {
			return fmt.Errorf("accepting: %w", err)
		}
		go func() {
			runtime.LockOSThread()
			defer unix.Close(fd)
			for {
				// MSG_NOSIGNAL: the reader goes when it has enough.
				if _, _, errno := unix.Syscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), chunk, unix.MSG_NOSIGNAL, 0, 0); errno != 0 {
					return
				}
			}
		}()
	}
}

// count counts datagrams.
func count(fd int) error {
	runtime.LockOSThread()
	in := socket.NewInbox(64)
	out := socket.NewOutbox(64)
	total := 0
	for {
		n, err := in.Receive(fd, 0)
		if errors.Is(err, unix.EAGAIN) {
			_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("receiving datagrams: %w", err)
		}
		for i := range max(n, 0) {
			data := in.Data(i)
			if string(data) == "?" {
				to := in.Answer(i, netip.Addr{})
				out.Put(fd, &to, fmt.Append(nil, total), 0)
				out.Send()
				continue
			}
			if _, segment := in.Details(i); segment > 0 {
				total += (len(data) + segment - 1) / segment
			} else {
				total++
			}
		}
	}
}
