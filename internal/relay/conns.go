package relay

import (
	"sync/atomic"
	"time"

	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// conns are the TCP connections of a loop, by Service and in the order of their last
// use, so that one can be found to give way.
type conns struct {
	n       atomic.Int64 // read by other loops
	streams atomic.Int64 // those that moved much at once, and are here or on their way; all loops write it
	groups  map[*Service]*group
	// hopeless is the time until which no connection is idle for long enough.
	hopeless time.Time
}

// group is the connections of one Service, a ring around head, the longest unused first.
type group struct {
	service *Service
	head    conn // only prev and next
	n       int
}

func (cs *conns) add(c *conn) {
	g := cs.groups[c.service]
	if g == nil {
		if cs.groups == nil {
			cs.groups = make(map[*Service]*group)
		}
		g = &group{service: c.service}
		g.head.prev, g.head.next = &g.head, &g.head
		cs.groups[c.service] = g
	}
	c.group = g
	c.used = c.loop.now
	g.n++
	cs.n.Add(1)
	if l := c.loop; l.keepAlives.index < 0 && l.relay.opts.KeepAlive > 0 {
		l.timers.push(&l.keepAlives, l.now.Add(max(l.relay.opts.KeepAlive/2, time.Second)))
	}
	c.link()
}

func (c *conn) link() {
	last := c.group.head.prev
	c.prev, c.next = last, &c.group.head
	last.next, c.group.head.prev = c, c
}

func (c *conn) unlink() {
	c.prev.next, c.next.prev = c.next, c.prev
	c.prev, c.next = nil, nil
}

// touch says that something happened on c.
func (cs *conns) touch(c *conn) {
	c.used = c.loop.now
	if c.next != &c.group.head {
		c.unlink()
		c.link()
	}
}

// remove takes c out, which goes on elsewhere or has ended.
func (cs *conns) remove(c *conn) {
	c.unlink()
	c.group.n--
	if c.group.n == 0 {
		delete(cs.groups, c.group.service)
	}
	cs.n.Add(-1)
}

// makeRoom ends one flow or connection so that a Service's new one gets its n
// descriptors: one of the Service itself if that has its share already.
func (l *loop) makeRoom(service *Service, n int) bool {
	if !l.relay.limit.crowds(service, n) {
		return l.makeRoomAnywhere(service)
	}
	if l.flows.makeRoom(service) {
		return true
	}
	idle := l.relay.opts.IdleAfter
	g := l.conns.groups[service]
	if idle < 0 || g == nil || l.now.Sub(g.head.next.used) < idle {
		return false
	}
	g.giveWay()
	return true
}

// giveWay ends the connection that was idle the longest.
func (g *group) giveWay() {
	g.service.meter.failed(GaveWay)
	g.head.next.end(true)
}

// makeRoomAnywhere ends the longest idle UDP flow, or the longest idle connection of the
// Service that has most, the given one if it is among them. Where that has less than
// half as many, a connection counts as idle after a tenth of the time: nobody's clients
// keep another Service's out by a trickle of bytes. It returns false if nothing is idle.
func (l *loop) makeRoomAnywhere(service *Service) bool {
	if l.flows.makeRoom(nil) {
		return true
	}
	idle := l.relay.opts.IdleAfter
	if idle < 0 || l.now.Before(l.conns.hopeless) {
		return false
	}
	mine := 0
	if g := l.conns.groups[service]; g != nil {
		mine = g.n
	}
	var victim *group
	soonest := l.now.Add(idle / 10)
	for _, g := range l.conns.groups {
		after := idle
		if g.n > 2*mine {
			after = idle / 10
		}
		free := g.head.next.used.Add(after)
		if free.After(l.now) {
			if free.Before(soonest) {
				soonest = free
			}
			continue
		}
		if victim == nil || g.n > victim.n || g.n == victim.n && g.service == service {
			victim = g
		}
	}
	if victim == nil {
		if mine > 0 || len(l.conns.groups) == 0 { // another Service's clients may find a victim
			l.conns.hopeless = soonest
		}
		return false
	}
	victim.giveWay()
	return true
}

// keepAlive has the endpoints' sides of the connections that have lasted for a while
// ask for their peer. Most connections are too short for these calls to be worth
// making at once.
func (l *loop) keepAlive() {
	after := l.relay.opts.KeepAlive
	for _, g := range l.conns.groups {
		for c := g.head.next; c != &g.head; c = c.next {
			if c.keptAlive || !c.established || l.now.Sub(c.began) < after/4 {
				continue
			}
			c.keptAlive = true
			if err := socket.KeepAlive(c.sides[endpointSide].fd, after); err != nil {
				l.relay.opts.Log.Debug("no keep-alive", "service", c.service.name, "err", err)
			}
		}
	}
	if l.conns.n.Load() > 0 {
		l.timers.push(&l.keepAlives, l.now.Add(max(after/2, time.Second)))
	}
}

// endGone resets the connections whose endpoint was removed and whose time is up.
func (l *loop) endGone() {
	now := l.relay.opts.Now()
	for _, g := range l.conns.groups {
		for c := g.head.next; c != &g.head; {
			next := c.next
			if c.endpoint != nil && c.endpoint.Ends(now) {
				c.service.meter.failed(EndpointGone)
				c.end(true)
			}
			c = next
		}
	}
}

// endAll resets every connection.
func (cs *conns) endAll(why Reason) {
	for _, g := range cs.groups {
		for g.n > 0 {
			c := g.head.next
			c.service.meter.failed(why)
			c.end(true)
		}
	}
}
