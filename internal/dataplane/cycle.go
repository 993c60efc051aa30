package dataplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// cycle is the state of the loop's goroutine, which alone touches it.
type cycle struct {
	*Loop
	backlog plan.Update // what is planned and not in the kernel; its Plan is the newest
	owed    bool        // an Apply is due even if the backlog is empty
	urgent  bool        // the backlog holds a removal that was not tried yet
	reread  bool        // the Backend must forget what it believes

	planned   time.Time // when the facts were looked at last
	ended     time.Time // end of the last Apply
	failures  int       // in a row
	said      string    // the failure that was logged last
	saidAt    time.Time // and when
	retryAt   time.Time // after a failure
	fullAt    time.Time // next read-back without a reason
	repairAt  time.Time // next read-back because of interference; zero: none
	repairs   *rate.Limiter
	foughtAt  time.Time // last remark on a fight
	held      map[plan.ID]*held
	syncs     int  // attempts to bring the kernel to the plan
	gap       bool // since the last that succeeded something may have been missing
	published bool // health ports were handed over once
	report    report
}

// maxRounds bounds the attempts of one sync that put Service ports into quarantine.
const maxRounds = 64

// Repairs of interference come at once, until they come too often.
const (
	repairBurst = 10 // a firewall service that starts anew flushes several times
	repairEvery = 10 * time.Second
	fightEvery  = 10 * time.Minute // between two remarks on the same fight
)

// sayAgain is the pause after which a failure that stays the same is logged again.
const sayAgain = 10 * time.Minute

func newCycle(l *Loop) *cycle {
	return &cycle{
		Loop: l, held: map[plan.ID]*held{}, report: newReport(l.cfg.Stats, l.cfg.Families),
		repairs: rate.NewLimiter(rate.Every(repairEvery), repairBurst),
	}
}

func (c *cycle) run(ctx context.Context) {
	c.cfg.Health.Updated(time.Now())
	c.report.queued(time.Now())
	if !c.awaitFacts(ctx) {
		return
	}
	if !c.cfg.Whole {
		c.take(c.cfg.Planner.First())
		c.owed = true
		c.sync(ctx)
	}
	c.take(c.cfg.Planner.Update())
	c.backlog.Partial = false
	c.owed = true
	for ctx.Err() == nil {
		now := time.Now()
		at := c.due()
		if !at.After(now) {
			c.sync(ctx)
			continue
		}
		changed := c.cfg.Planner.Changed()
		if ready := c.planned.Add(gather); ready.After(now) {
			changed = nil
			at = earlier(at, ready)
		}
		timer := time.NewTimer(at.Sub(now))
		select {
		case <-ctx.Done():
		case <-changed:
			c.take(c.cfg.Planner.Update())
		case f := <-c.calls:
			f()
			c.take(c.cfg.Planner.Update())
		case <-c.wake:
			c.lookAround()
		case <-timer.C:
		}
		timer.Stop()
	}
}

// waitQuietly is how long facts may take to come without a word in the log.
const waitQuietly = 2 * time.Second

// awaitFacts returns once the facts allow a first plan; false if ctx ended first.
func (c *cycle) awaitFacts(ctx context.Context) bool {
	var said []string
	started := time.Now()
	for {
		ok, missing := c.cfg.Planner.Ready()
		c.update(func(s *Status) { s.Waiting = missing })
		if ok {
			return true
		}
		if time.Since(started) >= waitQuietly && !slices.Equal(said, missing) {
			said = slices.Clone(missing)
			c.cfg.Log.Warn("waiting for facts; the kernel's state stays as it is", "missing", strings.Join(missing, "; "))
		}
		select {
		case <-ctx.Done():
			return false
		case <-c.cfg.Planner.Changed():
		case f := <-c.calls:
			f()
		case <-time.After(time.Second): // readiness may also come with time
		}
	}
}

