package app

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/loopback"
	"github.com/svcproxy/svcproxy/internal/metrics"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
)

type relayed map[plan.ID]*relay.Service

func (r relayed) Services() map[plan.ID]*relay.Service { return r }

// However many Services are used, the series are bounded, and it is said how many are
// left out.
func TestRelayedMetricsAreBounded(t *testing.T) {
	const more = 7
	r := relay.New(relay.Options{})
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Shutdown(context.Background()) })
	services := relayed{}
	var all []*relay.Service
	for i := range mostRelayed + more {
		id := plan.ID{Namespace: "default", Name: fmt.Sprintf("s%03d", i), Port: "http", Protocol: plan.TCP, Family: plan.IPv4}
		services[id] = r.NewService(id.String())
		all = append(all, services[id])
	}
	next := -1
	ln, err := r.Listen(relay.ListenConfig{
		Protocol: plan.TCP, Addr: netip.MustParseAddrPort("127.0.0.1:0"),
		Router: func(relay.Flow) (*relay.Service, plan.Route) {
			next++
			return all[next], plan.Route{Verdict: plan.Reject}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{metrics: metrics.New("userspace", metrics.Build{}, slog.New(slog.DiscardHandler)), loopback: loopback.New(loopback.Config{})}
	p.collectRelayed(services)
	page := func() string {
		w := httptest.NewRecorder()
		p.metrics.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		return w.Body.String()
	}
	if strings.Contains(page(), "svcproxy_relay_connections{") {
		t.Error("Services without traffic have series")
	}
	for range all {
		if c, err := net.Dial("tcp4", ln.Addr().String()); err == nil { // else it was reset at once
			_, _ = c.Read(make([]byte, 1)) // until it is reset
			c.Close()
		}
	}
	have := page()
	if n := strings.Count(have, "svcproxy_relay_connections{"); n != mostRelayed {
		t.Errorf("%d Service ports have series, want %d", n, mostRelayed)
	}
	if want := fmt.Sprintf("svcproxy_relay_services_not_shown %d\n", more); !strings.Contains(have, want) {
		t.Errorf("no %q", want)
	}
	if !strings.Contains(have, `svcproxy_relay_failures_total{ip_family="IPv4",protocol="TCP",reason="no-endpoint",service="default/s000:http",via="service"} 1`) {
		t.Error("the reason of a failure is not counted")
	}
}
