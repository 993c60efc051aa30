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
	order   list.List // of *sticky, the longest unused first
}

type sticky struct {
	client   netip.Addr
	endpoint netip.AddrPort
	used     time.Time
}

// lookup returns the endpoint that a client sticks to, the zero value if none.
func (a *affinity) lookup(client netip.Addr, now time.Time) netip.AddrPort {
	el := a.clients[client]
	if el == nil {
		return netip.AddrPort{}
	}
	s := el.Value.(*sticky)
	if now.Sub(s.used) >= a.timeout {
		a.forget(el)
		return netip.AddrPort{}
	}
	return s.endpoint
}

// record has a client stick to an endpoint from now on. Beyond limit the client that
// has been away the longest is forgotten.
func (a *affinity) record(client netip.Addr, endpoint netip.AddrPort, now time.Time, limit int) {
	if el := a.clients[client]; el != nil {
		s := el.Value.(*sticky)
		s.endpoint, s.used = endpoint, now
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
	a.clients[client] = a.order.PushBack(&sticky{client, endpoint, now})
}

// expire forgets the clients whose time has run out.
func (a *affinity) expire(now time.Time) {
	for el := a.order.Front(); el != nil; el = a.order.Front() {
		if now.Sub(el.Value.(*sticky).used) < a.timeout {
			return
		}
		a.forget(el)
	}
}

func (a *affinity) forget(el *list.Element) {
	delete(a.clients, a.order.Remove(el).(*sticky).client)
}
