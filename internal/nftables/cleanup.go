package nftables

import (
	"context"
	"errors"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

// remover removes tables from the kernel.
func remover(tables func(plan.Family) []nft.Table) func(context.Context, dataplane.Env) error {
	return func(ctx context.Context, env dataplane.Env) error {
		k := &kernel.Tables{}
		return errors.Join(owned.Remove(ctx, env.Log, k, tables), k.Close())
	}
}

func kubeProxyTables(f plan.Family) []nft.Table { return []nft.Table{owned.KubeProxy(f)} }
