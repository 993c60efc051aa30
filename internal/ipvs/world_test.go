package ipvs

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

func testEnv(families ...plan.Family) dataplane.Env {
	return dataplane.Env{Log: slog.New(slog.DiscardHandler), Stats: &plantest.Counts{}, Families: families, MasqueradeBit: 14}
}

func mustApply(t testing.TB, b *backend, u plan.Update) {
	t.Helper()
	if err := b.Apply(context.Background(), u); err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

// rig is a kernel in memory.
type rig struct {
	tables  *fake.Tables
	servers *ipvs.Fake
	device  *host.FakeDevice
	routing *route.Fake
	sysctls *host.Fake
	clock   time.Time
}

func newRig() *rig {
	return &rig{
		tables: &fake.Tables{}, servers: &ipvs.Fake{}, device: &host.FakeDevice{}, routing: &route.Fake{},
		clock: time.Unix(1_700_000_000, 0),
		sysctls: &host.Fake{Values: map[string]string{
			"kernel.osrelease": "6.1.0-44-amd64", "net.ipv4.ip_forward": "0", "net.ipv4.vs.conntrack": "0", "net.ipv4.vs.conn_reuse_mode": "1",
			"net.ipv4.vs.expire_nodest_conn": "0", "net.ipv4.vs.expire_quiescent_template": "0",
			"net.ipv4.conf.all.arp_ignore": "0", "net.ipv4.conf.all.arp_announce": "0",
		}},
	}
}

func (r *rig) kernel() kernel {
	return kernel{tables: r.tables, servers: r.servers, device: r.device, routing: r.routing, sysctls: r.sysctls, now: func() time.Time { return r.clock }}
}

func (r *rig) backend(o Options, families ...plan.Family) *backend {
	return newBackend(testEnv(families...), o, r.kernel())
}

// settle lets time pass until nothing drains.
func (r *rig) settle(t testing.TB, b *backend, p *plan.Plan) {
	t.Helper()
	for range 100 {
		at := b.Due()
		if at.IsZero() {
			return
		}
		r.clock = at
		mustApply(t, b, plan.Update{Plan: p})
	}
	t.Fatal("something drains for ever")
}

// state lists everything.
func (r *rig) state(t testing.TB) string {
	t.Helper()
	var b strings.Builder
	b.WriteString(r.tables.String())
	b.WriteString(r.servers.String())
	addrs, err := r.device.Addrs()
	fmt.Fprintln(&b, "device", addrs, err)
	entries, err := r.routing.List(context.Background())
	slices.SortFunc(entries, func(a, b route.Entry) int { return strings.Compare(a.String(), b.String()) })
	fmt.Fprintln(&b, "routing", entries, err)
	return b.String()
}
