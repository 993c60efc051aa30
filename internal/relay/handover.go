package relay

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/handover"
	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// OfferUntil offers what there is to hand over at path, as [handover.Offer] does, until
// a successor has it or ctx ends. It closes given in the first case. A path that is in
// use, as by a predecessor that has not let go of it yet, is tried again. retire is
// called when a successor serves in another way than by the listening sockets; nil:
// there is no other.
func (r *Relay) OfferUntil(ctx context.Context, path string, given chan<- struct{}, retire func() error) {
	const pause = 200 * time.Millisecond
	estate := handover.Estate{Sockets: r.sockets, Stop: r.handOver, Retire: retire, Log: r.opts.Log}
	for ctx.Err() == nil {
		err := handover.Offer(ctx, path, estate)
		if err == nil {
			close(given)
			return
		}
		if ctx.Err() == nil && !errors.Is(err, unix.EADDRINUSE) {
			r.opts.Log.Warn("no successor could take over the listening sockets now", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// sockets are the listening sockets that have a key.
func (r *Relay) sockets() []handover.Socket {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []handover.Socket
	for ln := range r.listeners {
		if ln.config.Key != "" {
			out = append(out, handover.Socket{Name: ln.name(), FD: ln.fd})
		}
	}
	return out
}

func (ln *Listener) name() handover.Name {
	return handover.Name{Key: ln.config.Key, Protocol: ln.config.Protocol, Addr: ln.config.Addr, Index: ln.index}
}

// handOver stops serving sockets that a successor has, and returns what goes with them.
func (r *Relay) handOver(sockets []handover.Socket) handover.Rest {
	given := map[handover.Name]bool{}
	for _, s := range sockets {
		given[s.Name] = true
	}
	r.mu.Lock()
	listeners := slices.DeleteFunc(slices.Collect(maps.Keys(r.listeners)), func(ln *Listener) bool { return !given[ln.name()] })
	for _, ln := range listeners {
		delete(r.listeners, ln)
	}
	r.mu.Unlock()
	var rest handover.Rest
	told := map[*Service]bool{}
	for _, ln := range listeners {
		var mu sync.Mutex // guards rest.Flows while loops end
		ln.stop(func(s *served) {
			if s.udp == nil {
				return
			}
			flows := s.udp.handOver()
			mu.Lock()
			defer mu.Unlock()
			rest.Flows = append(rest.Flows, flows...)
		})
		if s := ln.service(netip.AddrPort{}); s != nil && !told[s] {
			told[s] = true
			if clients := s.balancer.Clients(); len(clients) > 0 {
				rest.Affinity = append(rest.Affinity, handover.Affinity{Listener: ln.name(), Clients: clients})
			}
		}
	}
	return rest
}

// service is the Service of a listener's flows; nil: there is none.
func (ln *Listener) service(client netip.AddrPort) *Service {
	s, _ := ln.route(Flow{ln.config.Protocol, client, ln.config.Addr})
	return s
}

// Succeed tells the predecessor whose sockets were Options.Inherited that they are
// served here, and goes on with its UDP flows and with what its clients stick to. Until
// then the predecessor alone serves them. After an error both may.
func (r *Relay) Succeed() error {
	if r.opts.Inherited == nil {
		return nil
	}
	rest, err := r.opts.Inherited.Done()
	r.mu.Lock()
	inherited := map[handover.Name]*Listener{}
	for _, ln := range r.held {
		inherited[ln.name()] = ln
	}
	r.held = nil
	r.mu.Unlock()
	for _, a := range slices.Backward(rest.Affinity) { // the longest unused come first
		if ln := inherited[a.Listener]; ln != nil {
			if s := ln.service(netip.AddrPort{}); s != nil {
				s.balancer.Remember(a.Clients)
			}
		}
	}
	flows := map[*Listener][]handover.Flow{}
	for _, f := range rest.Flows {
		ln := inherited[f.Listener]
		if ln == nil {
			unix.Close(f.FD)
			continue
		}
		flows[ln] = append(flows[ln], f)
	}
	for _, ln := range inherited {
		for _, s := range ln.served {
			if !s.loop.post(func() { s.letGo(flows[ln]) }) {
				(&handover.Rest{Flows: flows[ln]}).Close()
			}
		}
	}
	return err
}

// letGo begins to serve an inherited socket, with the flows that it has; TCP has none.
func (s *served) letGo(flows []handover.Flow) {
	s.held = false
	if !s.open {
		(&handover.Rest{Flows: flows}).Close()
		return
	}
	for _, f := range flows {
		if !s.udp.adopt(f) {
			unix.Close(f.FD)
		}
	}
	s.start()
}

// handOver ends all flows here; their sockets are the caller's. Those whose client has
// an address with a zone end for good.
func (d *datagrams) handOver() []handover.Flow {
	var out []handover.Flow
	name := d.name()
	for key, f := range d.table {
		if a := key.client.Addr(); a.Is6() && a.IsLinkLocalUnicast() {
			f.end()
			continue
		}
		d.loop.remove(f.fd, f.watch)
		out = append(out, handover.Flow{Listener: name, Client: key.client, Local: key.local, Endpoint: f.endpoint.Addr, FD: f.fd})
		f.leave()
	}
	return out
}

// adopt goes on with a predecessor's flow; false: its endpoint is gone, or there is no
// room, and the flow's next datagram begins another one.
func (d *datagrams) adopt(h handover.Flow) bool {
	fs := d.loop.flows
	key := flowKey{h.Client, h.Local}
	service, route := d.route(Flow{plan.UDP, h.Client, netip.AddrPortFrom(h.Local, d.config.Addr.Port())})
	if service == nil || route.Verdict != plan.Forward || d.table[key] != nil {
		return false
	}
	e := service.balancer.Resume(h.Endpoint)
	if e == nil {
		return false
	}
	if !d.relay.reserveFlow(d.loop, service) {
		service.balancer.Release(e)
		return false
	}
	f := &flow{in: d, key: key, service: service, endpoint: e, fd: h.FD, toClient: socket.PeerAt(h.Client, h.Local)}
	var err error
	if f.watch, err = d.loop.add(f.fd, unix.EPOLLIN, f); err != nil {
		service.balancer.Release(e)
		d.relay.freeFlow(service)
		return false
	}
	service.meter.opened()
	d.users.Add(1)
	d.table[key] = f
	fs.add(f)
	return true
}
