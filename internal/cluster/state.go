package cluster

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// State is the newest facts of all sources. Its objects are immutable: a change
// replaces them. Safe for concurrent use.
type State struct {
	now     func() time.Time
	start   time.Time
	changed chan struct{} // capacity 1: a wake-up is pending

	mu       sync.Mutex // guards all below
	sources  []*sink
	services map[Name]*entry
	failing  map[Name][]netip.AddrPort // endpoints, sorted; without those that have none
	host     []netip.Addr
	dirty    Dirty
}

// entry is one Service with everything that carries its name.
type entry struct {
	services []*Service // of each source that has it, in their order; the first is in force
	slices   []*Slice   // sorted by compareSlices
}

// find returns where the Service of a source is, or belongs.
func (e *entry) find(source uint16) (at int, found bool) {
	return slices.BinarySearchFunc(e.services, source, func(svc *Service, s uint16) int { return int(svc.source) - int(s) })
}

// name returns the Service's name as the entry already holds it, else n, so that
// equal names share their memory.
func (e *entry) name(n string) string {
	switch {
	case len(e.services) > 0:
		return e.services[0].Name.Name
	case len(e.slices) > 0:
		return e.slices[0].Service
	}
	return n
}

// Dirty is what changed since the last Drain.
type Dirty struct {
	Services map[Name]struct{} // the Service or one of its slices
	Node     bool              // own Node
	Host     bool              // the host's addresses
	CIDRs    bool              // Service CIDRs
	// Triggers are those of slices that changed, without the ones from before
	// the State was made: what they triggered was not for this process to do.
	Triggers []time.Time
}

// Empty reports whether nothing changed.
func (d *Dirty) Empty() bool { return len(d.Services) == 0 && !d.Node && !d.Host && !d.CIDRs }

// NewState returns an empty State. now is the clock of Age.
func NewState(now func() time.Time) *State {
	return &State{
		now: now, start: now(), changed: make(chan struct{}, 1),
		services: map[Name]*entry{}, failing: map[Name][]netip.AddrPort{}, dirty: Dirty{Services: map[Name]struct{}{}},
	}
}

// Sink opens the way in for one more source, called name in messages, that will
// deliver the given kinds. Where two sources deliver a Service of the same name, or
// the own Node, the one opened first is in force; slices of all sources add up.
// Call it before any source runs.
func (s *State) Sink(name string, delivers ...Kind) Sink {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := &sink{s: s, index: uint16(len(s.sources)), name: name, slices: map[Name]*Slice{}}
	for _, d := range delivers {
		k.delivers[d] = true
	}
	s.sources = append(s.sources, k)
	return k
}

// Changed has a value whenever something changed that Drain has not returned yet.
func (s *State) Changed() <-chan struct{} { return s.changed }

// Complete reports whether every source has delivered every kind once; missing
// says what is still awaited, by source and kind.
func (s *State) Complete() (ok bool, missing []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.sources {
		for kind := range kinds {
			if k.delivers[kind] && !k.synced[kind] {
				missing = append(missing, k.name+" "+kind.String())
			}
		}
	}
	return len(missing) == 0, missing
}

// Age is the time since the oldest confirmation among all sources and the kinds
// that they deliver: how old the oldest part of the view may be. A kind that was
// never confirmed does not count, [State.Complete] awaits it; 0 while nothing was
// confirmed yet.
func (s *State) Age() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	var oldest time.Time
	for _, k := range s.sources {
		for kind := range kinds {
			if t := k.seen[kind]; k.delivers[kind] && !t.IsZero() && (oldest.IsZero() || t.Before(oldest)) {
				oldest = t
			}
		}
	}
	if oldest.IsZero() {
		return 0
	}
	return max(0, s.now().Sub(oldest))
}

// Drain returns what changed since the last call.
func (s *State) Drain() Dirty {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.dirty
	s.dirty = Dirty{Services: map[Name]struct{}{}}
	return d
}

// Service returns the Service in force, nil if there is none, and all slices that
// name it, in an order that does not depend on how they arrived.
func (s *State) Service(n Name) (*Service, []*Slice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.services[n]
	if e == nil {
		return nil, nil
	}
	var svc *Service
	if len(e.services) > 0 {
		svc = e.services[0]
	}
	return svc, slices.Clone(e.slices)
}

// Names returns the names of all Services, and of Services that only slices name,
// sorted. A Name without a Name is that of slices that name no Service.
func (s *State) Names() []Name {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Name, 0, len(s.services))
	for n := range s.services {
		out = append(out, n)
	}
	slices.SortFunc(out, compareNames)
	return out
}

// Node returns the own Node, nil while none is known.
func (s *State) Node() *Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ownNode()
}

// ownNode is that of the first source that has one.
func (s *State) ownNode() *Node {
	for _, k := range s.sources {
		if k.node != nil {
			return k.node
		}
	}
	return nil
}

// ServiceCIDRs returns the Service CIDRs of all sources, sorted, each once.
func (s *State) ServiceCIDRs() []netip.Prefix {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []netip.Prefix
	for _, k := range s.sources {
		out = append(out, k.cidrs...)
	}
	slices.SortFunc(out, comparePrefixes)
	return slices.Compact(out)
}

// Host returns the addresses of the host's interfaces.
func (s *State) Host() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.host
}

// SetHost replaces the addresses of the host's interfaces, both families, without
// zones.
func (s *State) SetHost(addrs []netip.Addr) {
	addrs = slices.Clone(addrs)
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Equal(addrs, s.host) {
		return
	}
	s.host = addrs
	s.dirty.Host = true
	s.wake()
}

// SetFailing says that an endpoint of a Service fails the Service's health check,
// or no longer does. Whoever probes takes back what was said of endpoints and
// Services that are gone.
func (s *State) SetFailing(n Name, endpoint netip.AddrPort, failing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.failing[n]
	at, found := slices.BinarySearchFunc(have, endpoint, netip.AddrPort.Compare)
	switch {
	case found == failing:
		return
	case failing:
		s.failing[n] = slices.Insert(slices.Clone(have), at, endpoint)
	case len(have) == 1:
		delete(s.failing, n)
	default:
		s.failing[n] = slices.Delete(slices.Clone(have), at, at+1)
	}
	s.touch(n)
}

// Failing returns the endpoints of a Service that fail its health check, sorted.
func (s *State) Failing(n Name) []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failing[n]
}

// Counts returns the number of Services and of endpoints held.
func (s *State) Counts() (services, endpoints int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.services {
		if len(e.services) > 0 {
			services++
		}
	}
	for _, k := range s.sources {
		for _, sl := range k.slices {
			endpoints += len(sl.Endpoints)
		}
	}
	return services, endpoints
}

func (s *State) wake() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

func (s *State) touch(n Name) {
	s.dirty.Services[n] = struct{}{}
	s.wake()
}

// entryOf returns the entry of n, made if need be.
func (s *State) entryOf(n Name) *entry {
	e := s.services[n]
	if e == nil {
		e = &entry{}
		s.services[n] = e
	}
	return e
}

// tidy removes an entry that holds nothing any more.
func (s *State) tidy(n Name) {
	if e := s.services[n]; e != nil && len(e.services) == 0 && len(e.slices) == 0 {
		delete(s.services, n)
	}
}

func compareNames(a, b Name) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func compareSlices(a, b *Slice) int {
	return cmp.Or(compareNames(a.Name, b.Name), int(a.source)-int(b.source))
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits())
}
