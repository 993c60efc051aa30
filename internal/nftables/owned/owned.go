// Package owned says which nf_tables tables are svcproxy's, and which are those of
// kube-proxy's own nftables mode, and removes them.
package owned

import (
	"context"
	"errors"
	"log/slog"

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
	var errs []error
	for _, f := range plan.Families {
		for _, table := range tables(f) {
			removed, err := nft.Remove(ctx, t, table)
			if removed {
				log.Info("removed an nftables table", "table", table)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// InForce reports whether there is a table of ours or of kube-proxy.
func InForce(ctx context.Context, t nft.Tables) (bool, error) {
	var errs []error
	for _, f := range plan.Families {
		for _, table := range All(f) {
			there, err := nft.Present(ctx, t, table)
			if there {
				return true, nil
			}
			errs = append(errs, err)
		}
	}
	return false, errors.Join(errs...)
}
