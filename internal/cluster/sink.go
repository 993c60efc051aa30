package cluster

import (
	"context"
	"net/netip"
	"reflect"
	"slices"
	"time"
)

// Kind is a kind of object that a source delivers.
type Kind uint8

const (
	Services Kind = iota
	Slices
	Nodes
	ServiceCIDRs
	kinds
)

func (k Kind) String() string {
	return [...]string{"Service", "EndpointSlice", "Node", "ServiceCIDR"}[k]
}

// Sink is a source's way into the State. Objects are owned by the State once
// handed over, each to one Sink. A source may call it from several goroutines, but
// not for the same kind: of two concurrent calls either may be the last.
type Sink interface {
	SetService(*Service)
	DeleteService(Name)
	SetSlice(*Slice)
	DeleteSlice(Name)
	// SetNode hands over the own node; nil: this source has no such Node.
	SetNode(*Node)
	// SetServiceCIDRs replaces the Service CIDRs of this source.
	SetServiceCIDRs([]netip.Prefix)
	// Synced says that everything of the kind that exists was delivered once.
	Synced(Kind)
	// Seen says that the source's view of the kind was confirmed just now.
	Seen(Kind)
}

// Source delivers facts into a Sink.
type Source interface {
	// Run delivers until ctx ends. It returns an error only if it can never
	// deliver anything; what heals by waiting is retried.
	Run(ctx context.Context, to Sink) error
}

// sink is one source's way in.
type sink struct {
	s        *State
	index    uint16
	name     string
	delivers [kinds]bool

	// guarded by s.mu
	synced [kinds]bool
	seen   [kinds]time.Time
	slices map[Name]*Slice
	node   *Node
	cidrs  []netip.Prefix
}

func (k *sink) SetService(svc *Service) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	svc.source = k.index
	e := k.s.entryOf(svc.Name)
	i, found := e.find(k.index)
	if found && reflect.DeepEqual(e.services[i], svc) {
		return
	}
	svc.Name.Name = e.name(svc.Name.Name)
	if found {
		e.services[i] = svc
	} else {
		e.services = slices.Insert(e.services, i, svc)
	}
	k.s.touch(svc.Name)
}

func (k *sink) DeleteService(n Name) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	e := k.s.services[n]
	if e == nil {
		return
	}
	i, found := e.find(k.index)
	if !found {
		return
	}
	e.services = slices.Delete(e.services, i, i+1)
	k.s.tidy(n)
	k.s.touch(n)
}

func (k *sink) SetSlice(sl *Slice) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	sl.source = k.index
	old := k.slices[sl.Name]
	if old != nil {
		if sameSlice(old, sl) {
			return
		}
		k.s.unlink(old, old.Service != sl.Service)
	}
	k.slices[sl.Name] = sl
	n := sl.serviceName()
	e := k.s.entryOf(n)
	sl.Service = e.name(sl.Service)
	i, _ := slices.BinarySearchFunc(e.slices, sl, compareSlices)
	e.slices = slices.Insert(e.slices, i, sl)
	if sl.Trigger.After(k.s.start) {
		k.s.dirty.Triggers = append(k.s.dirty.Triggers, sl.Trigger)
	}
	k.s.touch(n)
}

func (k *sink) DeleteSlice(n Name) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if old := k.slices[n]; old != nil {
		delete(k.slices, n)
		k.s.unlink(old, true)
	}
}

// unlink takes a slice out of its Service's entry; tidy also removes an entry
// that is left empty.
func (s *State) unlink(sl *Slice, tidy bool) {
	n := sl.serviceName()
	if e := s.services[n]; e != nil {
		e.slices = slices.DeleteFunc(e.slices, func(o *Slice) bool { return o == sl })
	}
	if tidy {
		s.tidy(n)
	}
	s.touch(n)
}

// sameSlice ignores the trigger time: an object that was written again without a
// change of endpoints is no change.
func sameSlice(a, b *Slice) bool {
	return a.Service == b.Service && a.IPv6 == b.IPv6 && slices.Equal(a.Ports, b.Ports) &&
		slices.Equal(a.Endpoints, b.Endpoints) && slices.Equal(a.Problems, b.Problems)
}

func (k *sink) SetNode(n *Node) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	before := k.s.ownNode()
	k.node = n
	if !reflect.DeepEqual(before, k.s.ownNode()) {
		k.s.dirty.Node = true
		k.s.wake()
	}
}

func (k *sink) SetServiceCIDRs(p []netip.Prefix) {
	p = slices.Clone(p)
	slices.SortFunc(p, comparePrefixes)
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if slices.Equal(k.cidrs, p) {
		return
	}
	k.cidrs = p
	k.s.dirty.CIDRs = true
	k.s.wake()
}

func (k *sink) Synced(kind Kind) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	k.seen[kind] = k.s.now()
	if !k.synced[kind] {
		k.synced[kind] = true
		k.s.wake()
	}
}

func (k *sink) Seen(kind Kind) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	k.seen[kind] = k.s.now()
}
