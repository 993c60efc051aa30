package ipvs

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// Fake is a kernel's table in memory. Its exported fields may be set before it is
// used.
type Fake struct {
	// Missing: the kernel has no ip_vs.
	Missing bool
	// NoIPv6: the kernel's ip_vs lacks IPv6.
	NoIPv6 bool
	// NoScheduler lists those that the kernel lacks; it has all others.
	NoScheduler []string
	// Fail, if set, is asked before each operation and may return an error for it,
	// which then changes nothing; n counts the operations from 1.
	Fail func(n int, op Op) error

	mu       sync.Mutex // guards all below
	ops      []Op
	servers  map[Key]*fakeServer
	timeouts Timeouts
}

type fakeServer struct {
	VirtualServer
	real map[netip.AddrPort]*Live
}

// Op is an operation that a Fake was asked for.
type Op struct {
	Name string // "create server", "list" and so on
	Key  Key    // unset for those on the whole table
	Real netip.AddrPort
}

func (o Op) String() string {
	s := o.Name
	if o.Key != (Key{}) {
		s += " " + o.Key.String()
	}
	if o.Real.IsValid() {
		s += " > " + o.Real.String()
	}
	return s
}

var _ IPVS = (*Fake)(nil)

// begin counts an operation; f.mu is held.
func (f *Fake) begin(op Op) error {
	f.ops = append(f.ops, op)
	if f.Fail != nil {
		if err := f.Fail(len(f.ops), op); err != nil {
			return err
		}
	}
	if f.Missing {
		return ErrMissing
	}
	if f.servers == nil {
		f.servers = map[Key]*fakeServer{}
		f.timeouts = Timeouts{TCP: 15 * time.Minute, TCPFin: 2 * time.Minute, UDP: 5 * time.Minute}
	}
	return nil
}

// Ops returns the operations since the last call, failed ones included.
func (f *Fake) Ops() []Op {
	f.mu.Lock()
	defer f.mu.Unlock()
	ops := f.ops
	f.ops = nil
	return ops
}

// SetLive sets the counts of a real server, as clients would; it panics if there is
// no such one.
func (f *Fake) SetLive(k Key, addr netip.AddrPort, active, inactive, persistent uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.servers[k].real[addr]
	l.Active, l.Inactive, l.Persistent = active, inactive, persistent
}

func (f *Fake) Probe(_ context.Context, family Family, scheduler string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin(Op{Name: "probe"}); err != nil {
		return fmt.Errorf("probe ip_vs: %w", err)
	}
	if err := f.has(family, scheduler); err != nil {
		return fmt.Errorf("probe ip_vs for %s and scheduler %s: %w", family, scheduler, err)
	}
	return nil
}

func (f *Fake) has(family Family, scheduler string) error {
	switch {
	case family == IPv6 && f.NoIPv6:
		return ErrFamily
	case slices.Contains(f.NoScheduler, scheduler):
		return ErrNoScheduler
	}
	return nil
}

func (f *Fake) Dump(ctx context.Context) ([]Entry, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin(Op{Name: "dump"}); err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	out := make([]Entry, 0, len(f.servers))
	for _, s := range f.servers {
		out = append(out, Entry{s.VirtualServer, s.list()})
	}
	slices.SortFunc(out, func(a, b Entry) int { return a.Key.Compare(b.Key) })
	return out, nil
}

func (s *fakeServer) list() []Live {
	out := make([]Live, 0, len(s.real))
	for _, r := range s.real {
		out = append(out, *r)
	}
	sortLive(out)
	return out
}

func sortLive(l []Live) {
	slices.SortFunc(l, func(a, b Live) int { return cmp.Or(a.Addr.Compare(b.Addr)) })
}

func (f *Fake) RealServers(k Key) ([]Live, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.server(Op{Name: "list real servers", Key: k}, k.check())
	if err != nil {
		return nil, fmt.Errorf("list the real servers of %s: %w", k, err)
	}
	return s.list(), nil
}

// server begins an operation on a virtual server that exists; invalid is what is
// wrong with the call itself.
func (f *Fake) server(op Op, invalid error) (*fakeServer, error) {
	if err := f.begin(op); err != nil {
		return nil, err
	}
	if invalid != nil {
		return nil, invalid
	}
	if err := f.has(op.Key.Family, ""); err != nil {
		return nil, err
	}
	s := f.servers[op.Key]
	if s == nil {
		return nil, ErrNoServer
	}
	return s, nil
}