// take adds an update to the backlog.
func (c *cycle) take(u plan.Update) {
	now := time.Now()
	c.planned = now
	if len(u.Notes) > 0 {
		c.cfg.Notes(u.Notes)
		u.Notes = nil
	}
	empty := u.Empty()
	if empty {
		u.Triggers = nil // they belong to changes that do not matter here
	}
	if c.backlog.Plan == nil {
		c.backlog = u
	} else {
		c.backlog.Merge(u)
		c.backlog.Triggers = bounded(c.backlog.Triggers)
	}
	if empty {
		return
	}
	c.urgent = c.urgent || urgent(&u)
	c.report.took(&u, &c.backlog, now)
	if c.backlog.Empty() && !c.owed { // everything is back where it was
		c.urgent, c.backlog.Triggers = false, nil
		c.update(func(s *Status) { s.PendingSince = time.Time{} })
		c.report.upToDate(now)
		c.cfg.Health.Updated(now)
		return
	}
	c.update(func(s *Status) {
		if s.PendingSince.IsZero() {
			s.PendingSince = now
		}
	})
	c.cfg.Health.Queued(now)
}

// bounded keeps memory in bounds while nothing can be applied.
func bounded(t []time.Time) []time.Time {
	const most = 10_000
	if len(t) > most {
		t = slices.Clone(t[:most])
	}
	return t
}

// due returns when the next sync has to start.
func (c *cycle) due() time.Time {
	at := c.fullAt
	if c.fullAt.IsZero() {
		at = time.Now().Add(c.current().FullInterval)
	}
	if !c.repairAt.IsZero() {
		at = earlier(at, c.repairAt)
	}
	for _, h := range c.held {
		at = earlier(at, h.retry)
	}
	if own, ok := c.backendDue(); ok && c.failures == 0 {
		at = earlier(at, own)
	}
	if c.owed || !c.backlog.Empty() {
		switch {
		case c.failures > 0 && c.urgent:
			at = earlier(at, earlier(c.retryAt, c.ended.Add(firstRetry)))
		case c.failures > 0:
			at = earlier(at, c.retryAt)
		case c.urgent || c.owed:
			at = time.Time{}
		default:
			at = earlier(at, c.ended.Add(c.current().MinInterval))
		}
	}
	return at
}

func (c *cycle) current() Settings {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.settings
}

// lookAround takes up new settings and reasons to read the kernel's state back.
func (c *cycle) lookAround() {
	c.mu.Lock()
	why, full := c.suspected, c.settings.FullInterval
	c.suspected = nil
	c.mu.Unlock()
	now := time.Now()
	if next := now.Add(full); !c.fullAt.IsZero() && next.Before(c.fullAt) {
		c.fullAt = next
	}
	if len(why) == 0 || !c.repairAt.IsZero() {
		return
	}
	r := c.repairs.ReserveN(now, 1)
	c.repairAt = now.Add(r.DelayFrom(now))
	c.cfg.Log.Warn("the kernel's state was changed by somebody else; it is read back and repaired",
		"found", why, "in", c.repairAt.Sub(now))
	if c.repairAt.After(now) && now.Sub(c.foughtAt) >= fightEvery {
		c.foughtAt = now
		c.noteFight(why[0])
	}
}

func (c *cycle) noteFight(what string) {
	n := plan.Note{
		Kind: "Node", Reason: ReasonFight, Warning: true,
		Message: fmt.Sprintf("something on this node keeps changing what mode %s programs (last: %s); repairs are now at least %s apart. "+
			"Find the other program (a second Service proxy, a firewall service that flushes all rules) and stop it.", c.cfg.Mode, what, repairEvery),
	}
	if c.backlog.Plan != nil && c.backlog.Plan.Node != nil {
		n.Name = c.backlog.Plan.Node.Name
	}
	c.cfg.Notes([]plan.Note{n})
}

