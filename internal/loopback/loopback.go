// Package loopback serves node ports on 127.0.0.1 and [::1] in user space, for every
// mode: the kernel's rules cannot without net.ipv4.conf.all.route_localnet, which
// opens daemons on loopback to neighbours (CVE-2020-8558), and for IPv6 there is no
// such setting. TCP and UDP; who connects is the node itself, so the plan's route for
// it counts.
//
// A node port without an endpoint is not listened on, so that connecting is refused.
// Connections end with the process; a successor on the same node takes over the
// listening sockets.
package loopback

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/relay/handover"
)

// Reasons of the forwarder's remarks.
const (
	// ReasonPortTaken: another program listens on the loopback address of a node port.
	ReasonPortTaken plan.Reason = "LoopbackNodePortTaken"
	// ReasonPortServed: the same node port is served on loopback after all.
	ReasonPortServed plan.Reason = "LoopbackNodePortServed"
)

// Config is what a Forwarder works with.
type Config struct {
	Families []plan.Family
	// Relay are the settings of the relay; Log and Inherited are set here.
	Relay relay.Options
	Notes func([]plan.Note) // nil: nobody is told
	Log   *slog.Logger      // nil: nothing is logged
	// Retry is the pause after a port could not be listened on; 0: 5 s.
	Retry time.Duration
	// Drain is how long open connections may go on after Run was told to end; 0: 1 s.
	Drain time.Duration
}

// Forwarder serves node ports on loopback. It follows the loop (dataplane.Follower).
type Forwarder struct {
	cfg  Config
	wake chan struct{}

	mu       sync.Mutex // guards what Run has not taken up yet, and services
	changed  map[plan.ID]*plan.ServicePort
	loopback map[plan.Family]bool
	whole    bool // a whole plan was seen
	services map[plan.ID]*relay.Service

	// Of Run's goroutine alone.
	relay     *relay.Relay
	inherited *handover.Inheritance
	ports     map[plan.ID]*nodePort
}

// nodePort is a Service port with a node port.
type nodePort struct {
	sp       *plan.ServicePort
	addr     netip.AddrPort
	service  *relay.Service
	listener *relay.Listener // nil: not served, or not yet
	failed   error
}

// New returns a Forwarder; it touches nothing.
func New(c Config) *Forwarder {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Notes == nil {
		c.Notes = func([]plan.Note) {}
	}
	if c.Retry == 0 {
		c.Retry = 5 * time.Second
	}
	if c.Drain == 0 {
		c.Drain = time.Second
	}
	c.Relay.Log = c.Log
	return &Forwarder{
		cfg: c, wake: make(chan struct{}, 1),
		changed: map[plan.ID]*plan.ServicePort{}, loopback: map[plan.Family]bool{}, ports: map[plan.ID]*nodePort{},
	}
}

// Follow implements dataplane.Follower.
func (f *Forwarder) Follow(u plan.Update) {
	f.mu.Lock()
	for _, c := range u.Changed {
		if hasNodePort(c.Old) || hasNodePort(c.New) {
			f.changed[c.ID] = c.New
		}
	}
	for _, fam := range f.cfg.Families {
		f.loopback[fam] = u.Plan.Node.NodePorts[fam].Loopback
	}
	f.whole = f.whole || !u.Partial
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

func hasNodePort(sp *plan.ServicePort) bool { return sp != nil && frontend(sp) != nil }

// frontend is the node port of a Service port; nil if it has none.
func frontend(sp *plan.ServicePort) *plan.Frontend {
	for i := range sp.Frontends {
		if sp.Frontends[i].Kind == plan.NodePort {
			return &sp.Frontends[i]
		}
	}
	return nil
}

// Run serves until ctx ends; then open connections have a moment to end.
func (f *Forwarder) Run(ctx context.Context) {
	given := make(chan struct{})
	offer, stopOffer := context.WithCancel(ctx)
	defer stopOffer()
	offering := false
	var retry <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			f.end(ctx)
			return
		case <-given:
			f.cfg.Log.Info("a successor serves node ports on loopback now")
			<-ctx.Done()
			f.end(ctx)
			return
		case <-f.wake:
		case <-retry:
		}
		retry = nil
		whole := f.take()
		if !f.serve(ctx) {
			retry = time.After(f.cfg.Retry)
		}
		if !whole || f.relay == nil {
			continue
		}
		if f.inherited != nil {
			if err := f.relay.Succeed(); err != nil {
				f.cfg.Log.Warn("the predecessor does not say that it has stopped accepting on loopback", "err", err)
			}
			f.inherited = nil
		}
		if !offering {
			offering = true
			go f.relay.OfferUntil(offer, handoverPath, given, nil)
		}
	}
}

// handoverPath is where a process waits for its successor: a name in the abstract
// namespace of Unix sockets, which is that of the network namespace.
const handoverPath = "@svcproxy-loopback"

// take takes up what Follow was told, and reports whether that is a whole plan.
func (f *Forwarder) take() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, sp := range f.changed {
		p := f.ports[id]
		if p == nil {
			p = &nodePort{}
			f.ports[id] = p
		}
		p.sp = sp
	}
	clear(f.changed)
	return f.whole
}

// end stops accepting and waits for open connections for a moment.
func (f *Forwarder) end(ctx context.Context) {
	if f.relay == nil {
		return
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.cfg.Drain)
	defer cancel()
	if err := f.relay.Shutdown(end); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		f.cfg.Log.Warn("connections on loopback could not be ended", "err", err)
	}
}

