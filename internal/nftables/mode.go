// Package nftables carries out a plan with nf_tables: a handful of chains, one more
// for each number of endpoints and way to treat packets, and maps whose elements are
// the Services and their endpoints. See README.md for a packet's path.
//
// [settings.render] says what one Service port needs, [family.diff] what is to be
// written for it to change, [family] writes. The kernel is spoken to by netlink;
// the program nft is not needed. Loopback node ports are not served here.
package nftables

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

// Name is the mode's name in kube-proxy's configuration.
const Name = "nftables"

// Mode returns the mode.
func Mode() dataplane.Mode {
	return dataplane.Mode{
		Name:      Name,
		Supported: func(ctx context.Context) error { return Supports(ctx, plan.IPv4) },
		New: func(env dataplane.Env) (dataplane.Backend, error) {
			return newBackend(env, &kernel.Tables{}), nil
		},
		Cleanup:          remover(owned.All),
		CleanupOwn:       remover(owned.Tables),
		CleanupKubeProxy: remover(kubeProxyTables),
		InForce: func(ctx context.Context, _ dataplane.Env) (bool, error) {
			k := &kernel.Tables{}
			found, err := owned.InForce(ctx, k)
			return found, errors.Join(err, k.Close())
		},
	}
}

// backend is the mode at work.
type backend struct {
	env    dataplane.Env
	tables nft.Tables

	mu       sync.Mutex // guards families
	families []*family
	begun    bool
	others   uint32        // nft.Tables.Others when the first Apply began
	tried    bool          // a whole plan
	complete chan struct{} // closed when tried

	told    sync.Mutex // guards foreign
	foreign []nft.Event
}

func newBackend(env dataplane.Env, t nft.Tables) *backend {
	b := &backend{env: env, tables: t, complete: make(chan struct{})}
	for _, f := range env.Families {
		b.families = append(b.families, newFamily(env, f, t))
	}
	return b
}

// Apply implements dataplane.Backend.
func (b *backend) Apply(ctx context.Context, u plan.Update) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	if !b.begun {
		var err error
		if b.others, err = b.tables.Others(ctx); err != nil {
			return err
		}
		b.begun = true
	}
	for _, f := range b.families {
		errs = append(errs, f.apply(ctx, u))
	}
	if !u.Partial && !b.tried {
		b.tried = true
		close(b.complete)
	}
	return errors.Join(errs...)
}

// Invalidate implements dataplane.Backend. If it is because of what others did and
// that is known exactly, only that is looked at.
func (b *backend) Invalidate() {
	b.told.Lock()
	foreign := b.foreign
	b.foreign = nil
	b.told.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.families {
		if len(foreign) == 0 {
			f.forget()
		}
		for i := range foreign {
			f.suspect(&foreign[i])
		}
	}
}

// Due implements dataplane.Timed: objects that could not be deleted are tried again.
func (b *backend) Due() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	var first time.Time
	for _, f := range b.families {
		if first.IsZero() || !f.tidyAt.IsZero() && f.tidyAt.Before(first) {
			first = f.tidyAt
		}
	}
	return first
}
