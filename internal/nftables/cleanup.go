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

// cleanup deletes our tables and kube-proxy's, whatever families are configured. A
// kernel without nf_tables, or without one family, holds nothing.
func cleanup(ctx context.Context, env dataplane.Env, t nft.Tables) error {
	var errs []error
	for _, f := range plan.Families {
		for _, table := range append(tablesOf(f), kubeProxyOf(f)) {
			exists, err := t.Exists(ctx, table)
			if lacks(err) {
				continue
			}
			if err == nil && exists {
				err = t.Commit(ctx, []nft.Op{{Kind: nft.DeleteTable, Table: table}})
				if errors.Is(err, nft.ErrNotExist) {
					err = nil // somebody was faster
				} else if err == nil {
					env.Log.Info("removed an nftables table", "table", table)
				}
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("clean up table %s: %w", table, err))
			}
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
