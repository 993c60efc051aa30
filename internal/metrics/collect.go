package metrics

import (
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Reading is one value of a metric that the table calls collected.
type Reading struct {
	Metric string
	Labels []string // values, in the table's order
	Value  float64  // of a counter or gauge; of a histogram the sum
	// Of a histogram: the number of samples, and of those up to each bound.
	Count   uint64
	Buckets map[float64]uint64
}

// Collect makes f the source of metrics that the table calls collected; it is called
// at each scrape. What it does not give any more is gone.
func (m *Metrics) Collect(f func(emit func(Reading))) {
	if err := m.registry.Register(collector{m, f}); err != nil {
		m.complain("collected metrics", err.Error())
	}
}

// collector is a source of collected metrics. It describes none, since which there
// are depends on the Services.
type collector struct {
	metrics *Metrics
	source  func(emit func(Reading))
}

func (c collector) Describe(chan<- *prometheus.Desc) {}

func (c collector) Collect(to chan<- prometheus.Metric) {
	c.source(func(r Reading) {
		v, err := c.metrics.convert(r)
		if err != nil {
			c.metrics.complain(fullName(r.Metric), err.Error())
			return
		}
		to <- v
	})
}

// convert makes a reading what the library hands out.
func (m *Metrics) convert(r Reading) (prometheus.Metric, error) {
	name := fullName(r.Metric)
	s, ok := m.specs[name]
	if !ok || s.kind != collected {
		return nil, errors.New("no such collected metric")
	}
	desc := prometheus.NewDesc(name, s.help, s.labels, nil)
	switch {
	case s.buckets != nil:
		return prometheus.NewConstHistogram(desc, r.Count, r.Value, r.Buckets, r.Labels...)
	case strings.HasSuffix(name, "_total"):
		return prometheus.NewConstMetric(desc, prometheus.CounterValue, r.Value, r.Labels...)
	}
	return prometheus.NewConstMetric(desc, prometheus.GaugeValue, r.Value, r.Labels...)
}
