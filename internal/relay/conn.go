package relay

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/balance"
	"github.com/svcproxy/svcproxy/internal/relay/proxyproto"
	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// conn is one TCP connection: its client, and the endpoint that it has or tries.
type conn struct {
	loop     *loop
	service  *Service
	route    plan.Route
	client   netip.AddrPort
	began    time.Time
	sides    [2]side
	endpoint *balance.Endpoint
	tried    []*balance.Endpoint
	timer    timer // of the try
	// established: there is an endpoint, and bytes are moved.
	established bool
	keptAlive   bool  // the endpoint's side; the client's has it from the listener
	queued      bool  // in loop.again
	streamOf    *loop // whose stream it is, once it has moved much at once
	closed      bool

	group      *group
	prev, next *conn // in group, by last use
	used       time.Time
}

// side is one socket of a conn. Its events come once per change (EPOLLET), so what is
// known of it is kept here.
type side struct {
	conn     *conn
	fd       int // -1: none
	watch    watch
	readable bool // there may be something to read
	writable bool // there may be room to write
	hungUp   bool // the peer has ended its stream: reading gets to the end or to an error
	eof      bool // the end of the peer's stream was read
	ended    bool // the other peer's end was passed on
	bulk     bool // much was read at once: splice
	transit  *transit
}

const (
	clientSide   = 0
	endpointSide = 1
)

const sideEvents = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET&0xffffffff

// accepted takes a connection that a listener has accepted.
func (l *loop) accepted(ln *Listener, fd int, client netip.AddrPort) {
	local := ln.config.Addr
	if local.Addr().IsUnspecified() {
		var err error
		if local, err = socket.LocalAddr(fd); err != nil {
			socket.Reset(fd)
			return
		}
	}
	service, route := ln.route(Flow{plan.TCP, client, local})
	if service == nil {
		socket.Reset(fd)
		return
	}
	if route.Verdict != plan.Forward {
		service.meter.failed(NoEndpoint)
		socket.Reset(fd)
		return
	}
	if !l.relay.limit.takeFor(service, 2) && !(l.makeRoom(service, 2) && l.relay.limit.takeFor(service, 2)) {
		service.meter.failed(NoDescriptors)
		socket.Reset(fd)
		return
	}
	c := &conn{loop: l, service: service, route: route, client: client, began: l.now}
	c.sides = [2]side{{conn: c, fd: fd}, {conn: c, fd: -1}}
	if other := l.relay.leastLoaded(l); other != l {
		if other.post(func() { c.loop = other; c.start() }) {
			return
		}
	}
	c.start()
}

func (c *conn) start() {
	c.timer = timer{f: c.timedOut, index: -1}
	c.loop.relay.open.Add(1)
	c.loop.conns.add(c)
	c.try()
}

// try connects to the next endpoint.
func (c *conn) try() {
	e := c.service.balancer.Pick(c.client, c.route.Pool, c.tried)
	if e == nil {
		c.refuse(NoEndpoint)
		return
	}
	c.endpoint = e
	fd, err := socket.Dial(c.dialing(e))
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) { // not the endpoint's fault
		c.refuse(NoDescriptors)
		return
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		c.tryFailed(err)
		return
	}
	s := &c.sides[endpointSide]
	s.fd = fd
	if s.watch, err = c.loop.add(fd, sideEvents, s); err != nil {
		c.tryFailed(err)
		return
	}
	c.loop.timers.push(&c.timer, c.loop.now.Add(c.loop.relay.opts.ConnectTimeouts[len(c.tried)]))
}

// dialing says how e is connected to.
func (c *conn) dialing(e *balance.Endpoint) socket.Dialing {
	d := socket.Dialing{To: e.Addr, Mark: c.loop.relay.opts.Mark, Options: c.loop.relay.stream}
	if keepsClient(c.client.Addr(), e.Addr.Addr(), c.route, c.service.balancer.Policy()) {
		d.From, d.Ports = c.client.Addr(), c.loop.ports
	}
	return d
}

// keepsClient reports whether the endpoint is to see the client's address.
func keepsClient(client, endpoint netip.Addr, route plan.Route, policy *plan.Policy) bool {
	keep := !route.SNAT
	switch policy.ClientAddress {
	case plan.ClientAddressKept:
		keep = true
	case plan.ClientAddressHidden:
		keep = false
	}
	return keep && !client.IsLoopback() && client != endpoint
}

// timedOut is called when the try has taken its time.
func (c *conn) timedOut() { c.tryFailed(unix.ETIMEDOUT) }

