package ipvs

import (
	"context"
	"errors"
	"fmt"

	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Supports returns nil if this host can carry out the mode for a family; else what is
// missing, and the remedy. Kernel modules are loaded if need be.
func Supports(ctx context.Context, f plan.Family) error {
	k := newKernel()
	return errors.Join(supports(ctx, f, k), k.close())
}

func supports(ctx context.Context, f plan.Family, k kernel) error {
	if err := k.servers.Probe(ctx, table.ServerFamilyOf(f), scheduler.Default); err != nil {
		return fmt.Errorf("ipvs for %s: %w", f, err)
	}
	s := table.Settings{Family: f, Bit: 14, Local: plan.LocalTraffic{Kind: plan.LocalPrefix}}
	t, all := table.Probe(f), s.Needs()
	// The parts are tried one by one only to name the one that is missing.
	if nft.Probe(ctx, k.tables, t, all[len(all)-1:]) == nil {
		return nil
	}
	if err := nft.Probe(ctx, k.tables, t, all); err != nil {
		return fmt.Errorf("nftables for %s: %w", f, err)
	}
	return nil
}

// limits says which schedulers the kernel lacks.
func limits(ctx context.Context, k kernel) []string {
	var out []string
	for _, s := range scheduler.Missing(ctx, k.servers) {
		out = append(out, fmt.Sprintf("no scheduler %s, for which %s is used: install or load the kernel module ip_vs_%[1]s", s, scheduler.Default))
	}
	return out
}
