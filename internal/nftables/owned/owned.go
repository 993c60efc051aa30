// Package owned says which nf_tables tables are svcproxy's, and which are those of
// kube-proxy's own nftables mode, and removes them.
package owned

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

const (
	// Name is our table of each family. While a layout is replaced by another the
	// new one is built under the other name.
	Name      = "svcproxy"
	OtherName = "svcproxy-b"
	// KubeProxyName is the table of kube-proxy's own nftables mode.
	KubeProxyName = "kube-proxy"
)

// Tables are the tables that may be replaced and removed.
func Tables(f plan.Family) []nft.Table {
	return []nft.Table{{Family: Family(f), Name: Name}, {Family: Family(f), Name: OtherName}}
}

// KubeProxy is kube-proxy's table.
func KubeProxy(f plan.Family) nft.Table { return nft.Table{Family: Family(f), Name: KubeProxyName} }

// All are both.
func All(f plan.Family) []nft.Table { return append(Tables(f), KubeProxy(f)) }

// Family is the family of tables.
func Family(f plan.Family) nft.Family {
	if f == plan.IPv6 {
		return nft.IPv6
	}
	return nft.IPv4
}

// Is reports whether a table was made by svcproxy.
func Is(t nft.Table) bool { return t.Name == Name || t.Name == OtherName }

// Remove deletes those of the tables that exist, whatever families are configured.
func Remove(ctx context.Context, log *slog.Logger, t nft.Tables, tables func(plan.Family) []nft.Table) error {
	return present(ctx, t, tables, func(table nft.Table) error {
		err := t.Commit(ctx, []nft.Op{{Kind: nft.DeleteTable, Table: table}})
		if errors.Is(err, nft.ErrNotExist) {
			return nil // somebody was faster
		}
		if err == nil {
			log.Info("removed an nftables table", "table", table)
		}
		return err
	})
}

// InForce reports whether there is a table of ours or of kube-proxy.
func InForce(ctx context.Context, t nft.Tables) (bool, error) {
	found := false
	err := present(ctx, t, All, func(nft.Table) error { found = true; return nil })
	return found, err
}

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

// lacks reports whether an error says that the kernel has no nf_tables, or not for
// the family.
func lacks(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EINVAL)
}
