package nftables

import (
	"context"

	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Watch implements dataplane.Watcher: the kernel tells of every commit that is not
// ours. Clients that the kernel remembers or forgets by itself are no commits.
func (b *backend) Watch(ctx context.Context, disturbed func(what string)) error {
	return b.watch(ctx, make(chan struct{}), disturbed)
}

// watch closes ready once nothing goes unnoticed.
func (b *backend) watch(ctx context.Context, ready chan<- struct{}, disturbed func(what string)) error {
	first := ""
	return b.tables.Watch(ctx, owned.Is, ready, func(e nft.Event) {
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
	})
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
