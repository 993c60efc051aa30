package hostfilter

import (
	"context"
	"log/slog"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Keeper keeps the filters of a host open.
type Keeper struct {
	Tables   nft.Tables // to be told of changes
	Host     func(plan.Family) Filter
	Families []plan.Family
	Mark     uint32 // of packets that are let in
	Log      *slog.Logger
}

// Of a legacy table nobody is told: whether it came is looked up every hostPause, and
// whether it is still as it should be every hostRecheck.
const (
	hostPause   = 2 * time.Second
	hostRecheck = time.Minute
)

// Run lets Service traffic through the host's filter, now and whenever that changes,
// until ctx ends. ready is closed once changes are noticed.
func (k Keeper) Run(ctx context.Context, ready chan<- struct{}) error {
	changed := make(chan struct{}, 1)
	watched := make(chan error, 1)
	isFilter := func(t nft.Table) bool { return t == Table(plan.IPv4) || t == Table(plan.IPv6) }
	go func() {
		watched <- k.Tables.Watch(ctx, isFilter, ready, func(nft.Event) {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	}()
	tick := time.NewTicker(hostPause)
	defer tick.Stop()
	had, looked, said := k.hasLegacy(), time.Now(), ""
	stale := false // it changed since it was looked at
	for due := true; ; {
		if due {
			looked, stale = time.Now(), false
			k.open(ctx, &said)
		}
		select {
		case err := <-watched:
			return err
		case <-changed:
			stale = true
			due = time.Since(looked) >= hostPause // our own writes are changes too
		case <-tick.C:
			has := k.hasLegacy()
			due = stale || has && (!had || time.Since(looked) >= hostRecheck)
			had = has
		}
	}
}

// open opens the filters of all families; said is the warning that was logged last.
func (k Keeper) open(ctx context.Context, said *string) {
	for _, f := range k.Families {
		if err := Open(ctx, k.Host(f), k.Mark); err != nil && ctx.Err() == nil && err.Error() != *said {
			*said = err.Error()
			k.Log.Warn("the host's packet filter may keep Service traffic out", "family", f, "error", err)
		}
	}
}

func (k Keeper) hasLegacy() bool {
	for _, f := range k.Families {
		if k.Host(f).Legacy() {
			return true
		}
	}
	return false
}
