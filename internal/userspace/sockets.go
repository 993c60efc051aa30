package userspace

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
)

// sockets are where the relay listens, by Service port.
type sockets interface {
	// serve makes the relay know a Service port and listen for it on the addresses of
	// some classes, all with the port that is returned: the one that it has already,
	// or prefer if that is free, or another; 0 if there is nothing to listen for.
	serve(sp *plan.ServicePort, on [classes]bool, prefer uint16) (uint16, error)
	// trim closes what serve does not need any more: nothing leads there now.
	trim(id plan.ID, on [classes]bool)
	// drop forgets a Service port.
	drop(id plan.ID)
	// known lists the Service ports of a family that are served.
	known(f plan.Family) []plan.ID
}

// ports are the sockets of a relay.
type ports struct {
	relay  *relay.Relay
	blocks Blocks
	choice PortRange
	served map[plan.ID]*served
	taken  map[portOf]bool
	next   uint16 // where the search in the range goes on
	// open counts the listening sockets, most bounds them: the rest of the process's
	// descriptors is for connections and everything else.
	open, most int
}

// portOf is a port that one Service port has.
type portOf struct {
	family   plan.Family
	protocol plan.Protocol
	port     uint16
}

// served is a Service port that the relay knows.
type served struct {
	service   *relay.Service
	port      uint16
	listeners [classes]*relay.Listener
	left      []*relay.Listener // of a port that was given up, until nothing leads there
}

func newPorts(r *relay.Relay, blocks Blocks, choice PortRange, most int) *ports {
	return &ports{relay: r, blocks: blocks, choice: choice, most: most, served: map[plan.ID]*served{}, taken: map[portOf]bool{}}
}

// serve implements sockets.
func (p *ports) serve(sp *plan.ServicePort, on [classes]bool, prefer uint16) (uint16, error) {
	id := sp.ID
	s := p.served[id]
	if s == nil {
		s = &served{service: p.relay.NewService(servicePath(id))}
		p.served[id] = s
	}
	s.service.Update(sp)
	if on == [classes]bool{} {
		return s.port, nil
	}
	if s.port != 0 {
		prefer = s.port
	}
	for port := range p.candidates(id, prefer) {
		err := p.listen(id, s, on, port)
		if err == nil {
			return s.port, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return 0, err
		}
	}
	if p.choice != (PortRange{}) {
		return 0, fmt.Errorf("every port from %d to %d is taken; widen the range (--proxy-port-range, portRange)", p.choice.First, p.choice.Last)
	}
	return 0, fmt.Errorf("no port is free on %s: %w", p.blocks.of(id.Family), unix.EADDRINUSE)
}

// chosenByKernel is how often the kernel is asked for a port that is free on all
// addresses.
const chosenByKernel = 32

// candidates are the ports to try, in order; 0 leaves it to the kernel.
func (p *ports) candidates(id plan.ID, prefer uint16) func(func(uint16) bool) {
	return func(yield func(uint16) bool) {
		within := p.choice == (PortRange{}) || prefer >= p.choice.First && prefer <= p.choice.Last
		own := p.served[id] != nil && p.served[id].port == prefer
		free := own || !p.taken[portOf{id.Family, id.Protocol, prefer}]
		if prefer != 0 && within && free && !yield(prefer) {
			return
		}
		if p.choice == (PortRange{}) {
			for range chosenByKernel {
				if !yield(0) {
					return
				}
			}
			return
		}
		size := p.choice.Last - p.choice.First + 1 // the first is at least 1
		for range size {
			port := p.choice.First + p.next%size
			p.next++
			if !p.taken[portOf{id.Family, id.Protocol, port}] && !yield(port) {
				return
			}
		}
	}
}

// listen opens the addresses that are missing, all or none of them; on a new port
// on all.
func (p *ports) listen(id plan.ID, s *served, on [classes]bool, port uint16) error {
	same := port != 0 && port == s.port
	var fresh [classes]*relay.Listener
	var opened []*relay.Listener
	undo := func() {
		for _, ln := range opened {
			p.close(ln)
		}
	}
	for c := range class(classes) {
		if !on[c] || same && s.listeners[c] != nil {
			continue
		}
		if p.open >= p.most {
			undo()
			return fmt.Errorf("%d sockets listen already, which is half of what the process may open: raise its limit of open files (LimitNOFILE, ulimit -n)", p.open)
		}
		rt := c.route()
		ln, err := p.relay.Listen(relay.ListenConfig{
			Key: servicePath(id), Protocol: id.Protocol, FreeBind: true,
			Addr:   netip.AddrPortFrom(c.addr(p.blocks.of(id.Family)), port),
			Router: func(relay.Flow) (*relay.Service, plan.Route) { return s.service, rt },
		})
		if err != nil {
			undo()
			return err
		}
		p.open += ln.Sockets()
		port = ln.Addr().Port()
		fresh[c] = ln
		opened = append(opened, ln)
	}
	if !same {
		for c, ln := range s.listeners {
			if ln != nil {
				s.left = append(s.left, ln)
				s.listeners[c] = nil
			}
		}
		delete(p.taken, portOf{id.Family, id.Protocol, s.port})
		s.port = port
		p.taken[portOf{id.Family, id.Protocol, port}] = true
	}
	for c, ln := range fresh {
		if ln != nil {
			s.listeners[c] = ln
		}
	}
	return nil
}

func (p *ports) close(ln *relay.Listener) {
	ln.Close()
	p.open -= ln.Sockets()
}

// trim implements sockets.
func (p *ports) trim(id plan.ID, on [classes]bool) {
	s := p.served[id]
	if s == nil {
		return
	}
	for _, ln := range s.left {
		p.close(ln)
	}
	s.left = nil
	for c, ln := range s.listeners {
		if ln != nil && !on[c] {
			p.close(ln)
			s.listeners[c] = nil
		}
	}
}

// drop implements sockets.
func (p *ports) drop(id plan.ID) {
	s := p.served[id]
	if s == nil {
		return
	}
	p.trim(id, [classes]bool{})
	s.service.Update(&plan.ServicePort{}) // its UDP flows end, its connections go on
	delete(p.taken, portOf{id.Family, id.Protocol, s.port})
	delete(p.served, id)
}

// known implements sockets.
func (p *ports) known(f plan.Family) []plan.ID {
	var out []plan.ID
	for id := range p.served {
		if id.Family == f {
			out = append(out, id)
		}
	}
	return out
}

// noSockets are those of a comparison: nothing is listened for.
type noSockets struct{}

func (noSockets) serve(_ *plan.ServicePort, on [classes]bool, prefer uint16) (uint16, error) {
	return prefer, nil
}
func (noSockets) trim(plan.ID, [classes]bool) {}
func (noSockets) drop(plan.ID)                {}
func (noSockets) known(plan.Family) []plan.ID { return nil }
