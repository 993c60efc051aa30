package relay

// Connections are taken by whichever loop the kernel wakes, which is right for the many
// that are short. Streams keep a loop busy; a connection that turns out to be one goes
// to a loop that has fewer.

// becomesStream counts a connection as a stream of the loop that has the fewest, and has
// it moved there.
func (c *conn) becomesStream() {
	least := c.loop
	for _, other := range c.loop.relay.loops {
		if other.conns.streams.Load() < least.conns.streams.Load() {
			least = other
		}
	}
	c.streamOf = least
	least.conns.streams.Add(1)
	if least != c.loop {
		c.loop.again = append(c.loop.again, &moving{c, least})
	}
}

// moving is the task of giving a connection to another loop. It runs when nothing else
// has to do with the connection.
type moving struct {
	c  *conn
	to *loop
}

func (m *moving) resume() {
	c, from := m.c, m.c.loop
	if c.closed {
		return
	}
	if c.queued { // it has a task of its own
		from.again = append(from.again, m)
		return
	}
	pipes := 0
	for i := range c.sides {
		s := &c.sides[i]
		from.remove(s.fd, s.watch)
		s.watch = watch{}
		if s.transit != nil && s.transit.in >= 0 {
			pipes++
		}
	}
	from.conns.remove(c)
	from.pipes.n -= pipes
	if !m.to.post(func() { c.settle(m.to, pipes) }) {
		c.settle(from, pipes)
	}
}

// settle has a loop serve a connection that comes with its pipes.
func (c *conn) settle(l *loop, pipes int) {
	c.loop = l
	l.pipes.n += pipes
	l.conns.add(c)
	for i := range c.sides {
		s := &c.sides[i]
		var err error
		if s.watch, err = l.add(s.fd, sideEvents, s); err != nil || l.done {
			c.end(true)
			return
		}
		s.readable, s.writable = true, true
	}
	c.move()
}
