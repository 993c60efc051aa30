// Package metrics holds every metric of the process in one table, with kube-proxy's
// names, labels and buckets where it has the like, and our own under svcproxy_.
//
// Producers know a metric by its name only: [Metrics] is what the dataplane calls
// Stats. There is no global registry, and no other package registers anything.
package metrics

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Build says what is running, for the build info metrics.
type Build struct {
	Version string // v1.2.3
	Commit  string
	Date    string // RFC 3339
}

// Metrics is a registry with all metrics of one mode. Its methods are safe for
// concurrent use.
type Metrics struct {
	log      *slog.Logger
	registry *prometheus.Registry
	specs    map[string]spec // by full name; immutable after New
	counters map[string]*prometheus.CounterVec
	gauges   map[string]*prometheus.GaugeVec
	samples  map[string]*prometheus.HistogramVec

	mu    sync.Mutex // guards all below
	wrong map[string]string
}

// New returns the metrics that exist in the given mode.
func New(mode string, build Build, log *slog.Logger) *Metrics {
	m := &Metrics{
		log: log, registry: prometheus.NewRegistry(), specs: map[string]spec{},
		counters: map[string]*prometheus.CounterVec{}, gauges: map[string]*prometheus.GaugeVec{},
		samples: map[string]*prometheus.HistogramVec{}, wrong: map[string]string{},
	}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for _, s := range table {
		if s.modes == nil || slices.Contains(s.modes, mode) {
			m.specs[s.name] = s
			m.create(s)
		}
	}
	m.set("svcproxy_build_info", 1, build.Version, build.Commit, build.Date, runtime.Version(), mode)
	major, minor := majorMinor(build.Version)
	m.set("kubernetes_build_info", 1, major, minor, build.Version, build.Commit, "", build.Date,
		runtime.Version(), runtime.Compiler, runtime.GOOS+"/"+runtime.GOARCH)
	return m
}

// create registers a metric; one without labels shows as 0 from the start.
func (m *Metrics) create(s spec) {
	switch s.kind {
	case counter:
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: s.name, Help: s.help}, s.labels)
		m.registry.MustRegister(v)
		if len(s.labels) == 0 {
			v.WithLabelValues()
		}
		m.counters[s.name] = v
	case gauge:
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: s.name, Help: s.help}, s.labels)
		m.registry.MustRegister(v)
		if len(s.labels) == 0 {
			v.WithLabelValues()
		}
		m.gauges[s.name] = v
	case histogram:
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: s.name, Help: s.help, Buckets: s.buckets,
			NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160,
		}, s.labels)
		m.registry.MustRegister(v)
		m.samples[s.name] = v
	case computed, collected: // registered by Compute and Collect
	}
}

// fullName completes a name as producers use it.
func fullName(name string) string {
	for _, own := range []string{"svcproxy_", "rest_client_", "kubernetes_"} {
		if strings.HasPrefix(name, own) {
			return name
		}
	}
	return "kubeproxy_" + name
}

// Add adds v to a counter.
func (m *Metrics) Add(metric string, v float64, labels ...string) {
	name := fullName(metric)
	vec := m.counters[name]
	if vec == nil {
		m.complain(name, "no such counter")
		return
	}
	c, err := vec.GetMetricWithLabelValues(labels...)
	switch {
	case err != nil:
		m.complain(name, err.Error())
	case v < 0:
		m.complain(name, fmt.Sprintf("a counter cannot go down, by %v", v))
	default:
		c.Add(v)
	}
}

// Set sets a gauge.
func (m *Metrics) Set(metric string, v float64, labels ...string) {
	m.set(fullName(metric), v, labels...)
}

func (m *Metrics) set(name string, v float64, labels ...string) {
	vec := m.gauges[name]
	if vec == nil {
		m.complain(name, "no such gauge")
		return
	}
	g, err := vec.GetMetricWithLabelValues(labels...)
	if err != nil {
		m.complain(name, err.Error())
		return
	}
	g.Set(v)
}

// Observe adds a sample to a histogram.
func (m *Metrics) Observe(metric string, v float64, labels ...string) {
	name := fullName(metric)
	vec := m.samples[name]
	if vec == nil {
		m.complain(name, "no such histogram")
		return
	}
	h, err := vec.GetMetricWithLabelValues(labels...)
	if err != nil {
		m.complain(name, err.Error())
		return
	}
	h.Observe(v)
}

// Compute makes f, called at each scrape, the value of a metric that the table
// calls computed. Call it once for each.
func (m *Metrics) Compute(metric string, f func() float64) {
	name := fullName(metric)
	s, ok := m.specs[name]
	if !ok || s.kind != computed {
		m.complain(name, "no such computed metric")
		return
	}
	var c prometheus.Collector = prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: s.help}, f)
	if strings.HasSuffix(name, "_total") {
		c = prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: s.help}, f)
	}
	if err := m.registry.Register(c); err != nil {
		m.complain(name, err.Error())
	}
}

// Handler serves the metrics, in the text format, OpenMetrics or protobuf as the
// client asks.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		EnableOpenMetrics: true,
		ErrorLog:          slog.NewLogLogger(m.log.Handler(), slog.LevelError),
	})
}

// complain logs a wrong use once. It is a fault of this program, not of its user.
func (m *Metrics) complain(name, what string) {
	m.mu.Lock()
	_, said := m.wrong[name]
	m.wrong[name] = what
	m.mu.Unlock()
	if !said {
		m.log.Error("a metric was used wrongly", "metric", name, "error", what)
	}
}

// Wrong returns what was used wrongly, as "name: why", sorted: tests fail on it.
func (m *Metrics) Wrong() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, name := range slices.Sorted(maps.Keys(m.wrong)) {
		out = append(out, name+": "+m.wrong[name])
	}
	return out
}

// majorMinor splits v1.2.3.
func majorMinor(version string) (major, minor string) {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ = strings.Cut(rest, ".")
	return major, minor
}
