package dataplane

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// flowCleaner removes stale UDP flows, TCP flows that are to end, and those that nothing
// has translated, after the kernel was programmed, on its own goroutine: a table of a million flows takes a while to
// walk, and the next sync does not wait for it.
type flowCleaner struct {
	table FlowTable
	stats Stats
	log   *slog.Logger
	wake  chan struct{}

	mu      sync.Mutex // guards all below
	due     flowChecks
	endings endings
	missed  map[plan.Family][]netip.AddrPort // see retranslate
	node    *plan.Node                       // the newest
	running bool
	deleted uint64 // UDP
	ended   uint64 // TCP
	lastErr error
}

func newFlowCleaner(t FlowTable, s Stats, log *slog.Logger) *flowCleaner {
	return &flowCleaner{table: t, stats: s, log: log, wake: make(chan struct{}, 1), due: flowChecks{}, endings: endings{}}
}

// add takes up an update that is in the kernel. After a gap, which is the first full sync
// of a process or one that puts back what was missing, all Service ports are looked at:
// endpoints may have changed while no process ran, and flows may have begun that nothing
// translated. If neither happened, nothing is deleted.
func (c *flowCleaner) add(u *plan.Update, gap bool) {
	c.mu.Lock()
	c.node = u.Plan.Node
	c.due.add(u, gap)
	c.endings.add(u, time.Now())
	if gap {
		c.missed = tcpDestinations(u.Plan)
	}
	work := len(c.due) > 0 || len(c.endings) > 0 || len(c.missed) > 0
	c.mu.Unlock()
	if !work {
		return
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *flowCleaner) status() FlowStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := FlowStatus{Pending: c.running || len(c.due) > 0, Deleted: c.deleted, Ended: c.ended, Ending: len(c.endings)}
	if c.lastErr != nil {
		s.LastError = c.lastErr.Error()
	}
	return s
}

func (c *flowCleaner) run(ctx context.Context) {
	var retry <-chan time.Time
	failures := 0
	for {
		var timer <-chan time.Time
		if at, ok := c.next(); ok && retry == nil {
			timer = time.After(time.Until(at))
		}
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-retry:
		case <-timer:
		}
		retry = nil
		err := errors.Join(c.clean(ctx), c.end(ctx), c.retranslate(ctx))
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			failures = 0
			continue
		}
		pause := backoff(failures, time.Second, time.Minute, nil)
		failures++
		retry = time.After(pause)
		c.log.Warn("stale flows could not be removed", "error", err, "failures", failures, "retry", pause)
	}
}

func (c *flowCleaner) next() (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.endings.next()
}

// end ends the TCP flows that are due. What fails stays due.
func (c *flowCleaner) end(ctx context.Context) error {
	var failed error
	for _, f := range plan.Families {
		c.mu.Lock()
		due := c.endings.due(f, time.Now())
		c.mu.Unlock()
		if len(due) == 0 {
			continue
		}
		to, ends, instead := due.rules()
		var ended int
		err := guard("end TCP flows", func() (err error) {
			ended, err = c.table.DeleteTCP(ctx, to, ends, instead)
			return err
		})
		c.stats.Add("svcproxy_tcp_flows_ended_total", float64(ended), f.String())
		if ended > 0 {
			c.log.Info("TCP flows to endpoints that are gone or fail ended", "family", f, "flows", ended)
		}
		c.mu.Lock()
		c.ended += uint64(ended)
		if err == nil {
			c.endings.done(due)
		} else {
			c.lastErr, failed = err, err
		}
		c.mu.Unlock()
	}
	return failed
}

// tcpDestinations returns where the TCP ports of a plan are reached.
func tcpDestinations(p *plan.Plan) map[plan.Family][]netip.AddrPort {
	out := map[plan.Family][]netip.AddrPort{}
	for id, sp := range p.Services {
		if id.Protocol == plan.TCP {
			out[id.Family] = slices.AppendSeq(out[id.Family], maps.Keys(destinations(sp, p.Node)))
		}
	}
	return out
}

// retranslate forgets the TCP connections to Services that began while nothing was there
// to translate them, and that nobody has answered. A client tries again from the same
// port, for minutes, and would not be translated either, nor would another that has the
// port by chance.
func (c *flowCleaner) retranslate(ctx context.Context) error {
	c.mu.Lock()
	missed := c.missed
	c.missed = nil
	c.mu.Unlock()
	untranslated := func(to, from netip.AddrPort, answered bool) bool { return !answered && to == from }
	var failed error
	for f, to := range missed {
		var n int
		err := guard("forget untranslated TCP flows", func() (err error) {
			n, err = c.table.DeleteTCP(ctx, to, untranslated, func(netip.AddrPort) netip.AddrPort { return netip.AddrPort{} })
			return err
		})
		if n > 0 {
			c.log.Info("TCP flows that began while rules were missing are translated anew", "family", f, "flows", n)
		}
		if err == nil {
			continue
		}
		failed = err
		c.mu.Lock()
		c.lastErr = err
		if c.missed == nil {
			c.missed = map[plan.Family][]netip.AddrPort{}
		}
		if c.missed[f] == nil { // else it is newer
			c.missed[f] = to
		}
		c.mu.Unlock()
	}
	return failed
}

// clean does what is due for UDP. What fails stays due.
func (c *flowCleaner) clean(ctx context.Context) error {
	c.mu.Lock()
	due, node := c.due, c.node
	c.due, c.running = flowChecks{}, true
	c.mu.Unlock()

	var failed error
	for _, f := range plan.Families {
		rules := due.rules(f, node)
		if len(rules) == 0 {
			continue
		}
		start := time.Now()
		var deleted int
		err := guard("remove stale UDP flows", func() (err error) {
			deleted, err = c.table.DeleteUDP(ctx, slices.SortedFunc(maps.Keys(rules), netip.AddrPort.Compare), rules.stale)
			return err
		})
		c.stats.Observe("conntrack_reconciler_sync_duration_seconds", time.Since(start).Seconds(), f.String())
		c.stats.Add("conntrack_reconciler_deleted_entries_total", float64(deleted), f.String())
		if deleted > 0 {
			c.log.Info("stale UDP flows removed", "family", f, "flows", deleted)
		}
		c.mu.Lock()
		c.deleted += uint64(deleted)
		c.mu.Unlock()
		if err != nil {
			failed = err
			continue
		}
		maps.DeleteFunc(due, func(id plan.ID, _ flowCheck) bool { return id.Family == f })
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running, c.lastErr = false, failed
	for id, old := range due { // what failed, under what came meanwhile
		if now, ok := c.due[id]; ok {
			c.due[id] = old
			c.due.merge(id, now)
			continue
		}
		c.due[id] = old
	}
	return failed
}