func (f *Fake) CreateServer(v VirtualServer) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.begin(Op{Name: "create server", Key: v.Key})
	if err == nil {
		err = v.check()
	}
	switch {
	case err != nil:
	case f.servers[v.Key] != nil:
		err = ErrExist
	default:
		err = f.has(v.Family, v.Scheduler)
	}
	if err != nil {
		return fmt.Errorf("create virtual server %s: %w", v, err)
	}
	f.servers[v.Key] = &fakeServer{VirtualServer: v, real: map[netip.AddrPort]*Live{}}
	return nil
}

func (f *Fake) UpdateServer(v VirtualServer) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.server(Op{Name: "update server", Key: v.Key}, v.check())
	if err == nil {
		err = f.has(v.Family, v.Scheduler)
	}
	if err != nil {
		return fmt.Errorf("update virtual server %s: %w", v, err)
	}
	s.VirtualServer = v
	return nil
}

func (f *Fake) DeleteServer(k Key) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.server(Op{Name: "delete server", Key: k}, k.check()); err != nil {
		return fmt.Errorf("delete virtual server %s: %w", k, err)
	}
	delete(f.servers, k)
	return nil
}

func (f *Fake) CreateReal(k Key, r RealServer) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.server(Op{Name: "create real server", Key: k, Real: r.Addr}, k.checkReal(r))
	if err == nil && s.real[r.Addr] != nil {
		err = ErrExist
	}
	if err != nil {
		return fmt.Errorf("create real server %s of %s: %w", r, k, err)
	}
	s.real[r.Addr] = &Live{RealServer: r}
	return nil
}

func (f *Fake) UpdateReal(k Key, r RealServer) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.server(Op{Name: "update real server", Key: k, Real: r.Addr}, k.checkReal(r))
	if err == nil && s.real[r.Addr] == nil {
		err = ErrNoReal
	}
	if err != nil {
		return fmt.Errorf("update real server %s of %s: %w", r, k, err)
	}
	s.real[r.Addr].RealServer = r
	return nil
}

func (f *Fake) DeleteReal(k Key, addr netip.AddrPort) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.server(Op{Name: "delete real server", Key: k, Real: addr}, k.checkReal(RealServer{Addr: addr}))
	if err == nil && s.real[addr] == nil {
		err = ErrNoReal
	}
	if err != nil {
		return fmt.Errorf("delete real server %s of %s: %w", addr, k, err)
	}
	delete(s.real, addr)
	return nil
}

func (f *Fake) Timeouts() (Timeouts, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin(Op{Name: "read time-outs"}); err != nil {
		return Timeouts{}, fmt.Errorf("read the time-outs of ip_vs: %w", err)
	}
	return f.timeouts, nil
}

func (f *Fake) SetTimeouts(t Timeouts) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.begin(Op{Name: "set time-outs"})
	if err == nil {
		err = t.check()
	}
	if err != nil {
		return fmt.Errorf("set the time-outs of ip_vs to %s: %w", t, err)
	}
	f.timeouts = Timeouts{
		TCP:    cmp.Or(t.TCP, f.timeouts.TCP),
		TCPFin: cmp.Or(t.TCPFin, f.timeouts.TCPFin),
		UDP:    cmp.Or(t.UDP, f.timeouts.UDP),
	}
	return nil
}

// String lists everything as ipvsadm does, by key: a virtual server a line, and
// below it its real servers.
func (f *Fake) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []Entry
	for _, s := range f.servers {
		all = append(all, Entry{s.VirtualServer, s.list()})
	}
	return Text(all)
}

// Text lists entries as ipvsadm does, by key: a virtual server a line, and below it
// its real servers, without their counts.
func Text(all []Entry) string {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b Entry) int { return a.Key.Compare(b.Key) })
	var b strings.Builder
	for _, e := range all {
		fmt.Fprintln(&b, e.VirtualServer)
		for _, r := range e.Real {
			fmt.Fprintln(&b, "  ->", r.RealServer)
		}
	}
	return b.String()
}
