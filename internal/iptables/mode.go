// Package iptables carries out a plan with the kernel's packet filter as the
// iptables programs present it: chains per Service port and per endpoint in the nat
// table, refusals in the filter table, under the names that kube-proxy uses. See
// README.md for a packet's path.
//
// [desired] renders and remembers sums, [family] writes what differs with
// iptables-restore. Loopback node ports (127.0.0.1, ::1) are not served here.
package iptables

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// Name is the mode's name in kube-proxy's configuration.
const Name = "iptables"

// Mode returns the mode.
func Mode() dataplane.Mode {
	return dataplane.Mode{
		Name:      Name,
		Supported: func(ctx context.Context) error { return Supports(ctx, plan.IPv4) },
		New: func(env dataplane.Env) (dataplane.Backend, error) {
			return newBackend(env, hostTables(env)), nil
		},
		Cleanup:          func(ctx context.Context, env dataplane.Env) error { return cleanup(ctx, env, hostStores(env), false) },
		InForce:          func(ctx context.Context, env dataplane.Env) (bool, error) { return inForce(ctx, hostStores(env)) },
		CleanupKubeProxy: func(ctx context.Context, env dataplane.Env) error { return cleanup(ctx, env, hostStores(env), true) },
	}
}

// Supports returns nil if this host can carry out the mode for a family; else what
// is missing, and the remedy. For IPv6 that may be IPv6 itself or its nat table.
func Supports(ctx context.Context, f plan.Family) error {
	_, err := sys.NewFinder(ours, nil).Find(ctx, sys.Family(f))
	if err != nil {
		return fmt.Errorf("iptables for %s: %w", f, err)
	}
	return nil
}

// locate finds the tables of a family: those to use, and of the other store, nil if
// there is none.
type locate func(ctx context.Context, f plan.Family) (use, other sys.Tables, err error)

func finder(env dataplane.Env, f plan.Family) *sys.Finder {
	return sys.NewFinder(ours, func(d time.Duration) {
		env.Stats.Observe("svcproxy_iptables_lock_wait_seconds", d.Seconds(), f.String())
	})
}

func hostTables(env dataplane.Env) locate {
	return func(ctx context.Context, f plan.Family) (sys.Tables, sys.Tables, error) {
		c, err := finder(env, f).Find(ctx, sys.Family(f))
		if err != nil {
			return nil, nil, err
		}
		env.Log.Info("iptables rules are kept in one of the kernel's two stores",
			"family", f, "store", c.Use.Store(), "program", c.Use, "because", c.Why)
		return c.Use, c.Other, nil
	}
}

// backend is the mode at work.
type backend struct {
	env    dataplane.Env
	locate locate

	located chan struct{} // closed once families is filled, which then stays
	vigil   *sys.Vigil

	mu       sync.Mutex // guards what follows
	families []*family
	others   []sys.Tables // of the store not used; ours there is removed once
}

func newBackend(env dataplane.Env, l locate) *backend {
	return &backend{env: env, locate: l, located: make(chan struct{}), vigil: sys.NewVigil()}
}

// Apply implements dataplane.Backend.
func (b *backend) Apply(ctx context.Context, u plan.Update) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.find(ctx); err != nil {
		return err
	}
	b.vigil.Await(ctx)
	var errs []error
	for _, f := range b.families {
		errs = append(errs, f.apply(ctx, u))
	}
	err := errors.Join(errs...)
	if err != nil || u.Partial {
		return err
	}
	return b.leaveOthers(ctx)
}

// find fills families on the first call that succeeds.
func (b *backend) find(ctx context.Context) error {
	if b.families != nil {
		return nil
	}
	var families []*family
	var others []sys.Tables
	for _, fam := range b.env.Families {
		use, other, err := b.locate(ctx, fam)
		if err != nil {
			return fmt.Errorf("find iptables for %s: %w", fam, err)
		}
		families = append(families, newFamily(b.env, fam, use))
		if other != nil {
			others = append(others, other)
		}
	}
	b.families, b.others = families, others
	close(b.located)
	return nil
}

func newFamily(env dataplane.Env, f plan.Family, t sys.Tables) *family {
	return &family{desired: newDesired(f, env.Mark(), env.BeLiberal), env: env, tables: t}
}

// leaveOthers removes what an earlier run, or a kube-proxy, left in the store that
// is not used: it would translate packets by old rules.
func (b *backend) leaveOthers(ctx context.Context) error {
	for len(b.others) > 0 {
		t := b.others[0]
		n, err := removeAll(ctx, t, false)
		if err != nil {
			return fmt.Errorf("remove leftovers from the %s store: %w", t.Store(), err)
		}
		if n > 0 {
			b.env.Log.Info("removed leftovers from the store that is not used", "store", t.Store(), "family", t.Family(), "chains", n)
		}
		b.others = b.others[1:]
	}
	return nil
}

// Invalidate implements dataplane.Backend.
func (b *backend) Invalidate() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.families {
		f.forget()
	}
}
