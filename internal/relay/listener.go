package relay

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/handover"
	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// ErrStopped is returned by a Relay that has been shut down or is not started.
var ErrStopped = errors.New("the relay does not run")

// Listener is a listening socket that a Relay serves; of UDP there may be several at one
// address, each in a loop of its own, among which the kernel spreads the clients.
type Listener struct {
	relay  *Relay
	config ListenConfig // Addr with the port that it got
	fd     int          // the socket
	index  int          // among those at the address
	rest   []*Listener  // the others, of the first
	router atomic.Pointer[Router]
	users  atomic.Int32 // loops and flows that use the socket; the last one closes it

	once   sync.Once
	served []*served // by loop; immutable after Listen
}

// served is a Listener in one loop.
type served struct {
	*Listener
	loop   *loop
	watch  watch
	open   bool
	held   bool       // the socket is a predecessor's still
	udp    *datagrams // UDP
	warned time.Time  // last, of accepting without success
}

func (c ListenConfig) socket() socket.Config {
	return socket.Config{Protocol: c.Protocol, Addr: c.Addr, FreeBind: c.FreeBind, Transparent: c.Transparent}
}

// Listen opens a socket and serves it, or goes on with the one that a predecessor
// left under the same key. It fails without having changed anything if the address
// is taken, or not the node's; errors.Is tells unix.EADDRINUSE and
// unix.EADDRNOTAVAIL.
func (r *Relay) Listen(c ListenConfig) (*Listener, error) {
	if c.Router == nil {
		return nil, fmt.Errorf("listening on %s %s: no Router", c.Protocol, c.Addr)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.loops) == 0 || r.stopped {
		return nil, ErrStopped
	}
	fds, inherited, err := r.bound(c)
	if err != nil {
		return nil, fmt.Errorf("listening on %s %s: %w", c.Protocol, c.Addr, err)
	}
	var first *Listener
	for i, fd := range fds {
		ln, err := r.newListener(c, fd, i, inherited)
		if err != nil {
			socket.CloseAll(fds[i:])
			if first != nil {
				go first.Close() // which needs the lock
			}
			return nil, fmt.Errorf("listening on %s %s: %w", c.Protocol, c.Addr, err)
		}
		r.listeners[ln] = struct{}{}
		if inherited {
			r.held = append(r.held, ln)
		}
		r.limit.listens(1)
		if first == nil {
			first = ln
		} else {
			first.rest = append(first.rest, ln)
		}
	}
	return first, nil
}

// mostSockets bounds the sockets of one UDP address.
const mostSockets = 4

// bound returns the sockets for an address: those that a predecessor has left, all of
// them, as the kernel chooses among as many as there are; or new ones.
func (r *Relay) bound(c ListenConfig) (fds []int, inherited bool, err error) {
	for {
		fd, ok := r.opts.Inherited.Take(handover.Name{Key: c.Key, Protocol: c.Protocol, Addr: c.Addr, Index: len(fds)})
		if !ok {
			break
		}
		fds = append(fds, fd)
		if c.Addr, err = socket.LocalAddr(fd); err != nil {
			socket.CloseAll(fds)
			return nil, true, err
		}
	}
	if len(fds) > 0 {
		return fds, true, nil
	}
	fds, err = socket.Listen(c.socket(), min(len(r.loops), mostSockets))
	return fds, false, err
}

// newListener serves a socket; with hold only when Succeed lets it.
func (r *Relay) newListener(c ListenConfig, fd, index int, hold bool) (*Listener, error) {
	if err := socket.Prepare(fd, c.socket(), r.opts.KeepAlive); err != nil {
		return nil, err
	}
	addr, err := socket.LocalAddr(fd)
	if err != nil {
		return nil, err
	}
	c.Addr = addr
	ln := &Listener{relay: r, config: c, fd: fd, index: index}
	ln.router.Store(&c.Router)
	loops := r.loops
	if c.Protocol == plan.UDP {
		r.next++
		loops = loops[r.next%len(loops):][:1]
	}
	for _, l := range loops {
		ln.served = append(ln.served, &served{Listener: ln, loop: l, held: hold})
	}
	ln.users.Store(int32(len(ln.served)))
	for _, s := range ln.served {
		s.loop.post(s.start)
	}
	return ln, nil
}

