// Package userspace carries out a plan by relaying: a listening port for each Service
// port, to which an nf_tables map leads what is sent to the Service, and from which
// the bytes go on to an endpoint. Endpoints are chosen, retried and remembered in the
// process (package relay); the kernel knows frontends only. See README.md for a
// packet's path.
//
// Limits: connections through the process end with it. New ones go to a successor, or,
// while there is no process, to a few endpoints by the kernel's own translation. Services whose protocol is SCTP are refused.
package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/sys/conntrack"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
	"github.com/svcproxy/svcproxy/internal/sys/route"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// Name is the mode's name in kube-proxy's configuration.
const Name = "userspace"

// Options are the mode's settings. The zero value of each is its default.
type Options struct {
	// Ports is the range from which listening ports are taken; zero: the kernel
	// chooses.
	Ports PortRange
	// Blocks are the addresses on which the relay listens.
	Blocks Blocks
	// RouteBit is the bit of packet and flow marks that brings the answers of
	// endpoints back to sockets with a client's address, 1 to 31; 0: 15. It differs
	// from Env.MasqueradeBit.
	RouteBit int
	// Interception is how packets come to the relay; "": by nf_tables if the kernel has
	// what that needs, else by routes.
	Interception Interception
	// DrainTimeout is how long open connections may go on after the process was told
	// to end; 0: 25 s.
	DrainTimeout time.Duration
	// Relay are the settings of the relay. Log, Now, Mark and Inherited are set here.
	Relay relay.Options
}

// Interception is a way in which packets come to the relay.
type Interception string

const (
	ByTables Interception = "nftables" // a map of nf_tables leads them there
	ByRoutes Interception = "route"    // it listens on the Services' own addresses
)

// What the options are made of.
type (
	PortRange = listeners.PortRange
	Blocks    = listeners.Blocks
)

const (
	defaultRouteBit = 15
	defaultDrain    = 25 * time.Second
	// defaultUDPTimeout is longer than kube-proxy's 250 ms, which loses every answer
	// that takes longer; it is connection tracking's time for unanswered flows.
	defaultUDPTimeout = 30 * time.Second
)

func (o Options) withDefaults() Options {
	defaults := listeners.DefaultBlocks()
	if !o.Blocks.V4.IsValid() {
		o.Blocks.V4 = defaults.V4
	}
	if !o.Blocks.V6.IsValid() {
		o.Blocks.V6 = defaults.V6
	}
	if o.RouteBit == 0 {
		o.RouteBit = defaultRouteBit
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = defaultDrain
	}
	if o.Relay.UDPTimeout == 0 {
		o.Relay.UDPTimeout = defaultUDPTimeout
	}
	return o
}

// Mode returns the mode.
func Mode(o Options) dataplane.Mode {
	return dataplane.Mode{
		Name:      Name,
		OwnFlows:  true,
		Supported: func(ctx context.Context) error { return Supports(ctx, plan.IPv4) },
		New: func(env dataplane.Env) (dataplane.Backend, error) {
			return newBackend(env, o, host{&kernel.Tables{}, route.Kernel{}, &conntrack.Kernel{}})
		},
		Cleanup: cleanUp,
		InForce: func(ctx context.Context, _ dataplane.Env) (bool, error) {
			k := &kernel.Tables{}
			found, err := inForce(ctx, k)
			return found, errors.Join(err, k.Close())
		},
		HandOver: handOver,
	}
}

// host is the kernel as far as the mode writes to it.
type host struct {
	tables  nft.Tables
	routing route.Routing
	flows   flowTable
}

// backend is the mode at work.
type backend struct {
	env  dataplane.Env
	opts Options
	host host

	mu        sync.Mutex // guards all below
	begun     bool
	relay     *relay.Relay
	inherited bool // the sockets of a predecessor, which serves them until takeOver
	ports     *listeners.Ports
	families  []*family
	routes    *routes // interception by routes alone; nil: by tables
	settled   bool    // the routing is as it should be
	gone      bool    // a successor has taken over, or the process ends: nothing is written any more
	remarks   []plan.Note
	refused   map[plan.Name]bool // Services whose SCTP ports were remarked on

	serving chan struct{} // closed when everything is served for the first time
}

func newBackend(env dataplane.Env, o Options, h host) (*backend, error) {
	o = o.withDefaults()
	if o.RouteBit == env.MasqueradeBit {
		return nil, fmt.Errorf("bit %d is both the masquerade bit and the bit for routing answers: choose another for one of them", o.RouteBit)
	}
	o.Relay.Log, o.Relay.Mark = env.Log, env.Mark()
	b := &backend{env: env, opts: o, host: h, serving: make(chan struct{}), refused: map[plan.Name]bool{}}
	for _, f := range env.Families {
		b.families = append(b.families, newFamily(b, f))
	}
	return b, nil
}

// Apply implements dataplane.Backend.
func (b *backend) Apply(ctx context.Context, u plan.Update) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone {
		return nil
	}
	if err := b.begin(ctx); err != nil {
		return err
	}
	err := b.carryOut(ctx, u)
	if err == nil && !u.Partial {
		b.takeOver()
	}
	return err
}

// carryOut has the tables, or the routes, say what u says.
func (b *backend) carryOut(ctx context.Context, u plan.Update) error {
	if b.routes != nil {
		return b.routes.apply(ctx, u)
	}
	var errs []error
	for _, f := range b.families {
		errs = append(errs, f.apply(ctx, u))
	}
	return errors.Join(errs...)
}

// Services returns what the relay serves now, with its figures.
func (b *backend) Services() map[plan.ID]*relay.Service {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := map[plan.ID]*relay.Service{}
	if b.ports != nil {
		maps.Insert(out, b.ports.Services)
	}
	if b.routes != nil {
		for id, s := range b.routes.services {
			if s.service != nil {
				out[id] = s.service
			}
		}
	}
	return out
}

// ReasonNotRelayed: a Service port's protocol cannot be relayed in user space.
const ReasonNotRelayed plan.Reason = "NotRelayed"

// remarkProtocol says once of a Service that its SCTP ports are refused.
func (b *backend) remarkProtocol(id plan.ID) {
	name := id.Service()
	if id.Protocol != plan.SCTP || b.refused[name] {
		return
	}
	b.refused[name] = true
	b.remarks = append(b.remarks, plan.Note{
		Kind: "Service", Namespace: id.Namespace, Name: id.Name, Reason: ReasonNotRelayed, Warning: true,
		Message: fmt.Sprintf("port %q is of protocol SCTP, which userspace mode does not relay: connections to it are refused; use another mode for it", id.Port),
	})
}

// Remarks implements dataplane.Remarker.
func (b *backend) Remarks() []plan.Note {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.remarks
	b.remarks = nil
	return out
}

// Invalidate implements dataplane.Backend.
func (b *backend) Invalidate() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.settled = false
	if b.routes != nil {
		b.routes.known = false
	}
	for _, f := range b.families {
		f.forget()
	}
}
