package probe

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Reasons of remarks on endpoints that flip.
const (
	ReasonFailing plan.Reason = "EndpointFails"  // an endpoint fails its health check
	ReasonPassing plan.Reason = "EndpointPasses" // it passes again
)

// Remarks on single endpoints are bounded: a zone that is cut off would else drown
// everything.
const (
	remarkEvery = 6 * time.Second
	remarkBurst = 20
)

// remarks tells people which endpoints flip.
type remarks struct {
	notes   func([]plan.Note)
	log     *slog.Logger
	limit   *rate.Limiter
	skipped *int
}

func newRemarks(cfg Config) remarks {
	return remarks{notes: cfg.Notes, log: cfg.Log, limit: rate.NewLimiter(rate.Every(remarkEvery), remarkBurst), skipped: new(int)}
}

// flipped tells that a user's target flipped.
func (r remarks) flipped(u user, t *target) {
	if !r.limit.Allow() {
		*r.skipped++
		return
	}
	if *r.skipped > 0 {
		r.log.Warn("more endpoints than are told one by one failed their health check, or pass it again", "untold", *r.skipped)
		*r.skipped = 0
	}
	n := plan.Note{Kind: "Service", Namespace: u.service.Namespace, Name: u.service.Name}
	if t.failing {
		n.Reason, n.Warning = ReasonFailing, true
		n.Message = fmt.Sprintf("endpoint %s fails its health check %s (the last time: %s): it gets no new flows from this node while others pass", u.endpoint, checkText(t), t.reason)
	} else {
		n.Reason = ReasonPassing
		n.Message = fmt.Sprintf("endpoint %s passes its health check %s again", u.endpoint, checkText(t))
		r.log.Info("an endpoint passes its health check again", "service", u.service, "endpoint", u.endpoint)
	}
	r.notes([]plan.Note{n})
}

// checkText is the check as in the annotation.
func checkText(t *target) string {
	h := t.check.Value()
	h.Port = t.at.Port()
	return h.String()
}

// Status is a snapshot of what is probed.
type Status struct {
	Targets int           `json:"targets"` // places to probe
	Failing []Failing     `json:"failing,omitempty"`
	Untold  int           `json:"failingNotListed,omitempty"` // more than are in Failing
	Late    time.Duration `json:"late"`                       // of the last probe that began, nanoseconds
}

// Failing is an endpoint that fails its health check.
type Failing struct {
	Service  string         `json:"service"` // namespace/name
	Endpoint netip.AddrPort `json:"endpoint"`
	Check    string         `json:"check"` // as in the annotation
	Since    time.Time      `json:"since"`
	Reason   string         `json:"reason"` // of the last failure
}

// mostListed bounds Status.Failing.
const mostListed = 100

// Status returns a snapshot.
func (p *Prober) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{Targets: len(p.targets), Late: p.late}
	for u := range p.reported {
		if t := p.users[u]; t != nil {
			s.Failing = append(s.Failing, Failing{u.service.String(), u.endpoint, checkText(t), t.since, t.reason})
		}
	}
	slices.SortFunc(s.Failing, func(a, b Failing) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), a.Endpoint.Compare(b.Endpoint))
	})
	if n := len(s.Failing) - mostListed; n > 0 {
		s.Failing, s.Untold = s.Failing[:mostListed], n
	}
	return s
}
