package balance

import (
	"container/list"
	"net/netip"
	"time"
)

// affinity remembers which endpoint clients stick to. The timeout is the same for
// all, so the order of last use is the order in which entries run out.
type affinity struct {
	timeout time.Duration // 0: nobody sticks
	clients map[netip.Addr]*list.Element
	order   list.List // of *Sticky, the longest unused first
}

// Sticky is a client that goes where it was last connected.
type Sticky struct {
	Client   netip.Addr
	Endpoint netip.AddrPort
	Used     time.Time // last
}

// lookup returns the endpoint that a client sticks to, the zero value if none.
func (a *affinity) lookup(client netip.Addr, now time.Time) netip.AddrPort {
	el := a.clients[client]
	if el == nil {
		return netip.AddrPort{}
	}
	s := el.Value.(*Sticky)
	if now.Sub(s.Used) >= a.timeout {
		a.forget(el)
		return netip.AddrPort{}
	}
	return s.Endpoint
}

// record has a client stick to an endpoint from now on. Beyond limit the client that
// has been away the longest is forgotten.
func (a *affinity) record(client netip.Addr, endpoint netip.AddrPort, now time.Time, limit int) {
	if el := a.clients[client]; el != nil {
		s := el.Value.(*Sticky)
		s.Endpoint, s.Used = endpoint, now
		a.order.MoveToBack(el)
		return
	}
	a.expire(now)
	for len(a.clients) >= limit && a.order.Len() > 0 {
		a.forget(a.order.Front())
	}
	if a.clients == nil {
		a.clients = make(map[netip.Addr]*list.Element)
	}
	a.clients[client] = a.order.PushBack(&Sticky{client, endpoint, now})
}

// expire forgets the clients whose time has run out.
func (a *affinity) expire(now time.Time) {
	for el := a.order.Front(); el != nil; el = a.order.Front() {
		if now.Sub(el.Value.(*Sticky).Used) < a.timeout {
			return
		}
		a.forget(el)
	}
}

// Clients returns the clients that stick to an endpoint, the longest unused first.
func (b *Balancer) Clients() []Sticky {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.affinity.expire(b.opts.Now())
	out := make([]Sticky, 0, b.affinity.order.Len())
	for el := b.affinity.order.Front(); el != nil; el = el.Next() {
		out = append(out, *el.Value.(*Sticky))
	}
	return out
}

// Remember has clients stick to endpoints as Clients of another Balancer has said.
// Those known here already stay as they are.
func (b *Balancer) Remember(clients []Sticky) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := &b.affinity
	if a.timeout == 0 {
		return
	}
	if a.clients == nil {
		a.clients = make(map[netip.Addr]*list.Element)
	}
	for i := len(clients) - 1; i >= 0 && len(a.clients) < b.opts.MaxAffinity; i-- { // they were used before those here
		if s := clients[i]; a.clients[s.Client] == nil {
			a.clients[s.Client] = a.order.PushFront(&s)
		}
	}
	a.expire(b.opts.Now())
}

func (a *affinity) forget(el *list.Element) {
	delete(a.clients, a.order.Remove(el).(*Sticky).Client)
}
