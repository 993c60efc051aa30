package nftables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// cleanup deletes our tables and kube-proxy's, whatever families are configured.
func cleanup(ctx context.Context, env dataplane.Env, t nft.Tables) error {
	return present(ctx, t, allTables, func(table nft.Table) error { return remove(ctx, env, t, table) })
}

// cleanupKubeProxy deletes kube-proxy's tables only.
func cleanupKubeProxy(ctx context.Context, env dataplane.Env, t nft.Tables) error {
	theirs := func(f plan.Family) []nft.Table { return []nft.Table{kubeProxyOf(f)} }
	return present(ctx, t, theirs, func(table nft.Table) error { return remove(ctx, env, t, table) })
}

// inForce reports whether there is a table of ours or of kube-proxy.
func inForce(ctx context.Context, t nft.Tables) (bool, error) {
	found := false
	err := present(ctx, t, allTables, func(nft.Table) error { found = true; return nil })
	return found, err
}

func allTables(f plan.Family) []nft.Table { return append(tablesOf(f), kubeProxyOf(f)) }

// present calls do for each table that exists. A kernel without nf_tables, or without
// one family, holds nothing.
func present(ctx context.Context, t nft.Tables, tables func(plan.Family) []nft.Table, do func(nft.Table) error) error {
	var errs []error
	for _, f := range plan.Families {
		for _, table := range tables(f) {
			exists, err := t.Exists(ctx, table)
			if lacks(err) {
				continue
			}
			if err == nil && exists {
				err = do(table)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("clean up table %s: %w", table, err))
			}
		}
	}
	return errors.Join(errs...)
}

func remove(ctx context.Context, env dataplane.Env, t nft.Tables, table nft.Table) error {
	err := t.Commit(ctx, []nft.Op{{Kind: nft.DeleteTable, Table: table}})
	if errors.Is(err, nft.ErrNotExist) {
		return nil // somebody was faster
	}
	if err == nil {
		env.Log.Info("removed an nftables table", "table", table)
	}
	return err
}

// lacks reports whether an error says that the kernel has no nf_tables, or not for
// the family.
func lacks(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EINVAL)
}
