package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// successorWait is how long a process that was told to end goes on accepting, so that
// a successor that just starts gets its sockets.
const successorWait = 2 * time.Second

// begin has everything run that Service ports need, and the host's routing as it
// should be.
func (b *backend) begin(ctx context.Context) error {
	if !b.begun {
		b.choose(ctx)
		in, err := relay.Inherit(ctx, handoverPath)
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
		b.relay, b.inherited, b.begun = r, in, true
		if b.routes != nil {
			return nil
		}
		b.ports = newPorts(r, b.opts.Blocks, b.opts.Ports, int(min(limit.Cur, 1<<24)/2))
		for _, f := range b.families {
			f.sockets = b.ports
		}
	}
	if b.settled || b.routes != nil {
		return nil
	}
	if _, err := route.Settle(ctx, b.host.routing, routing(b.env.Families, b.opts.Blocks, 1<<b.opts.RouteBit, b.env.Mark())); err != nil {
		return fmt.Errorf("route the relay's packets to this host: %w", err)
	}
	b.settled = true
	return nil
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
	return []string{
		fmt.Sprintf("connections come in by nftables maps to %s and %s", b.opts.Blocks.V4, b.opts.Blocks.V6),
		fmt.Sprintf("listening sockets: %d of at most %d", b.ports.open, b.ports.most),
	}
}

// takeOver tells the predecessor, if there is one, that everything is served here.
func (b *backend) takeOver() {
	if b.inherited != nil {
		if err := b.inherited.Done(); err != nil {
			b.env.Log.Warn("the predecessor does not say that it has stopped accepting; both may serve", "err", err)
		} else {
			b.env.Log.Info("took over the predecessor's listening sockets")
		}
		b.inherited = nil
	}
	select {
	case <-b.serving:
	default:
		close(b.serving)
	}
}

// Serve implements dataplane.Server: it gives the listening sockets to a successor
// when one asks, and when ctx ends it lets open connections go on for a while.
func (b *backend) Serve(ctx context.Context) error {
	select {
	case <-b.serving:
	case <-ctx.Done():
		return nil
	}
	given := make(chan struct{})
	offering, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	go b.relay.OfferUntil(offering, handoverPath, given)
	select {
	case <-given:
		b.leave()
		b.env.Log.Info("a successor has taken over; this process serves open connections only")
		<-ctx.Done()
	case <-ctx.Done():
		select {
		case <-given:
			b.leave()
		case <-time.After(successorWait):
			stop()
			b.pause()
		}
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.opts.DrainTimeout)
	defer cancel()
	b.env.Log.Info("draining", "atMost", b.opts.DrainTimeout)
	if err := b.relay.Shutdown(end); err != nil && !errors.Is(err, context.DeadlineExceeded) {
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

// pause has the kernel drop what would begin a flow, which clients try again after a
// second, in place of refusing it: the next process may be on its way. The first
// Apply of that one undoes it.
func (b *backend) pause() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone = true
	for _, f := range b.families {
		if !f.known || b.routes != nil {
			continue
		}
		rules := []*nft.Rule{f.settings.rule(f.settings.toOwn(), nft.Has{Field: nft.State, Bits: nft.StateNew}, nft.Do{Code: nft.Drop})}
		for _, now := range f.settings.chains() {
			if now.Name() == chainUnmarkIn {
				rules = append(rules, now.Rules()...)
			}
		}
		f.ctx, f.err, f.batch = context.Background(), nil, nil
		f.putChain(nft.NewHooked(chainUnmarkIn, "filter", nft.Input, priorityMark, rules...))
		if f.commit(); f.err != nil {
			b.env.Log.Warn("new connections are refused until the next start", "err", f.err)
		}
	}
}
