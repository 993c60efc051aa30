package dataplane

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Reasons of the loop's own remarks.
const (
	// ReasonRefused: the kernel refuses a Service port; the rest is programmed.
	ReasonRefused plan.Reason = "RefusedByKernel"
	// ReasonAccepted: a Service port that was refused is programmed now.
	ReasonAccepted plan.Reason = "AcceptedByKernel"
	// ReasonFight: another program keeps changing the kernel's state.
	ReasonFight plan.Reason = "StateFight"
)

// When what was refused is tried again. What the kernel lacked for a moment is tried
// sooner: its Service is as good as any other.
const (
	firstRelease, lastRelease             = 30 * time.Second, 30 * time.Minute
	firstMomentRelease, lastMomentRelease = time.Second, 10 * time.Second
)

// passes reports whether an error is about the moment and not about what was written.
func passes(err error) bool {
	return slices.ContainsFunc([]error{syscall.ENOBUFS, syscall.ENOMEM, syscall.EAGAIN, syscall.EBUSY, syscall.EINTR},
		func(e error) bool { return errors.Is(err, e) })
}

// held is a Service port in quarantine.
type held struct {
	inForce *plan.ServicePort // what the plan has instead of the wanted version
	trying  bool              // released for one attempt
	tries   int               // syncs that ended with it being refused
	sync    int               // the last of these
	since   time.Time
	retry   time.Time
	err     error
}

// objectErrors returns all ObjectErrors in err's tree.
func objectErrors(err error) []*ObjectError {
	switch e := err.(type) {
	case nil:
		return nil
	case *ObjectError:
		return []*ObjectError{e}
	case interface{ Unwrap() []error }:
		var out []*ObjectError
		for _, e := range e.Unwrap() {
			out = append(out, objectErrors(e)...)
		}
		return out
	}
	return objectErrors(errors.Unwrap(err))
}

// hold puts the Service ports that errs name into quarantine. It reports whether
// that changed anything, so that another Apply has a chance.
func (c *cycle) hold(errs []*ObjectError) bool {
	changed := false
	for _, e := range errs {
		refused := c.backlog.Plan.Services[e.ID]
		if refused == nil {
			continue // it is not even in the plan: the Backend's own trouble
		}
		good := c.lastGood(e.ID)
		h := c.held[e.ID]
		if h == nil {
			h = &held{since: time.Now()}
			c.held[e.ID] = h
		}
		if good == refused {
			good = nil
		}
		if h.err == nil || h.err.Error() != e.Err.Error() {
			c.noteRefused(e, good != nil)
		}
		h.inForce, h.err, h.trying = good, e.Err, false
		if h.sync != c.syncs { // one sync may meet it several times
			h.sync, h.retry = c.syncs, time.Now().Add(c.releasePause(h))
			h.tries++
		}
		c.cfg.Planner.Hold(e.ID, good)
		changed = true
	}
	c.tellQuarantine()
	return changed
}

// releasePause is how long a Service port that was refused waits for its next attempt.
func (c *cycle) releasePause(h *held) time.Duration {
	if passes(h.err) {
		return backoff(h.tries, firstMomentRelease, lastMomentRelease, c.cfg.Jitter)
	}
	return backoff(h.tries, firstRelease, lastRelease, c.cfg.Jitter)
}

// lastGood is the version of a Service port that is in the kernel, as far as
// known; nil if there is none.
func (c *cycle) lastGood(id plan.ID) *plan.ServicePort {
	for _, ch := range c.backlog.Changed {
		if ch.ID == id {
			return ch.Old
		}
	}
	return c.backlog.Plan.Services[id]
}

func (c *cycle) noteRefused(e *ObjectError, inForce bool) {
	effect := "it is not served"
	if inForce {
		effect = "its last good version stays in force"
	}
	c.cfg.Log.Error("a Service port is refused and quarantined; everything else is programmed",
		"service", e.ID, "protocol", e.ID.Protocol, "family", e.ID.Family, "error", e.Err, "effect", effect)
	c.cfg.Notes([]plan.Note{{
		Kind: "Service", Namespace: e.ID.Namespace, Name: e.ID.Name, Reason: ReasonRefused, Warning: true,
		Message: fmt.Sprintf("port %q (%s, %s) was refused by the kernel: %v; %s. It is tried again from time to time and when the Service or its endpoints change.",
			e.ID.Port, e.ID.Protocol, e.ID.Family, e.Err, effect),
	}})
}

// release lets the quarantined try again whose time has come.
func (c *cycle) release(now time.Time) {
	for id, h := range c.held {
		if !h.retry.After(now) {
			h.trying = true
			h.retry = now.Add(c.releasePause(h))
			c.cfg.Planner.Release(id)
		}
	}
}

// settle ends the quarantine of those whose wanted version went through.
func (c *cycle) settle() {
	for id, h := range c.held {
		if now := c.backlog.Plan.Services[id]; now != h.inForce || h.trying {
			delete(c.held, id)
			if now == nil {
				continue
			}
			c.cfg.Log.Info("a quarantined Service port is programmed as wanted", "service", id, "protocol", id.Protocol, "family", id.Family)
			c.cfg.Notes([]plan.Note{{
				Kind: "Service", Namespace: id.Namespace, Name: id.Name, Reason: ReasonAccepted,
				Message: fmt.Sprintf("port %q (%s, %s) is programmed as wanted now", id.Port, id.Protocol, id.Family),
			}})
		}
	}
	c.tellQuarantine()
}

func (c *cycle) tellQuarantine() {
	var out []Quarantine
	for id, h := range c.held {
		out = append(out, Quarantine{
			Service: id.String(), Protocol: id.Protocol.String(), Family: id.Family.String(),
			Error: h.err.Error(), Since: h.since, Retry: h.retry, InForce: h.inForce != nil,
		})
	}
	slices.SortFunc(out, func(a, b Quarantine) int {
		return strings.Compare(a.Service+a.Protocol+a.Family, b.Service+b.Protocol+b.Family)
	})
	c.cfg.Stats.Set("svcproxy_quarantined_service_ports", float64(len(out)))
	c.update(func(s *Status) { s.Quarantined = out })
}
