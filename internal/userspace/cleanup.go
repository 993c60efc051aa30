package userspace

import (
	"context"
	"errors"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/handover"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// handOver has a process that still carries connections take nothing new any more, and
// clean up when they have ended. Without one it cleans up.
func handOver(ctx context.Context, env dataplane.Env) error {
	there, err := handover.Retire(ctx, handoverPath)
	if there {
		return nil
	}
	return errors.Join(err, cleanUp(ctx, env))
}

// cleanUp is cleanup on the kernel.
func cleanUp(ctx context.Context, env dataplane.Env) error {
	k := &kernel.Tables{}
	return errors.Join(cleanup(ctx, env, host{k, route.Kernel{}, nil}), k.Close())
}

// cleanup deletes our tables, routes and rules, whatever families are configured. A
// kernel without nf_tables, or without one family, holds nothing of it.
func cleanup(ctx context.Context, env dataplane.Env, h host) error {
	err := removeTables(ctx, env, h.tables)
	gone, routeErr := route.Settle(ctx, h.routing, nil)
	if len(gone) > 0 {
		env.Log.Info("removed routes and routing rules", "changes", gone)
	}
	return errors.Join(err, routeErr)
}

// removeTables deletes our tables.
func removeTables(ctx context.Context, env dataplane.Env, t nft.Tables) error {
	var errs []error
	for _, f := range plan.Families {
		removed, err := nft.Remove(ctx, t, tableOf(f))
		if removed {
			env.Log.Info("removed an nftables table", "table", tableOf(f))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// inForce reports whether a table of ours translates new flows.
func inForce(ctx context.Context, t nft.Tables) (bool, error) {
	var errs []error
	for _, f := range plan.Families {
		hooked, err := nft.BaseChains(ctx, t, tableOf(f), "nat")
		if len(hooked) > 0 {
			return true, nil
		}
		errs = append(errs, err)
	}
	return false, errors.Join(errs...)
}
