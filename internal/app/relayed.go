package app

import (
	"maps"
	"slices"

	"github.com/svcproxy/svcproxy/internal/metrics"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
)

// mostRelayed bounds the Service ports with metrics of their own: each has up to 40
// series.
const mostRelayed = 500

// relaying is what carries Services through the process.
type relaying interface {
	Services() map[plan.ID]*relay.Service
}

// collectRelayed makes the figures of relayed Services metrics. backend may be one
// that relays.
func (p *proxy) collectRelayed(backend any) {
	sources := []struct {
		via string
		relaying
	}{{"loopback", p.loopback}}
	if b, ok := backend.(relaying); ok {
		sources = append(sources, struct {
			via string
			relaying
		}{"service", b})
	}
	p.metrics.Collect(func(emit func(metrics.Reading)) {
		left, notShown := mostRelayed, 0
		for _, s := range sources {
			services := s.Services()
			for _, id := range slices.SortedFunc(maps.Keys(services), plan.ID.Compare) {
				f := services[id].Figures()
				switch {
				case untouched(&f):
				case left == 0:
					notShown++
				default:
					left--
					emitFigures(emit, &f, []string{id.String(), id.Protocol.String(), id.Family.String(), s.via})
				}
			}
		}
		emit(metrics.Reading{Metric: "svcproxy_relay_services_not_shown", Value: float64(notShown)})
	})
}

// untouched reports whether a Service has had no traffic at all.
func untouched(f *relay.Figures) bool {
	return f.Total == 0 && f.Open == 0 && f.Failures == relay.Figures{}.Failures
}

func emitFigures(emit func(metrics.Reading), f *relay.Figures, labels []string) {
	with := func(more string) []string { return append(labels[:len(labels):len(labels)], more) }
	value := func(metric string, v float64, labels []string) {
		emit(metrics.Reading{Metric: metric, Labels: labels, Value: v})
	}
	value("svcproxy_relay_connections", float64(f.Open), labels)
	value("svcproxy_relay_connections_total", float64(f.Total), labels)
	value("svcproxy_relay_bytes_total", float64(f.FromClient), with("to_endpoint"))
	value("svcproxy_relay_bytes_total", float64(f.ToClient), with("to_client"))
	value("svcproxy_relay_retries_total", float64(f.Retries), labels)
	for _, reason := range relay.Reasons {
		if n := f.Failures[reason]; n > 0 {
			value("svcproxy_relay_failures_total", float64(n), with(reason.String()))
		}
	}
	h := metrics.Reading{Metric: "svcproxy_relay_connect_seconds", Labels: labels, Value: f.LatencySeconds, Buckets: map[float64]uint64{}}
	for i, n := range f.Latency {
		h.Count += n
		if i < len(relay.LatencyBounds) {
			h.Buckets[relay.LatencyBounds[i].Seconds()] = h.Count
		}
	}
	emit(h)
}
