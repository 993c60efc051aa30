package relaybench

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sender sends datagrams of one flow, several in a call.
type sender struct {
	fd       int
	messages []mmsghdr
	each     int // datagrams of a message
	payload  [atOnce * datagramSize]byte
	vector   unix.Iovec
}

// mmsghdr is the kernel's.
type mmsghdr struct {
	header unix.Msghdr
	n      uint32
	_      [4]byte
}

const (
	datagramSize = 64
	atOnce       = 64 // datagrams that are sent in a call
)

// newSender connects. joined: the kernel gets the datagrams of a call as one, to be cut
// where they leave the host (UDP_SEGMENT).
func newSender(to netip.AddrPort, joined bool) (*sender, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("creating a UDP socket: %w", err)
	}
	if !connect(fd, to) {
		unix.Close(fd)
		return nil, fmt.Errorf("connecting a UDP socket to %s", to)
	}
	s := &sender{fd: fd, messages: make([]mmsghdr, atOnce), each: 1}
	if joined {
		s.messages, s.each = s.messages[:1], atOnce
		if err := unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT, datagramSize); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("setting UDP_SEGMENT: %w", err)
		}
	}
	s.vector.Base = &s.payload[0]
	s.vector.SetLen(s.each * datagramSize)
	for i := range s.messages {
		s.messages[i].header.Iov = &s.vector
		s.messages[i].header.SetIovlen(1)
	}
	return s, nil
}

// send sends atOnce datagrams, and returns how many could be.
func (s *sender) send() int {
	sent, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.messages[0])), uintptr(len(s.messages)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(sent) * s.each
}

// flowsOfThread is how many flows a thread has, which take turns.
const flowsOfThread = 8

// sendFor has threads send for a time, and returns how many datagrams they have sent
// and the server has received. rate is that of all together per second;
// 0: as fast as they can.
func sendFor(to netip.AddrPort, threads int, d time.Duration, rate float64, joined bool) (sent, received int, err error) {
	before, err := askCount(to)
	if err != nil {
		return 0, 0, err
	}
	var total atomic.Int64
	inThreads(threads, func(int) {
		var flows []*sender
		for range flowsOfThread {
			s, err := newSender(to, joined)
			if err != nil {
				return
			}
			defer unix.Close(s.fd)
			flows = append(flows, s)
		}
		start := time.Now()
		for n, turn := 0, 0; ; {
			passed := time.Since(start)
			if passed >= d {
				return
			}
			if due := rate / float64(threads) * passed.Seconds(); rate > 0 && float64(n) > due {
				ahead := time.Duration((float64(n) - due) / rate * float64(threads) * 1e9)
				ts := unix.NsecToTimespec(int64(ahead))
				_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&ts)), 0, 0)
				continue
			}
			k := flows[turn%flowsOfThread].send()
			turn++
			n += k
			total.Add(int64(k))
		}
	})
	after, err := askCount(to)
	return int(total.Load()), after - before, err
}

// datagrams sends as fast as it can.
func datagrams(to netip.AddrPort, threads int, d time.Duration) (figure, error) {
	_, received, err := sendFor(to, threads, d, 0, false)
	return figure{Rate: float64(received) / d.Seconds(), Done: float64(received), Seconds: d.Seconds()}, err
}

// lossAllowed is what a throughput may lose.
const lossAllowed = 0.01

// throughput looks for the highest rate that loses no more than lossAllowed, in steps
// of a sixth of d: by half more as long as it goes well, and by halves of what is left
// then. A rate that the client itself cannot send has not gone well. One counts as bad
// that goes wrong three times: machines that others use too stand still at times.
func throughput(to netip.AddrPort, threads int, d time.Duration, joined bool) (figure, error) {
	f := figure{}
	step := d / 6
	once := func(rate float64) (bool, error) {
		sent, received, err := sendFor(to, threads, step, rate, joined)
		f.Done += float64(received)
		f.Seconds += step.Seconds()
		offered := rate * step.Seconds()
		return err == nil && float64(sent) > offered*(1-lossAllowed)-float64(threads*atOnce) &&
			float64(received) >= float64(sent)*(1-lossAllowed), err
	}
	try := func(rate float64) (ok bool, err error) {
		for tries := 0; tries < 3 && !ok && err == nil; tries++ {
			ok, err = once(rate)
		}
		return ok, err
	}
	low, high := 0.0, 0.0
	for rate := 10_000.0; high == 0; rate *= 1.5 {
		ok, err := try(rate)
		if err != nil {
			return f, err
		}
		if ok {
			low = rate
		} else {
			high = rate
		}
	}
	for range 5 {
		rate := (low + high) / 2
		ok, err := try(rate)
		if err != nil {
			return f, err
		}
		if ok {
			low = rate
		} else {
			high = rate
		}
	}
	f.Rate = low
	return f, nil
}

// askCount asks the server for its count until two answers are equal.
func askCount(to netip.AddrPort) (int, error) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return 0, err
	}
	defer c.Close()
	buf := make([]byte, 64)
	last := -1
	for tries := 0; tries < 100; {
		if _, err := c.Write([]byte("?")); err != nil {
			return 0, err
		}
		_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		n, err := c.Read(buf)
		if err != nil {
			tries++ // lost in the queue
			continue
		}
		now, err := strconv.Atoi(string(buf[:n]))
		if err != nil {
			return 0, err
		}
		if now == last {
			return now, nil
		}
		last = now
		time.Sleep(20 * time.Millisecond)
	}
	return 0, fmt.Errorf("%s does not tell its count", to)
}
