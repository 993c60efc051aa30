package relaybench

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// figure is what one load has measured.
type figure struct {
	Rate    float64 // bytes, connections or datagrams per second
	P50     float64 // µs
	P99     float64
	Failed  int
	Done    float64 // bytes, connections or datagrams in all
	Seconds float64
}

// load is the client process: it loads an address and prints a figure. Sockets are
// blocking and each thread has its own; the runtime only starts them.
func load(kind string, to netip.Addr, threads int, d time.Duration, out io.Writer) error {
	runtime.GOMAXPROCS(threads + 2)
	debug.SetGCPercent(-1)
	var f figure
	var err error
	switch kind {
	case "bulk":
		f, err = bulk(netip.AddrPortFrom(to, sourcePort), threads, d)
	case "connect":
		f, err = connects(netip.AddrPortFrom(to, echoPort), threads, d)
	case "request":
		f, err = requests(netip.AddrPortFrom(to, echoPort), threads, d)
	case "udp":
		f, err = datagrams(netip.AddrPortFrom(to, udpPort), threads, d)
	case "udp-throughput":
		f, err = throughput(netip.AddrPortFrom(to, udpPort), threads, d, false)
	case "udp-segment":
		f, err = throughput(netip.AddrPortFrom(to, udpPort), threads, d, true)
	case "idle":
		return idle(netip.AddrPortFrom(to, echoPort), threads, out)
	default:
		return fmt.Errorf("unknown load %q", kind)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(f)
}

// inThreads runs f in threads of their own and returns when all have ended.
func inThreads(n int, f func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			runtime.LockOSThread()
			f(i)
		})
	}
	all.Wait()
}

func tcpSocket() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	tv := unix.Timeval{Sec: 5}
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	return fd, nil
}

// The calls do not tell the scheduler: every thread has a processor.

func connect(fd int, to netip.AddrPort) bool {
	sa := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: to.Port()>>8 | to.Port()<<8, Addr: to.Addr().As4()}
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), unix.SizeofSockaddrInet4)
	return errno == 0
}

func write(fd int, b []byte) bool {
	n, _, _ := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n) == len(b)
}

func read(fd int, b []byte) int {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	if errno != 0 {
		return -1
	}
	return int(n)
}

// bulk reads for a time.
func bulk(to netip.AddrPort, threads int, d time.Duration) (figure, error) {
	var total, failed atomic.Int64
	start := time.Now()
	inThreads(threads, func(int) {
		fd, err := tcpSocket()
		if err != nil || !connect(fd, to) {
			failed.Add(1)
			return
		}
		defer unix.Close(fd)
		buf := make([]byte, chunk)
		for time.Since(start) < d {
			n := read(fd, buf)
			if n <= 0 {
				failed.Add(1)
				return
			}
			total.Add(int64(n))
		}
	})
	seconds := time.Since(start).Seconds()
	return figure{Rate: float64(total.Load()) / seconds, Failed: int(failed.Load()), Done: float64(total.Load()), Seconds: seconds}, nil
}

// connects opens connections for a time, with one request of 64 bytes in each.
func connects(to netip.AddrPort, threads int, d time.Duration) (figure, error) {
	var failed atomic.Int64
	times := make([][]float64, threads)
	start := time.Now()
	inThreads(threads, func(i int) {
		buf := make([]byte, 64)
		for {
			began := time.Now()
			if began.Sub(start) >= d {
				return
			}
			fd, err := tcpSocket()
			if err != nil {
				failed.Add(1)
				return
			}
			if connect(fd, to) && write(fd, buf) && read(fd, buf) == len(buf) {
				times[i] = append(times[i], float64(time.Since(began).Nanoseconds())/1e3)
			} else {
				failed.Add(1)
			}
			_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
		}
	})
	return summary(times, start, int(failed.Load())), nil
}

// requests sends requests of 64 bytes one after the other, a connection for each thread.
func requests(to netip.AddrPort, threads int, d time.Duration) (figure, error) {
	var failed atomic.Int64
	times := make([][]float64, threads)
	start := time.Now()
	inThreads(threads, func(i int) {
		fd, err := tcpSocket()
		if err != nil || !connect(fd, to) {
			failed.Add(1)
			return
		}
		defer unix.Close(fd)
		buf := make([]byte, 64)
		for {
			began := time.Now()
			if began.Sub(start) >= d {
				return
			}
			if !write(fd, buf) || read(fd, buf) != len(buf) {
				failed.Add(1)
				return
			}
			times[i] = append(times[i], float64(time.Since(began).Nanoseconds())/1e3)
		}
	})
	return summary(times, start, int(failed.Load())), nil
}

func summary(times [][]float64, start time.Time, failed int) figure {
	all := slices.Concat(times...)
	slices.Sort(all)
	f := figure{Failed: failed, Done: float64(len(all)), Seconds: time.Since(start).Seconds()}
	if len(all) > 0 {
		f.Rate = float64(len(all)) / f.Seconds
		f.P50, f.P99 = all[len(all)/2], all[len(all)*99/100]
	}
	return f
}

// idle opens connections, each used once, says so, and keeps them until it is killed.
func idle(to netip.AddrPort, n int, out io.Writer) error {
	if err := raiseLimit(); err != nil {
		return err
	}
	buf := make([]byte, 64)
	for i := range n {
		fd, err := tcpSocket()
		if err != nil {
			return err
		}
		if !connect(fd, to) || !write(fd, buf) || read(fd, buf) != len(buf) {
			return fmt.Errorf("connection %d of %d failed", i+1, n)
		}
	}
	fmt.Fprintln(out, "ready")
	select {}
}
