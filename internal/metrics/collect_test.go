package metrics

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// What a source gives is served with the table's names; what it does not give any more
// is gone; what the table does not have is complained about.
func TestCollect(t *testing.T) {
	m := New("iptables", Build{}, slog.New(slog.DiscardHandler))
	labels := []string{"default/web:http", "TCP", "IPv4", "service"}
	open := true
	m.Collect(func(emit func(Reading)) {
		if open {
			emit(Reading{Metric: "svcproxy_relay_connections", Labels: labels, Value: 3})
		}
		emit(Reading{Metric: "svcproxy_relay_connections_total", Labels: labels, Value: 7})
		emit(Reading{Metric: "svcproxy_relay_connect_seconds", Labels: labels, Value: 0.5, Count: 2, Buckets: map[float64]uint64{0.1: 1, 1: 2}})
	})
	page := func() string {
		w := httptest.NewRecorder()
		m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		b, err := io.ReadAll(w.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	const at = `{ip_family="IPv4",protocol="TCP",service="default/web:http",via="service"`
	for _, want := range []string{
		"# TYPE svcproxy_relay_connections gauge", "svcproxy_relay_connections" + at + "} 3",
		"# TYPE svcproxy_relay_connections_total counter", "svcproxy_relay_connections_total" + at + "} 7",
		"# TYPE svcproxy_relay_connect_seconds histogram", "svcproxy_relay_connect_seconds_bucket" + at + `,le="0.1"} 1`,
		"svcproxy_relay_connect_seconds_sum" + at + "} 0.5",
	} {
		if !strings.Contains(page(), want) {
			t.Errorf("no %q in\n%s", want, page())
		}
	}
	open = false
	if strings.Contains(page(), "svcproxy_relay_connections{") {
		t.Error("what the source does not give any more is still there")
	}
	if w := m.Wrong(); len(w) > 0 {
		t.Error(w)
	}
	m.Collect(func(emit func(Reading)) { emit(Reading{Metric: "svcproxy_unheard_of", Value: 1}) })
	page()
	if w := m.Wrong(); len(w) != 1 || !strings.Contains(w[0], "svcproxy_unheard_of") {
		t.Errorf("complaints %q, want one", w)
	}
}
