package relaybench

import (
	"strings"
	"testing"
	"time"
)

func TestTableHasMediansAndRatios(t *testing.T) {
	b := &bench{relays: []string{"svcproxy", "haproxy"}, loads: []string{"connect"}, rounds: 3, length: time.Second}
	var results []result
	for i, rate := range []float64{100, 300, 200} {
		for relay, factor := range map[string]float64{"svcproxy": 2, "haproxy": 1} {
			r := result{Relay: relay, Load: "connect", Round: i, CPU: 1}
			r.Rate, r.Done, r.P50 = rate*factor, 1000, 50/factor
			results = append(results, r)
		}
	}
	got := b.table(results)
	for _, want := range []string{
		"| connections per s | 400 | 200 | 2.00 |",
		"| connect and answer p50, µs | 25 | 50 | 0.50 |",
		"| CPU of the relay per connection, µs | 1000 | 1000 | 1.00 |",
		"| failed connections | 0 | 0 | |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no line %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "bulk") {
		t.Errorf("a load that did not run is in\n%s", got)
	}
}

func TestVerdictSeesGrowthAndFailures(t *testing.T) {
	flat := footprint{heap: 20 << 20, rss: 50 << 10, descriptors: 200, goroutines: 80}
	fan := func(change func(*footprint, int)) []footprint {
		var all []footprint
		for i := range 9 {
			f := flat
			change(&f, i)
			all = append(all, f)
		}
		return all
	}
	s := &soak{}
	if err := s.verdict(fan(func(f *footprint, i int) { f.descriptors += 100 * (i % 2) })); err != nil {
		t.Errorf("up and down: %v", err)
	}
	for what, change := range map[string]func(*footprint, int){
		"heap":        func(f *footprint, i int) { f.heap += uint64(i) * 10 << 20 },
		"RSS":         func(f *footprint, i int) { f.rss += float64(i * 20 << 10) },
		"descriptors": func(f *footprint, i int) { f.descriptors += i * 60 },
		"goroutines":  func(f *footprint, i int) { f.goroutines += i * 30 },
	} {
		if err := s.verdict(fan(change)); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s grows: %v", what, err)
		}
	}
	text := "connection reset"
	s.failures.Store(1)
	s.lastError.Store(&text)
	if err := s.verdict(fan(func(*footprint, int) {})); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("a failure: %v", err)
	}
}
