package listeners

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
)

// Ports are the listening sockets of a relay. Not safe for concurrent use.
type Ports struct {
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
	pools     [2][]plan.Endpoint // that it has
	port      uint16
	listeners [Classes]*relay.Listener
	left      []*relay.Listener // of a port that was given up, until nothing leads there
}

// New returns the sockets of a relay that is started, none yet, and most at most. Port
// numbers come from choice, or are the kernel's choice.
func New(r *relay.Relay, blocks Blocks, choice PortRange, most int) *Ports {
	return &Ports{relay: r, blocks: blocks, choice: choice, most: most, served: map[plan.ID]*served{}, taken: map[portOf]bool{}}
}

// Serve makes the relay know a Service port and listen for it on the addresses of some
// classes, all with the port that is returned: the one that it has already, or prefer if
// that is free, or another; 0 if there is nothing to listen for.
func (p *Ports) Serve(sp *plan.ServicePort, on Set, prefer uint16) (uint16, error) {
	id := sp.ID
	s := p.served[id]
	if s == nil {
		s = &served{service: p.relay.NewService(Key(id))}
		p.served[id] = s
	}
	s.update(sp)
	if on == (Set{}) {
		return s.port, nil
	}
	if s.port != 0 {
		prefer = s.port
	}
	for c := range p.candidates(id, prefer) {
		err := p.listen(id, s, on, c)
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
	return 0, fmt.Errorf("no port is free on %s: %w", p.blocks.Of(id.Family), unix.EADDRINUSE)
}

// update tells the relay of a change.
func (s *served) update(sp *plan.ServicePort) {
	next := *sp
	next.Pools = Pools(sp, s.pools)
	s.pools = next.Pools
	s.service.Update(&next)
}

// Pools are those that a relay needs for a Service port, given those that it has. One
// that no frontend uses any more keeps the endpoints that the Service still has:
// connections come yet that were being opened before nothing led to it.
func Pools(sp *plan.ServicePort, have [2][]plan.Endpoint) [2][]plan.Endpoint {
	out := sp.Pools
	for i := range out {
		if pool := plan.Pool(i); len(out[pool]) == 0 && !uses(sp, pool) {
			out[pool] = common(have[pool], sp.Pools[1-pool])
		}
	}
	return out
}

// uses reports whether a frontend sends anything to a pool.
func uses(sp *plan.ServicePort, pool plan.Pool) bool {
	return slices.ContainsFunc(sp.Frontends, func(fe plan.Frontend) bool {
		return slices.ContainsFunc(fe.Route[:], func(rt plan.Route) bool { return rt.Verdict == plan.Forward && rt.Pool == pool })
	})
}

// common are the endpoints of now that were there before. Pools are sorted.
func common(before, now []plan.Endpoint) []plan.Endpoint {
	var out []plan.Endpoint
	for _, was := range before {
		at, found := slices.BinarySearchFunc(now, was.Addr, func(e plan.Endpoint, a netip.AddrPort) int { return e.Addr.Compare(a) })
		if found {
			out = append(out, now[at])
		}
	}
	return out
}

// candidate is a port to try; 0 leaves it to the kernel.
type candidate struct {
	port uint16
	any  bool // also one that another Service port has at other addresses
}

// chosenByKernel is how often the kernel is asked for a port that is free on all
// addresses.
const chosenByKernel = 32

// candidates are the ports to try, in order.
func (p *Ports) candidates(id plan.ID, prefer uint16) func(func(candidate) bool) {
	return func(yield func(candidate) bool) {
		within := p.choice == (PortRange{}) || prefer >= p.choice.First && prefer <= p.choice.Last
		own := p.served[id] != nil && p.served[id].port == prefer
		free := own || !p.taken[portOf{id.Family, id.Protocol, prefer}]
		if prefer != 0 && within && free && !yield(candidate{port: prefer}) {
			return
		}
		if p.choice == (PortRange{}) {
			for n := range chosenByKernel {
				if !yield(candidate{any: n >= chosenByKernel/2}) {
					return
				}
			}
			return
		}
		size := p.choice.Last - p.choice.First + 1 // the first is at least 1
		for range size {
			port := p.choice.First + p.next%size
			p.next++
			if !p.taken[portOf{id.Family, id.Protocol, port}] && !yield(candidate{port: port}) {
				return
			}
		}
	}
}

// listen opens the addresses that are missing, all or none of them; on a new port
// on all.
func (p *Ports) listen(id plan.ID, s *served, on Set, want candidate) error {
	port := want.port
	same := port != 0 && port == s.port
	var fresh [Classes]*relay.Listener
	var opened []*relay.Listener
	undo := func() {
		for _, ln := range opened {
			p.close(ln)
		}
	}
	for c := range Class(Classes) {
		if !on[c] || same && s.listeners[c] != nil {
			continue
		}
		if p.open >= p.most {
			undo()
			return fmt.Errorf("%d sockets listen already, which is half of what the process may open: raise its limit of open files (LimitNOFILE, ulimit -n)", p.open)
		}
		rt := c.Route()
		ln, err := p.relay.Listen(relay.ListenConfig{
			Key: Key(id), Protocol: id.Protocol, FreeBind: true,
			Addr:   netip.AddrPortFrom(c.Addr(p.blocks.Of(id.Family)), port),
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
		if want.port == 0 && !want.any && p.taken[portOf{id.Family, id.Protocol, port}] {
			undo() // it could not get more addresses later without changing its port
			return unix.EADDRINUSE
		}
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

func (p *Ports) close(ln *relay.Listener) {
	ln.Close()
	p.open -= ln.Sockets()
}

// Trim closes what Serve does not need any more: nothing leads there now. TCP listeners
// stay, as the last packet of a connection's opening may be on its way to them.
func (p *Ports) Trim(id plan.ID, on Set) {
	s := p.served[id]
	if s == nil {
		return
	}
	for _, ln := range s.left {
		p.close(ln)
	}
	s.left = nil
	if id.Protocol == plan.TCP {
		return
	}
	for c, ln := range s.listeners {
		if ln != nil && !on[c] {
			p.close(ln)
			s.listeners[c] = nil
		}
	}
}

// Drop forgets a Service port. Its UDP flows end, its connections go on.
func (p *Ports) Drop(id plan.ID) {
	s := p.served[id]
	if s == nil {
		return
	}
	for _, ln := range append(s.left, s.listeners[:]...) {
		if ln != nil {
			p.close(ln)
		}
	}
	s.service.Update(&plan.ServicePort{})
	delete(p.taken, portOf{id.Family, id.Protocol, s.port})
	delete(p.served, id)
}

// Known lists the Service ports of a family that are served.
func (p *Ports) Known(f plan.Family) []plan.ID {
	var out []plan.ID
	for id := range p.served {
		if id.Family == f {
			out = append(out, id)
		}
	}
	return out
}

// Open returns how many sockets listen, and how many may.
func (p *Ports) Open() (open, most int) { return p.open, p.most }

// Services calls yield with all that is served.
func (p *Ports) Services(yield func(plan.ID, *relay.Service) bool) {
	for id, s := range p.served {
		if !yield(id, s.service) {
			return
		}
	}
}

// None are the sockets of a comparison: nothing is listened for.
type None struct{}

// Serve returns the port that is preferred.
func (None) Serve(_ *plan.ServicePort, _ Set, prefer uint16) (uint16, error) { return prefer, nil }

// Trim does nothing.
func (None) Trim(plan.ID, Set) {}

// Drop does nothing.
func (None) Drop(plan.ID) {}

// Known lists nothing.
func (None) Known(plan.Family) []plan.ID { return nil }
