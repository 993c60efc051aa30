package relay

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// OfferUntil offers the listening sockets at path, as Offer does, until a successor
// has them or ctx ends. It closes given in the first case. A path that is in use, as
// by a predecessor that has not let go of it yet, is tried again.
func (r *Relay) OfferUntil(ctx context.Context, path string, given chan<- struct{}) {
	const pause = 200 * time.Millisecond
	for ctx.Err() == nil {
		err := r.Offer(ctx, path)
		if err == nil {
			close(given)
			return
		}
		if ctx.Err() == nil && !errors.Is(err, unix.EADDRINUSE) {
			r.opts.Log.Warn("no successor could take over the listening sockets now", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}
