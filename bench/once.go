package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// patience is how long one attempt to reach a probe may take. A SYN that comes too early is
// lost and not repeated within a second, so this is how finely times are told.
const patience = 20 * time.Millisecond

// result is what one run of one program showed.
type result struct {
	Name      string `json:"name"`
	Services  int    `json:"services"`
	Endpoints int    `json:"endpoints"`

	FullSync    float64 `json:"full_sync_s"` // start until every probe answers
	SyncCPU     float64 `json:"full_sync_cpu_s"`
	IdleCPU     float64 `json:"idle_cpu_s"` // until nothing more is done
	RSS         float64 `json:"rss_mb"`
	Peak        float64 `json:"peak_mb"`
	ChangeP50   float64 `json:"change_ms_p50"`
	ChangeMax   float64 `json:"change_ms_max"`
	ChangeCPU   float64 `json:"change_cpu_ms_each"`
	ConnectP50  float64 `json:"connect_us_p50"`
	ConnectP99  float64 `json:"connect_us_p99"`
	ConnectRate float64 `json:"connections_per_s"`
	Failures    float64 `json:"failed_connections"`
	ChurnCPU    float64 `json:"churn_cpu_pct"`
	ChurnChange float64 `json:"churn_change_ms"`
	RSSAfter    float64 `json:"rss_after_mb"`
	PeakAfter   float64 `json:"peak_after_mb"`
	// Milliseconds until a probe answers again after others broke the rules, by what
	// they did.
	Repairs map[string][]float64 `json:"repairs_ms,omitempty"`
}

func (r result) line() (string, error) {
	b, err := json.Marshal(r)
	return string(b) + "\n", err
}

// once runs one program from start to end.
func (p *plan) once(ctx context.Context, s subject, size int) (r result, err error) {
	r = result{Name: s.name, Services: size, Endpoints: p.endpoints}
	w, err := newWorld()
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	c := &synthetic{server: w.server, size: size, endpoints: p.endpoints}
	if err := c.fill(); err != nil {
		return r, err
	}
	begin := time.Now()
	pr, err := w.start(s, p)
	if err != nil {
		return r, err
	}
	defer pr.stop()
	for _, phase := range []func(context.Context, *world, *synthetic, *program, *result) error{
		func(ctx context.Context, w *world, _ *synthetic, pr *program, r *result) error {
			return p.firstSync(ctx, begin, w, pr, r)
		},
		p.singleChanges, p.connections, p.underChurn, p.repairs,
	} {
		if err := phase(ctx, w, c, pr, &r); err != nil {
			return r, err
		}
	}
	return r, nil
}

// firstSync waits until every probe answers, and then until the program rests.
func (p *plan) firstSync(ctx context.Context, begin time.Time, w *world, pr *program, r *result) error {
	limit, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	for k := range probes {
		if err := w.await(limit, pr, probeAddr(k), "a", patience); err != nil {
			return fmt.Errorf("first sync: %w", err)
		}
	}
	r.FullSync = time.Since(begin).Seconds()
	var err error
	if r.SyncCPU, err = cpuOf(pr.cmd.Process.Pid); err != nil {
		return err
	}
	if r.IdleCPU, err = rest(ctx, pr, 3*time.Second); err != nil {
		return err
	}
	r.RSS, r.Peak, err = memoryOf(pr.cmd.Process.Pid)
	return err
}

// singleChanges moves one probe at a time from one pod to the other and times the
// first connection that reaches the new one. The pauses between are random, so
// that the program's own pace averages out.
func (p *plan) singleChanges(ctx context.Context, w *world, c *synthetic, pr *program, r *result) error {
	before, err := cpuOf(pr.cmd.Process.Pid)
	if err != nil {
		return err
	}
	var latency []float64
	for i := range p.changes {
		ms, err := p.timeChange(ctx, w, c, pr, i%probes)
		if err != nil {
			return fmt.Errorf("change %d: %w", i+1, err)
		}
		latency = append(latency, ms)
		if err := pause(ctx, pr, time.Duration(500+rand.IntN(1000))*time.Millisecond); err != nil {
			return err
		}
	}
	// The children's time counts once they have ended.
	after, err := rest(ctx, pr, 0)
	if err != nil {
		return err
	}
	r.ChangeP50, r.ChangeMax = quantile(latency, 0.5), slices.Max(latency)
	r.ChangeCPU = (after - before) * 1000 / float64(p.changes)
	return nil
}

// timeChange moves a probe and returns the milliseconds until a new connection
// reaches the other pod.
func (p *plan) timeChange(ctx context.Context, w *world, c *synthetic, pr *program, k int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	begin := time.Now()
	name, err := c.moveProbe(k)
	if err == nil {
		err = w.await(ctx, pr, probeAddr(k), name, patience)
	}
	return float64(time.Since(begin).Microseconds()) / 1000, err
}

// connections times single connects to the last probe, and counts how many a
// second go through, while the program rests.
func (p *plan) connections(ctx context.Context, w *world, _ *synthetic, pr *program, r *result) error {
	times, failures, err := w.timeConnects(ctx, probeAddr(probes-1), 3000)
	if err != nil {
		return err
	}
	r.ConnectP50, r.ConnectP99 = quantile(times, 0.5), quantile(times, 0.99)
	perSecond, failed, err := w.countConnects(ctx, probeAddr(probes-1), 8, 5*time.Second)
	if err != nil {
		return err
	}
	r.ConnectRate, r.Failures = perSecond, float64(failures+failed)
	return pr.alive(ctx)
}

// underChurn changes endpoints all the time, then one more of a probe, and looks
// at what all that costs and how far the program has fallen behind.
func (p *plan) underChurn(ctx context.Context, w *world, c *synthetic, pr *program, r *result) error {
	before, err := cpuOf(pr.cmd.Process.Pid)
	if err != nil {
		return err
	}
	for end := time.Now().Add(p.churnFor); time.Now().Before(end); {
		next := time.Now().Add(time.Second)
		if err := c.replace(p.churn); err != nil {
			return err
		}
		if err := pause(ctx, pr, time.Until(next)); err != nil {
			return err
		}
	}
	if r.ChurnChange, err = p.timeChange(ctx, w, c, pr, probes-1); err != nil {
		return fmt.Errorf("change after the churn: %w", err)
	}
	after, err := rest(ctx, pr, 0)
	if err != nil {
		return err
	}
	if p.churnFor > 0 {
		r.ChurnCPU = (after - before) / p.churnFor.Seconds() * 100
	}
	r.RSSAfter, r.PeakAfter, err = memoryOf(pr.cmd.Process.Pid)
	return err
}

// quantile returns the smallest value of d that at least the share q lies below;
// 0 if there is none.
func quantile(d []float64, q float64) float64 {
	if len(d) == 0 {
		return 0
	}
	d = slices.Sorted(slices.Values(d))
	return d[min(len(d)-1, int(float64(len(d))*q))]
}
