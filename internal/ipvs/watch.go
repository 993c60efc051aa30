package ipvs

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/hostfilter"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// ip_vs tells nobody of changes, so that it is listed from time to time: after
// comparePause, and no sooner than compareShare times what the last listing took, but
// after longestPause in any case.
const (
	comparePause = 5 * time.Second
	compareShare = 50
	longestPause = time.Minute
)

// Watch implements dataplane.Watcher: the kernel tells of changes to our table, of
// addresses that go and of routes that go; virtual servers are compared.
func (b *backend) Watch(ctx context.Context, disturbed func(what string)) error {
	return b.watch(ctx, make([]chan struct{}, 4), disturbed)
}

// watch closes each of ready, which are made here if nil, once nothing goes unnoticed.
func (b *backend) watch(ctx context.Context, ready []chan struct{}, disturbed func(what string)) error {
	for i := range ready {
		if ready[i] == nil {
			ready[i] = make(chan struct{})
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	watchers := []func() error{
		func() error {
			return b.k.tables.Watch(ctx, table.IsOurs, ready[0], func(e nft.Event) { disturbed(e.What) })
		},
		func() error { return b.k.device.Watch(ctx, ready[1], disturbed) },
		func() error { return b.k.routing.Watch(ctx, ready[2], disturbed) },
		func() error { return b.compareServers(ctx, disturbed) },
	}
	if b.k.host != nil {
		keeper := hostfilter.Keeper{Tables: b.k.tables, Host: b.k.host, Families: b.env.Families, Mark: b.env.Mark(), Log: b.env.Log}
		watchers = append(watchers, func() error { return keeper.Run(ctx, ready[3]) })
	}
	ended := make(chan error, len(watchers))
	for _, w := range watchers {
		wg.Go(func() {
			ended <- w()
			cancel() // one that ends ends all
		})
	}
	wg.Wait()
	close(ended)
	var errs []error
	for err := range ended {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// compareServers lists the virtual servers now and then and reports what is not as it
// was left.
func (b *backend) compareServers(ctx context.Context, disturbed func(what string)) error {
	pause := comparePause
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		what, took, err := b.findChange(ctx)
		if err != nil {
			return fmt.Errorf("compare the virtual servers: %w", err)
		}
		if what != "" {
			disturbed(what)
		}
		pause = min(max(comparePause, compareShare*took), longestPause)
	}
}

// findChange says what of our virtual servers others changed; "" if nothing, or if an
// Apply came in between or the kernel is to be read back anyway. Took is the listing's time.
func (b *backend) findChange(ctx context.Context) (what string, took time.Duration, err error) {
	before, ok := b.settled()
	if !ok {
		return "", 0, nil
	}
	start := b.k.now()
	all, err := b.k.servers.Dump(ctx)
	took = b.k.now().Sub(start)
	if ctx.Err() != nil || errors.Is(err, ipvs.ErrMissing) {
		return "", took, nil
	}
	if err != nil {
		return "", took, err
	}
	at := make(map[ipvs.Key]ipvs.Entry, len(all))
	for _, e := range all {
		at[e.Key] = e
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.applies != before {
		return "", took, nil
	}
	for _, f := range b.families {
		if !f.known || !f.caughtUp {
			return "", took, nil
		}
		if what := f.changed(at); what != "" {
			return what, took, nil
		}
	}
	return "", took, nil
}

// settled returns how many Applies there were, if the kernel is known.
func (b *backend) settled() (applies int, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.families {
		if !f.known || !f.caughtUp {
			return 0, false
		}
	}
	return b.applies, true
}

// changed says what of the family's virtual servers is not as it was left.
func (f *family) changed(at map[ipvs.Key]ipvs.Entry) string {
	for _, k := range f.leftToOthers() {
		if _, there := at[k]; !there {
			return fmt.Sprintf("virtual server %s, which others had, was deleted", k)
		}
	}
	reals := 0
	for k, v := range f.servers.All() {
		e, there := at[k]
		switch {
		case !there:
			return fmt.Sprintf("virtual server %s was deleted", k)
		case e.VirtualServer != v:
			return fmt.Sprintf("virtual server %s was changed: %s", k, e.VirtualServer)
		}
		for _, r := range e.Real {
			have, known := f.reals.Exists(realKey{k, r.Addr})
			if !known || have != (real{r.Weight, r.Forwarding}) {
				return fmt.Sprintf("real server %s of virtual server %s was changed", r.Addr, k)
			}
		}
		reals += len(e.Real)
	}
	total := 0
	for range f.reals.All() {
		total++
	}
	if reals != total {
		return fmt.Sprintf("real servers of %s virtual servers were deleted", f.fam)
	}
	return ""
}
