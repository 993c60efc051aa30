package iptables

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

const (
	// verifyPause is the least time between two looks at the kernel's rules; a
	// look that took long is followed by a pause of verifyShare times that.
	verifyPause = time.Second
	verifyShare = 10
	// mostVerified is how many chains are looked at to confirm what the nft store
	// told precisely already; reading more takes iptables minutes.
	mostVerified = 5000
	// countEvery is the time between two looks at what was dropped as INVALID.
	countEvery = 30 * time.Second
)

// Watch implements dataplane.Watcher.
func (b *backend) Watch(ctx context.Context, disturbed func(what string)) error {
	b.vigil.Begin()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-b.located:
	}
	families := b.families // Apply has the lock, and may wait for us
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	ended := make(chan error, 3*len(families))
	run := func(f func() error) {
		wg.Go(func() {
			ended <- f()
			cancel() // one that ends ends all
		})
	}
	b.vigil.Expect(len(families))
	for _, f := range families {
		suspects := make(chan string, 1)
		suspect := func(what string) {
			select {
			case suspects <- what:
			default: // one is enough
			}
		}
		run(func() error {
			return f.tables.Watch(ctx, anyOurs, func() {
				if b.vigil.Ready() {
					suspect("rules were read before changes by others could be seen")
				}
			}, suspect)
		})
		run(func() error { return b.confirm(ctx, f, suspects, disturbed) })
		run(func() error { return f.countDropped(ctx) })
	}
	wg.Wait()
	close(ended)
	var errs []error
	for err := range ended {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// countDropped adds up the packets dropped as INVALID until ctx ends.
func (f *family) countDropped(ctx context.Context) error {
	c, ok := f.tables.(sys.DropCounter)
	if !ok || f.liberal {
		<-ctx.Done()
		return ctx.Err()
	}
	return sys.FollowDropped(ctx, c, chainInvalid, countEvery, func(n uint64) {
		f.env.Stats.Add("iptables_ct_state_invalid_dropped_packets_total", float64(n))
	})
}

// anyOurs reports whether a chain is ours in any table that is written.
func anyOurs(chain string) bool { return ours(sys.NAT, chain) || ours(sys.Filter, chain) }

// confirm looks at the kernel for each suspicion and hands on what is true.
func (b *backend) confirm(ctx context.Context, f *family, suspects <-chan string, disturbed func(string)) error {
	for {
		var what string
		select {
		case <-ctx.Done():
			return ctx.Err()
		case what = <-suspects:
		}
		start := time.Now()
		found, err := b.look(ctx, f, what)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			disturbed(fmt.Sprintf("%s; looking at it failed: %v", what, err))
		case found != "":
			disturbed(found)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(verifyPause, verifyShare*time.Since(start))):
		}
	}
}

// look returns what differs from what was last written; "" if nothing does, or if
// the kernel is to be read back anyway.
func (b *backend) look(ctx context.Context, f *family, what string) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !f.known || f.r == nil {
		return "", nil
	}
	if f.tables.Store() == sys.NFT && f.track.Len() > mostVerified {
		return what, nil
	}
	return f.verify(ctx)
}
