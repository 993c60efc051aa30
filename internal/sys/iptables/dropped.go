package iptables

import (
	"context"
	"time"
)

// DropCounter is Tables that know how many packets a chain has dropped.
type DropCounter interface {
	// Dropped returns how many since the chain was last written.
	Dropped(ctx context.Context, chain string) (uint64, error)
}

// FollowDropped calls add with how many packets the chain has dropped since the last
// call, every so often until ctx ends. A chain that is not there has dropped none.
func FollowDropped(ctx context.Context, c DropCounter, chain string, every time.Duration, add func(n uint64)) error {
	var last uint64
	for {
		if n, err := c.Dropped(ctx, chain); err == nil {
			if n < last {
				last = 0 // it was written anew
			}
			add(n - last)
			last = n
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(every):
		}
	}
}