// Addr is the address listened on, with the port that the kernel chose if none was
// given.
func (ln *Listener) Addr() netip.AddrPort { return ln.config.Addr }

// SetRouter changes what happens to new flows; those that are there go on.
func (ln *Listener) SetRouter(r Router) {
	for _, one := range ln.all() {
		one.router.Store(&r)
	}
}

// Sockets is the number of descriptors that it has.
func (ln *Listener) Sockets() int { return 1 + len(ln.rest) }

func (ln *Listener) all() []*Listener { return append([]*Listener{ln}, ln.rest...) }

func (ln *Listener) route(f Flow) (*Service, plan.Route) { return (*ln.router.Load())(f) }

// Close stops listening. TCP connections that were accepted go on, UDP flows end.
// When it has returned, the address can be listened on again at once.
func (ln *Listener) Close() {
	for _, one := range ln.all() {
		ln.relay.mu.Lock()
		delete(ln.relay.listeners, one)
		ln.relay.mu.Unlock()
		one.stop(func(s *served) {
			if s.udp != nil {
				s.udp.endAll()
			}
		})
	}
}

// stop has the loops stop accepting, and then do something with what there is, and
// waits for it. The socket stays open for what the endpoints of UDP flows answer.
func (ln *Listener) stop(then func(*served)) {
	ln.once.Do(func() {
		var all sync.WaitGroup
		for _, s := range ln.served {
			all.Add(1)
			if !s.loop.post(func() { defer all.Done(); s.stop(then) }) {
				all.Done()
			}
		}
		all.Wait()
	})
}

// release ends one use of the socket.
func (ln *Listener) release() {
	if ln.users.Add(-1) == 0 {
		ln.relay.limit.listens(-1)
		unix.Close(ln.fd)
	}
}

// start has the loop take what arrives. Of the loops that wait for one TCP socket, the
// kernel wakes one.
func (s *served) start() {
	s.open = true
	if s.config.Protocol == plan.UDP && s.udp == nil {
		s.udp = s.loop.datagramsOf(s)
	}
	if s.held {
		return
	}
	events, h := uint32(unix.EPOLLIN|unix.EPOLLEXCLUSIVE), handler(s)
	if s.udp != nil {
		events, h = unix.EPOLLIN, s.udp
	}
	w, err := s.loop.add(s.fd, events, h)
	if err != nil {
		s.relay.opts.Log.Error("cannot serve a listening socket; trying again", "protocol", s.config.Protocol, "address", s.config.Addr, "err", err)
		s.loop.timers.start(s.loop.now.Add(time.Second), func() {
			if s.open {
				s.start()
			}
		})
	}
	s.watch = w
}

func (s *served) stop(then func(*served)) {
	if !s.open {
		return
	}
	if s.udp == nil {
		s.ready(0) // what waits in the queue came before, and would be reset
	}
	s.open = false
	s.loop.remove(s.fd, s.watch)
	then(s)
	s.release()
}

// acceptsAtOnce is how many connections one loop takes before others get their turn.
const acceptsAtOnce = 32

// ready accepts. A connection is taken even if there are no descriptors for it, to be
// refused; only if accept itself finds none, the socket rests for a moment.
func (s *served) ready(uint32) {
	for range acceptsAtOnce {
		fd, client, err := socket.Accept(s.fd)
		switch {
		case err == nil:
			s.loop.accepted(s.Listener, fd, client)
		case errors.Is(err, unix.EAGAIN):
			return
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
			s.rest(err)
			return
		default: // the connection was gone already, or brings an error of its network
		}
	}
}

// rest stops accepting for a moment, so that the loop does not turn for nothing.
func (s *served) rest(err error) {
	if now := s.loop.now; now.Sub(s.warned) > time.Minute {
		s.warned = now
		s.relay.opts.Log.Warn("cannot accept connections; resting", "address", s.config.Addr, "err", err)
	}
	s.loop.remove(s.fd, s.watch)
	s.watch = watch{}
	s.loop.timers.start(s.loop.now.Add(50*time.Millisecond), func() {
		if s.open {
			s.start()
		}
	})
}
