package app

import (
	"log/slog"
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/probe"
)

// newProber returns what checks the health of endpoints. Its results are facts like
// others: they go to state, and from there into the next plan.
func newProber(c *config.Config, state *cluster.State, stats dataplane.Stats, notes func([]plan.Note), log *slog.Logger) *probe.Prober {
	return probe.New(probe.Config{
		PerSecond: c.HealthCheck.ProbesPerSecond,
		Report: func(service plan.Name, endpoint netip.AddrPort, failing bool) {
			state.SetFailing(cluster.Name(service), endpoint, failing)
		},
		Stats: stats, Notes: notes, Log: log,
	})
}
