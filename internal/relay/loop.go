package relay

import (
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// loop is one event loop: an epoll set and everything whose descriptors are in it.
// Only its own goroutine touches its fields, what mu guards apart.
type loop struct {
	relay *Relay
	epoll int
	wake  int // eventfd

	now     time.Time // when the last wait ended
	yielded time.Time // when other goroutines last had a chance
	watched []watched
	free    []int32
	timers  timers
	// keepAlives runs while there are connections.
	keepAlives timer
	again      []task // what stopped for the others' sake, and goes on after them
	events     []unix.EpollEvent
	buf        []byte
	pipes      pipes
	conns      conns
	flows      *flows        // nil without UDP listeners
	ports      *socket.Ports // of connections with a client's address
	done       bool

	mu     sync.Mutex // guards posted and gone
	posted []func()
	gone   bool // nothing that is posted will run
}

// handler takes the events of one descriptor.
type handler interface{ ready(events uint32) }

// task is work that was put off.
type task interface{ resume() }

// watched is a place in the table that epoll's data points to. Its generation tells
// events that were queued for a descriptor that is gone.
type watched struct {
	handler    handler
	generation int32
}

// watch is a handler's place in a loop's table; the zero value is none.
type watch struct {
	at         int32
	generation int32
}

// Every loop takes at most this many events at once, so that no socket waits long
// for its turn.
const eventsAtOnce = 128

// bufferSize is what is read from a socket at most in one call, when not spliced.
const bufferSize = 16 << 10

// yieldAfter is how long a loop that always has work keeps its processor. The runtime
// would interrupt it after 10 ms, by a signal.
const yieldAfter = 5 * time.Millisecond

func newLoop(r *Relay) (*loop, error) {
	l := &loop{relay: r, epoll: -1, wake: -1, now: time.Now(), events: make([]unix.EpollEvent, eventsAtOnce), buf: make([]byte, bufferSize), ports: socket.NewPorts()}
	l.keepAlives = timer{f: l.keepAlive, index: -1}
	var err error
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("creating an epoll set: %w", err)
	}
	if l.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		l.close()
		return nil, fmt.Errorf("creating an eventfd: %w", err)
	}
	if _, err := l.add(l.wake, unix.EPOLLIN, (*waker)(l)); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// close gives back what newLoop took.
func (l *loop) close() {
	for _, fd := range []int{l.epoll, l.wake} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	l.pipes.close(l.relay.limit)
	if l.flows != nil {
		l.flows.icmp.Close()
	}
}

// add has the loop call h with the events of a descriptor.
func (l *loop) add(fd int, events uint32, h handler) (watch, error) {
	var at int32
	if n := len(l.free); n > 0 {
		at, l.free = l.free[n-1], l.free[:n-1]
	} else {
		at = int32(len(l.watched))
		l.watched = append(l.watched, watched{generation: 1})
	}
	w := &l.watched[at]
	w.handler = h
	ev := unix.EpollEvent{Events: events, Fd: at, Pad: w.generation}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		l.forget(watch{at, w.generation})
		return watch{}, fmt.Errorf("adding a socket to the epoll set: %w", err)
	}
	return watch{at, w.generation}, nil
}

// forget drops events that are still to come for a descriptor. Closing its last copy
// takes it out of the epoll set; see remove for others.
func (l *loop) forget(w watch) {
	if w.generation == 0 {
		return
	}
	p := &l.watched[w.at]
	p.handler = nil
	p.generation++
	l.free = append(l.free, w.at)
}

// remove ends the watch of a descriptor that stays open, here or in another process.
func (l *loop) remove(fd int, w watch) {
	if w.generation == 0 {
		return
	}
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, fd, nil)
	l.forget(w)
}

// post has the loop's goroutine call f soon; it returns false if the loop has ended.
func (l *loop) post(f func()) bool {
	l.mu.Lock()
	if l.gone {
		l.mu.Unlock()
		return false
	}
	l.posted = append(l.posted, f)
	wake := len(l.posted) == 1
	l.mu.Unlock()
	if wake {
		var one [8]byte
		binary.NativeEndian.PutUint64(one[:], 1)
		_, _ = unix.Write(l.wake, one[:])
	}
	return true
}

// waker is the loop as the handler of its eventfd.
type waker loop

func (w *waker) ready(uint32) {
	l := (*loop)(w)
	var count [8]byte
	_, _ = unix.Read(l.wake, count[:])
	l.mu.Lock()
	posted := l.posted
	l.posted = nil
	l.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

// run serves until something posted sets done.
func (l *loop) run() error {
	defer l.end()
	for !l.done {
		n, err := l.wait()
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for events: %w", err)
		}
		l.now = time.Now()
		if l.now.Sub(l.yielded) > yieldAfter {
			runtime.Gosched()
			l.yielded = l.now
		}
		for i := range max(n, 0) {
			ev := &l.events[i]
			if w := &l.watched[ev.Fd]; w.generation == ev.Pad {
				w.handler.ready(ev.Events)
			}
		}
		l.goOn()
		l.timers.fire(l.now)
		if l.flows != nil {
			l.flows.flush()
		}
	}
	return nil
}

// end lets go of everything. What was posted but has not run does so now, as others
// may wait for it.
func (l *loop) end() {
	l.mu.Lock()
	l.gone = true
	posted := l.posted
	l.posted = nil
	l.mu.Unlock()
	for _, f := range posted {
		f()
	}
	l.close()
}

// wait returns the number of events, without waiting for them if there is work left.
func (l *loop) wait() (int, error) {
	if len(l.again) > 0 {
		return socket.Poll(l.epoll, l.events)
	}
	ms := l.timers.milliseconds(time.Now())
	if ms == 0 {
		return 0, nil
	}
	return unix.EpollWait(l.epoll, l.events, ms)
}

// goOn resumes what had stopped for the others' sake.
func (l *loop) goOn() {
	if len(l.again) == 0 {
		return
	}
	now := l.again
	l.again = nil
	for _, t := range now {
		t.resume()
	}
}

// timer calls f at a time, unless stopped.
type timer struct {
	at    time.Time
	f     func()
	index int // in the heap; -1: not there
}

// timers is a heap of timers, the next first.
type timers []*timer

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].at.Before(t[j].at) }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].index, t[j].index = i, j
}

func (t *timers) Push(x any) {
	tm := x.(*timer)
	tm.index = len(*t)
	*t = append(*t, tm)
}

func (t *timers) Pop() any {
	last := len(*t) - 1
	tm := (*t)[last]
	(*t)[last] = nil
	*t = (*t)[:last]
	tm.index = -1
	return tm
}

// start has f called at a time.
func (t *timers) start(at time.Time, f func()) *timer {
	tm := &timer{at: at, f: f}
	heap.Push(t, tm)
	return tm
}

// push starts a timer that its owner keeps.
func (t *timers) push(tm *timer, at time.Time) {
	tm.at = at
	heap.Push(t, tm)
}

// stop ends a timer, one that does not run too.
func (t *timers) stop(tm *timer) {
	if tm.index >= 0 {
		heap.Remove(t, tm.index)
	}
}

// fire calls what is due.
func (t *timers) fire(now time.Time) {
	for len(*t) > 0 && !(*t)[0].at.After(now) {
		heap.Pop(t).(*timer).f()
	}
}

// milliseconds returns the time until the next timer, rounded up; -1: there is none.
func (t timers) milliseconds(now time.Time) int {
	if len(t) == 0 {
		return -1
	}
	d := t[0].at.Sub(now)
	if d <= 0 {
		return 0
	}
	return int((d + time.Millisecond - 1) / time.Millisecond)
}
