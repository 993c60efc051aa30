package nftables

import (
	"context"
	"sync"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Watch implements dataplane.Watcher: the kernel tells of every commit that is not
// ours. Clients that the kernel remembers or forgets by itself are no commits.
//
// It begins once everything is written: as long as somebody listens, the kernel makes a
// message of every element, which is a third of its work for a large cluster. What others
// did until then is seen by the number of commits.
func (b *backend) Watch(ctx context.Context, disturbed func(what string)) error {
	select {
	case <-b.complete:
	case <-ctx.Done():
		return ctx.Err()
	}
	return b.watch(ctx, make(chan struct{}), disturbed)
}

// watch closes ready once nothing goes unnoticed.
func (b *backend) watch(ctx context.Context, ready chan<- struct{}, disturbed func(what string)) error {
	var mu sync.Mutex // guards first
	first := ""
	event := func(e nft.Event) {
		mu.Lock()
		defer mu.Unlock()
		b.tell(e)
		if first == "" {
			first = e.What
		} else if !e.More {
			first += "; and more"
		}
		if !e.More { // one repair for one commit
			disturbed(first)
			first = ""
		}
	}
	looks := make(chan struct{})
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-looks:
			if b.missed(ctx) {
				event(nft.Event{What: "nf_tables were changed before they were watched"})
			}
			close(ready)
		case <-ctx.Done():
		}
	}()
	return b.tables.Watch(ctx, owned.Is, looks, event)
}

// missed reports whether others have changed anything since our first look.
func (b *backend) missed(ctx context.Context) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.begun {
		return false
	}
	before := b.others
	var err error
	b.others, err = b.tables.Others(ctx)
	return ctx.Err() == nil && (err != nil || b.others != before)
}

// mostForeign bounds what is remembered of others' changes until they are repaired.
const mostForeign = 1000

// tell keeps an event until Invalidate. Too many are as good as none that is known.
func (b *backend) tell(e nft.Event) {
	b.told.Lock()
	defer b.told.Unlock()
	if len(b.foreign) < mostForeign {
		b.foreign = append(b.foreign, e)
		return
	}
	b.foreign = append(b.foreign[:mostForeign], nft.Event{What: "more"})
}
