package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/relay/handover"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/route"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
	"github.com/svcproxy/svcproxy/internal/userspace/steering"
)

// successorWait is how long a process that was told to end goes on accepting, so that
// a successor that just starts gets its sockets.
const successorWait = 2 * time.Second

// lastArrivals is how long connections are accepted whose first packet was led here
// just before the kernel stood in, or another mode took over.
const lastArrivals = time.Second

// begin has everything run that Service ports need, and the host's routing as it
// should be.
func (b *backend) begin(ctx context.Context) error {
	if !b.begun {
		b.choose(ctx)
		in, err := handover.Inherit(ctx, handoverPath)
		if err != nil { // what it does not give is opened anew
			b.env.Log.Warn("a predecessor's sockets cannot be taken over", "err", err)
		}
		var limit unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			return fmt.Errorf("ask for the limit of open files: %w", err)
		}
		o := b.opts.Relay
		o.Inherited = in
		r := relay.New(o)
		if err := r.Start(); err != nil {
			return err
		}
		b.relay, b.inherited, b.begun = r, in != nil, true
		if b.routes != nil {
			return nil
		}
		b.ports = listeners.New(r, b.opts.Blocks, b.opts.Ports, int(min(limit.Cur, 1<<24)/2))
		for _, f := range b.families {
			f.sockets = b.ports
		}
	}
	if b.settled || b.routes != nil {
		return nil
	}
	if _, err := route.Settle(ctx, b.host.routing, b.steering()); err != nil {
		return fmt.Errorf("route the relay's packets to this host: %w", err)
	}
	b.settled = true
	return nil
}

// steering are the routes and rules that there have to be.
func (b *backend) steering() []route.Entry {
	return steering.Entries(b.env.Families, b.opts.Blocks.Of, 1<<b.opts.RouteBit, b.env.Mark())
}

// choose decides how packets come to the relay.
func (b *backend) choose(ctx context.Context) {
	how := b.opts.Interception
	if how == "" {
		how = ByTables
		for _, f := range b.env.Families {
			if err := supports(ctx, f, b.host.tables); err != nil {
				b.env.Log.Warn("listening on the Services' own addresses, which is less than nf_tables could do: see the mode's documentation", "why", err)
				how = ByRoutes
				break
			}
		}
	}
	if how == ByTables {
		return
	}
	b.routes = &routes{backend: b, services: map[plan.ID]*routed{}, vips: map[netip.Addr]int{}}
	b.opts.Relay.Mark = 0
	// Tables of an earlier run would lead packets elsewhere.
	if err := removeTables(ctx, b.env, b.host.tables); err != nil {
		b.env.Log.Warn("tables of an earlier run could not be removed", "err", err)
	}
}

// Report implements dataplane.Reporter.
func (b *backend) Report() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.routes != nil:
		return []string{fmt.Sprintf("connections come in by routes of %d Service addresses to this host", len(b.routes.vips))}
	case b.ports == nil:
		return nil
	}
	open, most := b.ports.Open()
	return []string{
		fmt.Sprintf("connections come in by nftables maps to %s and %s", b.opts.Blocks.V4, b.opts.Blocks.V6),
		fmt.Sprintf("listening sockets: %d of at most %d", open, most),
	}
}

// takeOver tells the predecessor, if there is one, that everything is served here.
func (b *backend) takeOver() {
	if b.inherited {
		if err := b.relay.Succeed(); err != nil {
			b.env.Log.Warn("the predecessor does not say that it has stopped accepting; both may serve", "err", err)
		} else {
			b.env.Log.Info("took over the predecessor's listening sockets")
		}
		b.inherited = false
	}
	select {
	case <-b.serving:
	default:
		close(b.serving)
	}
}

// Serve implements dataplane.Server: it hands over to a successor when one asks, and when
// ctx ends it lets open connections go on for a while.
func (b *backend) Serve(ctx context.Context) error {
	select {
	case <-b.serving:
	case <-ctx.Done():
		return nil
	}
	given, retired := make(chan struct{}), make(chan struct{})
	retire := sync.OnceValue(func() error {
		defer close(retired)
		return b.retire()
	})
	offering, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	go b.relay.OfferUntil(offering, handoverPath, given, retire)
	select {
	case <-given:
		b.leave()
		b.env.Log.Info("a successor has taken over; this process serves open connections only")
		<-ctx.Done()
	case <-retired:
		b.env.Log.Info("another mode has taken over; this process serves open connections only")
		<-ctx.Done()
	case <-ctx.Done():
		select {
		case <-given:
			b.leave()
		case <-retired:
		case <-time.After(successorWait):
			b.standIn(context.WithoutCancel(ctx))
		}
	}
	<-time.After(lastArrivals)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.opts.DrainTimeout)
	defer cancel()
	b.env.Log.Info("draining", "atMost", b.opts.DrainTimeout)
	err := b.relay.Shutdown(end)
	select {
	case <-retired:
		b.clear(context.WithoutCancel(ctx))
	default:
	}
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("drain connections: %w", err)
	}
	return nil
}

// leave writes nothing more: all is a successor's.
func (b *backend) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone = true
}

// retire leads nothing to the relay any more, as another mode has taken over. What open
// connections need stays until clear.
func (b *backend) retire() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone = true
	var errs []error
	for _, f := range b.families {
		errs = append(errs, nft.Unhook(context.Background(), b.host.tables, tableOf(f.fam), "nat"))
	}
	return errors.Join(errs...)
}

// clear removes what is left after retire, unless a process has taken it over that
// came later.
func (b *backend) clear(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	there, err := inForce(ctx, b.host.tables)
	if err == nil && !there {
		err = cleanup(ctx, b.env, b.host)
	}
	if err != nil {
		b.env.Log.Warn("what open connections needed is left behind; svcproxy cleanup removes it", "err", err)
	}
}
