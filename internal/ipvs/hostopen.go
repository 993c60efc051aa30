package ipvs

import (
	"context"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/hostfilter"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Of a legacy table nobody is told: whether it came is looked up every hostPause, and
// whether it is still as it should be every hostRecheck.
const (
	hostPause   = 2 * time.Second
	hostRecheck = time.Minute
)

// keepHostOpen lets Service traffic through the host's filter, now and whenever that
// changes, until ctx ends.
func (b *backend) keepHostOpen(ctx context.Context, ready chan struct{}) error {
	changed := make(chan struct{}, 1)
	watched := make(chan error, 1)
	isFilter := func(t nft.Table) bool { return t == hostfilter.Table(plan.IPv4) || t == hostfilter.Table(plan.IPv6) }
	go func() {
		watched <- b.k.tables.Watch(ctx, isFilter, ready, func(nft.Event) {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	}()
	tick := time.NewTicker(hostPause)
	defer tick.Stop()
	had, looked, said := b.hostHasLegacy(), time.Now(), ""
	stale := false // it changed since it was looked at
	for due := true; ; {
		if due {
			looked, stale = time.Now(), false
			b.openHosts(ctx, &said)
		}
		select {
		case err := <-watched:
			return err
		case <-changed:
			stale = true
			due = time.Since(looked) >= hostPause // our own writes are changes too
		case <-tick.C:
			has := b.hostHasLegacy()
			due = stale || has && (!had || time.Since(looked) >= hostRecheck)
			had = has
		}
	}
}

// openHosts opens the filters of all families; said is the warning that was logged last.
func (b *backend) openHosts(ctx context.Context, said *string) {
	for _, f := range b.env.Families {
		if err := hostfilter.Open(ctx, b.k.host(f), b.env.Mark()); err != nil && ctx.Err() == nil && err.Error() != *said {
			*said = err.Error()
			b.env.Log.Warn("the host's packet filter may keep Service traffic out", "family", f, "error", err)
		}
	}
}

func (b *backend) hostHasLegacy() bool {
	for _, f := range b.env.Families {
		if b.k.host(f).Legacy() {
			return true
		}
	}
	return false
}