// tryFailed goes on with another endpoint, if there is one and a try is left.
func (c *conn) tryFailed(err error) {
	c.dropEndpoint()
	e := c.endpoint
	c.endpoint = nil
	c.service.balancer.Failed(e)
	c.tried = append(c.tried, e)
	why := ConnectFailed
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		why = ConnectRefused
	case errors.Is(err, unix.ETIMEDOUT):
		why = ConnectTimeout
	}
	// An endpoint that refuses does so again at once: only time or another can help.
	if len(c.tried) >= len(c.loop.relay.opts.ConnectTimeouts) || why != ConnectTimeout && !c.service.balancer.HasOther(c.route.Pool, e) {
		c.loop.relay.opts.Log.Debug("no endpoint could be connected to", "service", c.service.name, "endpoint", e.Addr, "tries", len(c.tried), "err", err)
		c.refuse(why)
		return
	}
	c.service.meter.retries.Add(1)
	c.try()
}

// dropEndpoint closes the socket of a try.
func (c *conn) dropEndpoint() {
	c.loop.timers.stop(&c.timer)
	s := &c.sides[endpointSide]
	c.loop.forget(s.watch)
	s.watch = watch{}
	if s.fd >= 0 {
		unix.Close(s.fd)
		s.fd = -1
	}
}

// refuse ends a connection that has no endpoint.
func (c *conn) refuse(why Reason) {
	c.service.meter.failed(why)
	c.end(true)
}

// connected begins to move bytes. What the client has sent meanwhile was left in its
// socket.
func (c *conn) connected() {
	c.loop.timers.stop(&c.timer)
	c.service.balancer.Connected(c.client.Addr(), c.endpoint)
	c.service.meter.connected(time.Since(c.began))
	c.established = true
	c.tried = nil
	client, upstream := &c.sides[clientSide], &c.sides[endpointSide]
	var err error
	if client.watch, err = c.loop.add(client.fd, sideEvents, client); err != nil {
		c.loop.relay.opts.Log.Error("cannot serve a connection", "service", c.service.name, "err", err)
		c.end(true)
		return
	}
	if version := c.service.balancer.Policy().ProxyProtocol; version != 0 {
		local, err := socket.OriginalDestination(client.fd, c.client.Addr().Is4())
		if err != nil {
			c.end(true)
			return
		}
		upstream.hold(proxyproto.Header{Version: version, Client: c.client, Local: local}.Bytes())
	}
	client.readable, client.writable, upstream.writable = true, true, true
	c.move()
}

// ready takes the events of a side.
func (s *side) ready(events uint32) {
	c := s.conn
	if s.watch.generation == 0 {
		return
	}
	if !c.established {
		var err error
		if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
			err = socket.Error(s.fd)
		}
		if err != nil {
			c.tryFailed(err)
		} else if events&unix.EPOLLOUT != 0 {
			s.readable = events&(unix.EPOLLIN|unix.EPOLLRDHUP) != 0
			s.hungUp = events&(unix.EPOLLRDHUP|unix.EPOLLHUP) != 0
			c.loop.conns.touch(c)
			c.connected()
		}
		return
	}
	c.loop.conns.touch(c)
	if events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		s.hungUp = true
	}
	if s.hungUp || events&unix.EPOLLIN != 0 {
		s.readable = true
	}
	if events&unix.EPOLLOUT != 0 {
		s.writable = true
	}
	c.move()
	if events&unix.EPOLLERR != 0 && !c.closed {
		// What came before the error was passed on as far as there was room.
		c.end(true)
	}
}

// resume goes on after others had their turn.
func (c *conn) resume() {
	c.queued = false
	if !c.closed {
		c.move()
	}
}

// move moves what there is, both ways.
func (c *conn) move() {
	up := &c.service.meter.fromClient
	down := &c.service.meter.toClient
	n, err := c.sides[clientSide].moveTo(&c.sides[endpointSide])
	if n > 0 {
		up.Add(uint64(n))
	}
	if err == nil {
		n, err = c.sides[endpointSide].moveTo(&c.sides[clientSide])
		if n > 0 {
			down.Add(uint64(n))
		}
	}
	switch {
	case err != nil:
		c.end(true)
	case c.sides[clientSide].ended && c.sides[endpointSide].ended:
		c.end(false)
	}
}

// end closes both sides, with a reset if the connection was broken.
func (c *conn) end(broken bool) {
	if c.closed {
		return
	}
	c.closed = true
	c.loop.timers.stop(&c.timer)
	for i := range c.sides {
		s := &c.sides[i]
		c.loop.forget(s.watch)
		s.watch = watch{}
		if s.transit != nil {
			c.loop.pipes.put(s.transit, c.loop.relay.limit)
			s.transit = nil
		}
		switch {
		case s.fd < 0:
		case broken:
			socket.Reset(s.fd)
		default:
			unix.Close(s.fd)
		}
		s.fd = -1
	}
	if c.endpoint != nil {
		c.service.balancer.Release(c.endpoint)
	}
	if c.established {
		c.service.meter.open.Add(-1)
	}
	c.loop.relay.limit.giveFor(c.service, 2)
	if c.streamOf != nil {
		c.streamOf.conns.streams.Add(-1)
	}
	c.loop.conns.remove(c)
	c.loop.relay.oneLess()
}
