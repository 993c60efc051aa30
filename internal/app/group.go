package app

import (
	"context"
	"sync"
)

// group runs functions side by side; the first error ends all.
type group struct {
	parent context.Context
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

func newGroup(ctx context.Context) *group {
	g := &group{parent: ctx}
	g.ctx, g.cancel = context.WithCancelCause(ctx)
	return g
}

func (g *group) run(f func(context.Context) error) {
	g.wg.Go(func() {
		if err := f(g.ctx); err != nil {
			g.cancel(err)
		}
	})
}

// endless makes what only ends with its context fit for run.
func endless(f func(context.Context)) func(context.Context) error {
	return func(ctx context.Context) error { f(ctx); return nil }
}

// wait returns the first error, nil if all ended because they were told to.
func (g *group) wait() error {
	g.wg.Wait()
	defer g.cancel(nil)
	if g.parent.Err() != nil {
		return nil
	}
	return context.Cause(g.ctx)
}
