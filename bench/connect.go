package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Connections are made with plain blocking sockets: what the poller and the
// scheduler of the runtime add would be a good part of what is measured.

const servicePort = 80

// await asks an address until the pod of that name answers; patience is for one attempt.
func (w *world) await(ctx context.Context, pr *program, addr, name string, patience time.Duration) error {
	to := netip.MustParseAddr(addr)
	last := ""
	for {
		fds, err := w.sockets(1, patience)
		if err != nil {
			return err
		}
		got, err := ask(fds[0], to)
		if err == nil && got == name {
			return nil
		}
		if last = fmt.Sprintf("%q", got); err != nil {
			last = err.Error()
		}
		if err := pause(ctx, pr, 2*time.Millisecond); err != nil {
			if errors.Is(err, context.DeadlineExceeded) {
				return fmt.Errorf("%s was not answered by %s in time (last: %s); the log ends with\n%s", addr, name, last, pr.tail())
			}
			return err
		}
	}
}

// sockets makes TCP sockets of the client; they may be used on any thread.
func (w *world) sockets(n int, timeout time.Duration) ([]int, error) {
	fds := make([]int, 0, n)
	err := w.client.Do(func() error {
		for range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("make a socket: %w", err)
			}
			fds = append(fds, fd)
		}
		return nil
	})
	tv := unix.NsecToTimeval(timeout.Nanoseconds())
	for _, fd := range fds {
		// A reset at close leaves nothing behind that the next connection meets.
		err = errors.Join(err,
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
			unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	}
	if err != nil {
		closeAll(fds)
		return nil, err
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // nothing to lose
	}
}

// connect connects and returns how long that took.
func connect(fd int, to netip.Addr) (time.Duration, error) {
	sa := &unix.SockaddrInet4{Addr: to.As4(), Port: servicePort}
	t := time.Now()
	err := unix.Connect(fd, sa)
	return time.Since(t), err
}

// ask connects, reads the name of the pod that answers, and closes fd.
func ask(fd int, to netip.Addr) (string, error) {
	defer func() { _ = unix.Close(fd) }()
	if _, err := connect(fd, to); err != nil {
		return "", err
	}
	var b [64]byte
	n, err := unix.Read(fd, b[:])
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(b[:n])), nil
}

// batch is the number of sockets made at once, so that making them is not what
// limits.
const batch = 100

// timeConnects returns the times of n connects, one after the other, in
// microseconds, and how many failed.
func (w *world) timeConnects(ctx context.Context, addr string, n int) (times []float64, failed int, err error) {
	to := netip.MustParseAddr(addr)
	for len(times)+failed < n && ctx.Err() == nil {
		fds, err := w.sockets(batch, 3*time.Second)
		if err != nil {
			return nil, 0, err
		}
		for _, fd := range fds {
			d, err := connect(fd, to)
			_ = unix.Close(fd)
			if err != nil {
				failed++
				continue
			}
			times = append(times, float64(d.Nanoseconds())/1000)
		}
	}
	return times, failed, ctx.Err()
}

// countConnects opens connections from several threads and returns how many a
// second were answered, and how many were not.
func (w *world) countConnects(ctx context.Context, addr string, workers int, d time.Duration) (perSecond float64, failed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	to := netip.MustParseAddr(addr)
	var wg sync.WaitGroup
	var mu sync.Mutex // guards answered, failed, err
	answered := 0
	begin := time.Now()
	for range workers {
		wg.Go(func() {
			for ctx.Err() == nil {
				good, bad, e := w.askMany(ctx, to)
				mu.Lock()
				answered, failed = answered+good, failed+bad
				err = errors.Join(err, e)
				mu.Unlock()
				if e != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return float64(answered) / time.Since(begin).Seconds(), failed, err
}

func (w *world) askMany(ctx context.Context, to netip.Addr) (good, bad int, err error) {
	fds, err := w.sockets(batch, 2*time.Second)
	if err != nil {
		return 0, 0, err
	}
	for i, fd := range fds {
		if ctx.Err() != nil {
			closeAll(fds[i:])
			break
		}
		if _, err := ask(fd, to); err != nil {
			bad++
		} else {
			good++
		}
	}
	return good, bad, nil
}
