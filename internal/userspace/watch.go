package userspace

import (
	"context"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Watch implements dataplane.Watcher: the kernel tells of every commit to our tables
// that is not ours, and of every route and rule of ours that is deleted.
func (b *backend) Watch(ctx context.Context, disturbed func(what string)) error {
	return b.watch(ctx, make(chan struct{}), make(chan struct{}), disturbed)
}

// watch closes the channels once nothing goes unnoticed in tables and in the routing.
func (b *backend) watch(ctx context.Context, tables, routes chan<- struct{}, disturbed func(what string)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 2)
	go func() {
		err := b.host.tables.Watch(ctx, ours, tables, func(e nft.Event) { b.notice(e.What, disturbed) })
		if b.byRoutes() { // there may be no tables to watch, and none are needed
			<-ctx.Done()
		}
		ended <- err
	}()
	go func() {
		ended <- b.host.routing.Watch(ctx, routes, func(what string) { b.notice(what, disturbed) })
	}()
	err := <-ended
	cancel()
	if other := <-ended; err == nil { // it was told to end
		err = other
	}
	return err
}

func (b *backend) byRoutes() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.routes != nil
}

// notice passes on a change, unless it is a successor's.
func (b *backend) notice(what string, disturbed func(string)) {
	b.mu.Lock()
	gone := b.gone
	b.mu.Unlock()
	if !gone {
		disturbed(what)
	}
}
