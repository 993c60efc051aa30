package userspace

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// cleanup deletes our tables, routes and rules, whatever families are configured. A
// kernel without nf_tables, or without one family, holds nothing of it.
func cleanup(ctx context.Context, env dataplane.Env, h host) error {
	err := present(ctx, h.tables, func(t nft.Table) error {
		err := h.tables.Commit(ctx, []nft.Op{{Kind: nft.DeleteTable, Table: t}})
		if errors.Is(err, nft.ErrNotExist) {
			return nil // somebody was faster
		}
		if err == nil {
			env.Log.Info("removed an nftables table", "table", t)
		}
		return err
	})
	gone, routeErr := route.Settle(ctx, h.routing, nil)
	if len(gone) > 0 {
		env.Log.Info("removed routes and routing rules", "changes", gone)
	}
	return errors.Join(err, routeErr)
}

// inForce reports whether there is a table of ours.
func inForce(ctx context.Context, t nft.Tables) (bool, error) {
	found := false
	err := present(ctx, t, func(nft.Table) error { found = true; return nil })
	return found, err
}

// present calls do for each of our tables that exists.
func present(ctx context.Context, t nft.Tables, do func(nft.Table) error) error {
	var errs []error
	for _, f := range plan.Families {
		exists, err := t.Exists(ctx, tableOf(f))
		if lacks(err) {
			continue
		}
		if err == nil && exists {
			err = do(tableOf(f))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("clean up table %s: %w", tableOf(f), err))
		}
	}
	return errors.Join(errs...)
}

// lacks reports whether an error says that the kernel has no nf_tables, or not for
// the family.
func lacks(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EINVAL)
}
