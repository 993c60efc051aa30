package metrics

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func scrape(t *testing.T, m *Metrics, accept string) string {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, r)
	if w.Code != 200 {
		t.Fatalf("answer %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// value returns a sample of the text format.
func value(text, sample string) string {
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		if v, ok := strings.CutPrefix(s.Text(), sample+" "); ok {
			return v
		}
	}
	return ""
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestKinds(t *testing.T) {
	m := New("iptables", Build{Version: "v1.2.3", Commit: "abc", Date: "2026-01-02"}, quiet())
	m.Add("sync_proxy_rules_service_changes_total", 2)
	m.Add("sync_proxy_rules_service_changes_total", 1)
	m.Set("sync_proxy_rules_no_local_endpoints_total", 7, "internal", "IPv4")
	m.Observe("sync_proxy_rules_duration_seconds", 0.003, "IPv4")
	m.Observe("network_programming_duration_seconds", 61, "IPv6")
	m.Add("svcproxy_interference_total", 3)
	m.Compute("svcproxy_view_age_seconds", func() float64 { return 12.5 })
	m.Add("iptables_ct_state_invalid_dropped_packets_total", 5)
	text := scrape(t, m, "text/plain")
	for sample, want := range map[string]string{
		`kubeproxy_sync_proxy_rules_service_changes_total`:                                                "3",
		`kubeproxy_sync_proxy_rules_endpoint_changes_total`:                                               "0",
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"}`: "7",
		`kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family="IPv4",le="0.002"}`:                 "0",
		`kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family="IPv4",le="0.004"}`:                 "1",
		`kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv6",le="60"}`:                 "0",
		`kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv6",le="65"}`:                 "1",
		`svcproxy_interference_total`:                               "3",
		`svcproxy_view_age_seconds`:                                 "12.5",
		`kubeproxy_iptables_ct_state_invalid_dropped_packets_total`: "5",
		`svcproxy_build_info{commit="abc",date="2026-01-02",go_version="` + goVersion(t, m) + `",mode="iptables",version="v1.2.3"}`: "1",
	} {
		if have := value(text, sample); have != want {
			t.Errorf("%s is %q, want %q", sample, have, want)
		}
	}
	for _, part := range []string{`kubernetes_build_info{`, `git_version="v1.2.3"`, `major="1"`, `minor="2"`, "go_goroutines ", "process_resident_memory_bytes "} {
		if !strings.Contains(text, part) {
			t.Errorf("no %s", part)
		}
	}
	if wrong := m.Wrong(); len(wrong) > 0 {
		t.Error(wrong)
	}
	if open := scrape(t, m, "application/openmetrics-text; version=1.0.0"); !strings.HasSuffix(open, "# EOF\n") {
		t.Error("no OpenMetrics on request")
	}
}

func goVersion(t *testing.T, m *Metrics) string {
	t.Helper()
	_, v, _ := strings.Cut(scrape(t, m, "text/plain"), `go_info{version="`)
	v, _, _ = strings.Cut(v, `"`)
	return v
}

func TestBucketsAreKubeProxys(t *testing.T) {
	if n, last := len(syncBuckets), syncBuckets[len(syncBuckets)-1]; n != 15 || last != 16.384 {
		t.Errorf("%d buckets to %v", n, last)
	}
	want := []float64{0.25, 0.5}
	for v := 1.0; v <= 300; {
		want = append(want, v)
		switch {
		case v < 60:
			v++
		case v < 115:
			v += 5
		case v < 120:
			v = 120
		default:
			v += 30
		}
	}
	if !slices.Equal(programmingBuckets, want) {
		t.Errorf("have %v, want %v", programmingBuckets, want)
	}
}

// Every wrong use is told once and hurts nobody.
func TestWrongUse(t *testing.T) {
	var log strings.Builder
	m := New("iptables", Build{}, slog.New(slog.NewTextHandler(&log, nil)))
	for range 3 {
		m.Add("no_such_total", 1)
		m.Set("sync_proxy_rules_duration_seconds", 1, "IPv4")
		m.Observe("svcproxy_interference_total", 1)
		m.Add("conntrack_reconciler_deleted_entries_total", 1)
		m.Add("sync_proxy_rules_endpoint_changes_total", -1)
		m.Add("sync_proxy_rules_nftables_sync_failures_total", 1, "IPv4") // of another mode
		m.Compute("svcproxy_interference_total", nil)
	}
	if n := strings.Count(log.String(), "\n"); n != 6 {
		t.Errorf("%d lines for 6 metrics:\n%s", n, &log)
	}
	if n := len(m.Wrong()); n != 6 {
		t.Errorf("wrong: %q", m.Wrong())
	}
	scrape(t, m, "text/plain")
}

// Names follow the conventions, and each has a help text.
func TestTable(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range table {
		switch {
		case seen[s.name]:
			t.Errorf("%s is there twice", s.name)
		case s.help == "":
			t.Errorf("%s has no help", s.name)
		case s.kind == counter && !strings.HasSuffix(s.name, "_total"):
			t.Errorf("counter %s does not end in _total", s.name)
		case (s.kind == histogram) != (s.buckets != nil) && s.kind != collected:
			t.Errorf("%s: kind and buckets do not fit", s.name)
		case fullName(strings.TrimPrefix(s.name, "kubeproxy_")) != s.name:
			t.Errorf("%s cannot be named by a producer", s.name)
		}
		seen[s.name] = true
	}
}

// Every name that the program's packages use exists, with the right kind and as
// many labels as they give.
func TestNamesInTheSources(t *testing.T) {
	all := map[string]spec{}
	for _, s := range table {
		all[s.name] = s
	}
	calls := 0
	err := filepath.WalkDir("..", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasPrefix(path, "../metrics/") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil //nolint:nilerr // a file that does not parse fails elsewhere
		}
		ast.Inspect(f, func(n ast.Node) bool {
			name, kind, labels, ok := use(n)
			if !ok {
				return true
			}
			calls++
			s, known := all[fullName(name)]
			switch {
			case !known:
				t.Errorf("%s uses %q, which is not in the table", path, name)
			case s.kind != kind:
				t.Errorf("%s uses %q as another kind", path, name)
			case labels >= 0 && labels != len(s.labels):
				t.Errorf("%s gives %q %d labels, it has %d", path, name, labels, len(s.labels))
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if calls < 10 {
		t.Errorf("only %d uses were found", calls)
	}
}

// use recognises stats.Add("name", v, labels...) and its like.
func use(n ast.Node) (name string, k kind, labels int, ok bool) {
	c, isCall := n.(*ast.CallExpr)
	if !isCall || len(c.Args) < 2 {
		return "", 0, 0, false
	}
	sel, isSel := c.Fun.(*ast.SelectorExpr)
	lit, isLit := c.Args[0].(*ast.BasicLit)
	if !isSel || !isLit || lit.Kind != token.STRING || !producer(sel.X) {
		return "", 0, 0, false
	}
	name, err := strconv.Unquote(lit.Value)
	if err != nil {
		return "", 0, 0, false
	}
	labels = len(c.Args) - 2
	if c.Ellipsis.IsValid() {
		labels = -1
	}
	switch sel.Sel.Name {
	case "Add":
		return name, counter, labels, true
	case "Set":
		return name, gauge, labels, true
	case "Observe":
		return name, histogram, labels, true
	case "Compute":
		return name, computed, -1, true
	}
	return "", 0, 0, false
}

// producer reports whether x is called stats or metrics.
func producer(x ast.Expr) bool {
	switch x := x.(type) {
	case *ast.Ident:
		return strings.EqualFold(x.Name, "stats") || strings.EqualFold(x.Name, "metrics")
	case *ast.SelectorExpr:
		return producer(x.Sel)
	}
	return false
}