// sync brings the kernel to the newest plan, or says when to try again.
func (c *cycle) sync(ctx context.Context) {
	now := time.Now()
	c.syncs++
	c.release(now)
	if !c.owed || c.failures > 0 { // the very first calls bring their own update
		c.take(c.cfg.Planner.Update())
	}
	c.gap = c.gap || c.reread || passed(c.repairAt, now)
	reread := c.reread || passed(c.repairAt, now) || passed(c.fullAt, now)
	if reread {
		c.reread, c.repairAt = false, time.Time{}
		c.fullAt = now.Add(c.current().FullInterval)
		c.owed = true
		c.invalidate()
	}
	if own, ok := c.backendDue(); ok && !own.After(now) {
		c.owed = true
	}
	if !c.owed && c.backlog.Empty() {
		c.settle()
		return
	}
	full := reread || c.report.last.IsZero()
	start := time.Now()
	err := c.apply(ctx)
	for range maxRounds {
		bad := objectErrors(err)
		if len(bad) == 0 || ctx.Err() != nil || !c.hold(bad) {
			break
		}
		c.take(c.cfg.Planner.Update())
		c.invalidate() // what a failed Apply left behind is unknown
		err = c.apply(ctx)
	}
	c.ended = time.Now()
	if err != nil {
		if ctx.Err() == nil {
			c.failed(err)
		}
		return
	}
	c.succeeded(start, full)
}

// apply hands the backlog to the Backend.
func (c *cycle) apply(ctx context.Context) error {
	defer c.takeRemarks()
	return guard("apply the plan", func() error { return c.cfg.Backend.Apply(ctx, c.backlog) })
}

func (c *cycle) invalidate() {
	if err := guard("forget the kernel's state", func() error { c.cfg.Backend.Invalidate(); return nil }); err != nil {
		c.logError(err)
	}
}

func (c *cycle) failed(err error) {
	limit := c.current().SyncPeriod
	pause := backoff(c.failures, firstRetry, limit, c.cfg.Jitter)
	c.failures++
	c.retryAt = c.ended.Add(pause)
	c.owed, c.urgent, c.reread = true, false, true
	c.cfg.Stats.Add("svcproxy_sync_failures_total", 1)
	c.update(func(s *Status) { s.LastError, s.Failures = err.Error(), c.failures })
	if err.Error() == c.said && c.ended.Before(c.saidAt.Add(sayAgain)) {
		c.cfg.Log.Debug("sync failed as before", "failures", c.failures, "retry", pause)
		return
	}
	c.said, c.saidAt = err.Error(), c.ended
	c.logError(err, "failures", c.failures, "retry", pause)
}

func (c *cycle) logError(err error, args ...any) {
	if p, ok := errors.AsType[*panicError](err); ok {
		args = append(args, "stack", p.stack)
	}
	c.cfg.Log.Error("sync failed", append([]any{"error", err}, args...)...)
}

// succeeded tells everybody.
func (c *cycle) succeeded(start time.Time, full bool) {
	done := c.backlog
	c.backlog = plan.Update{Plan: done.Plan}
	if c.failures > 0 {
		c.cfg.Log.Info("sync succeeds again", "failures", c.failures)
	}
	c.owed, c.urgent, c.failures, c.said = false, false, 0, ""
	c.report.countNoLocal(done.Changed)
	for _, f := range c.cfg.Follow {
		f.Follow(done)
	}
	if done.Partial {
		c.cfg.Log.Info("what the node itself needs is in the kernel", "servicePorts", len(done.Plan.Services))
		return
	}
	if full { // later than when it was begun
		c.fullAt = c.ended.Add(c.current().FullInterval)
	}
	c.settle()
	first := false
	c.update(func(s *Status) {
		first = !s.Synced
		if first {
			s.Synced, s.FirstSync = true, c.ended
		}
		s.LastSuccess, s.PendingSince = c.ended, time.Time{}
		s.LastError, s.Failures = "", 0
		s.ServicePorts = len(done.Plan.Services)
	})
	c.report.applied(&done, start, c.ended, full)
	c.cfg.Health.Updated(c.ended)
	if len(done.Health) > 0 || done.Node || !c.published {
		c.published = true
		c.cfg.Health.SetPorts(done.Plan.Health, done.Plan.Node)
	}
	if c.flows != nil {
		c.flows.add(&done, first || c.gap)
	}
	c.gap = false
	if first {
		c.cfg.Log.Info("first sync done", "servicePorts", len(done.Plan.Services), "took", c.ended.Sub(start))
		c.cfg.First()
	}
}

// passed reports whether the time t is set and reached.
func passed(t, now time.Time) bool { return !t.IsZero() && !t.After(now) }

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