// serve brings the listening sockets to what the Service ports want. It reports
// whether all could be.
func (f *Forwarder) serve(ctx context.Context) bool {
	f.mu.Lock()
	on := maps.Clone(f.loopback)
	f.mu.Unlock()
	ids := slices.SortedFunc(maps.Keys(f.ports), plan.ID.Compare)
	for _, id := range ids { // what goes makes room first
		p := f.ports[id]
		addr := wanted(p.sp, on)
		if p.listener != nil && p.addr != addr {
			p.listener.Close()
			p.listener = nil
		}
		if p.addr != addr {
			p.addr, p.failed = addr, nil
		}
		if p.sp == nil || !hasNodePort(p.sp) {
			if p.service != nil {
				p.service.Update(&plan.ServicePort{})
			}
			delete(f.ports, id)
		}
	}
	all := true
	for _, id := range ids {
		if p := f.ports[id]; p != nil && (p.addr.IsValid() || p.service != nil) {
			all = f.follow(ctx, id, p) && all
		}
	}
	f.publish()
	return all
}

// publish makes the Services known that there are now.
func (f *Forwarder) publish() {
	services := map[plan.ID]*relay.Service{}
	for id, p := range f.ports {
		if p.service != nil {
			services[id] = p.service
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.services = services
}

// Services returns what is served now, or was while the Service is there, with its
// figures. The map is not changed any more.
func (f *Forwarder) Services() map[plan.ID]*relay.Service {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.services
}

// wanted is the address on which a Service port is to be served; the zero AddrPort:
// nowhere.
func wanted(sp *plan.ServicePort, on map[plan.Family]bool) netip.AddrPort {
	if sp == nil || !on[sp.ID.Family] || sp.ID.Protocol != plan.TCP && sp.ID.Protocol != plan.UDP {
		return netip.AddrPort{}
	}
	fe := frontend(sp)
	if fe == nil {
		return netip.AddrPort{}
	}
	addr := netip.IPv6Loopback()
	if sp.ID.Family == plan.IPv4 {
		addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	rt := fe.Route[plan.FromNode]
	takes := func(e plan.Endpoint) bool { return e.Weight > 0 }
	allows := func(p netip.Prefix) bool { return p.Contains(addr) }
	if rt.Verdict != plan.Forward || !slices.ContainsFunc(sp.Pools[rt.Pool], takes) ||
		fe.Allow != nil && !slices.ContainsFunc(fe.Allow, allows) {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(addr, fe.Port)
}

// follow brings one Service port up to date.
func (f *Forwarder) follow(ctx context.Context, id plan.ID, p *nodePort) bool {
	if f.relay == nil {
		if err := f.start(ctx); err != nil {
			f.failed(id, p, err)
			return false
		}
	}
	if p.service == nil {
		p.service = f.relay.NewService(id.String() + "/" + id.Protocol.String() + "/" + id.Family.String() + " on loopback")
	}
	p.service.Update(p.sp)
	if !p.addr.IsValid() {
		return true
	}
	service, rt := p.service, frontend(p.sp).Route[plan.FromNode]
	rt.SNAT = true // the endpoint could not answer to loopback
	router := func(relay.Flow) (*relay.Service, plan.Route) { return service, rt }
	if p.listener != nil {
		p.listener.SetRouter(router)
		return true
	}
	ln, err := f.relay.Listen(relay.ListenConfig{Key: "loopback", Protocol: id.Protocol, Addr: p.addr, Router: router})
	if err != nil {
		f.failed(id, p, err)
		return false
	}
	p.listener = ln
	if p.failed != nil {
		p.failed = nil
		f.note(id, ReasonPortServed, false, fmt.Sprintf("node port %d is served on %s now", p.addr.Port(), p.addr.Addr()))
	}
	return true
}

// start starts the relay, with what a predecessor left.
func (f *Forwarder) start(ctx context.Context) error {
	in, err := handover.Inherit(ctx, handoverPath)
	if err != nil {
		f.cfg.Log.Warn("a predecessor's sockets on loopback cannot be taken over", "err", err)
	}
	o := f.cfg.Relay
	o.Inherited, o.Quarters = in, 1 // the others are for a mode that relays itself
	r := relay.New(o)
	if err := r.Start(); err != nil {
		return err
	}
	f.relay, f.inherited = r, in
	return nil
}

// failed tells once why a node port is not served.
func (f *Forwarder) failed(id plan.ID, p *nodePort, err error) {
	first := p.failed == nil || p.failed.Error() != err.Error()
	p.failed = err
	if !first {
		return
	}
	why := err.Error()
	if errors.Is(err, unix.EADDRINUSE) {
		why = "another program listens there: stop it or give the Service another nodePort"
	}
	f.note(id, ReasonPortTaken, true, fmt.Sprintf("node port %d (port %q, %s) cannot be served on %s: %s. It is tried again every %s.",
		p.addr.Port(), id.Port, id.Protocol, p.addr.Addr(), why, f.cfg.Retry))
}

func (f *Forwarder) note(id plan.ID, reason plan.Reason, warning bool, message string) {
	f.cfg.Notes([]plan.Note{{
		Kind: "Service", Namespace: id.Namespace, Name: id.Name, Reason: reason, Warning: warning, Message: message,
	}})
}
