package dataplane

import (
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Timed is a Backend with work that comes due by itself.
type Timed interface {
	// Due returns when the next Apply has to happen though nothing changed; zero:
	// never. The loop's goroutine calls it.
	Due() time.Time
}

// Remarker is a Backend with remarks of its own on objects.
type Remarker interface {
	// Remarks returns what came up since the last call. The loop asks after each
	// Apply.
	Remarks() []plan.Note
}

// Reporter is a Backend that can say how it set up the kernel.
type Reporter interface {
	// Report returns a line for each setting, what it is and why if that is not
	// plain. Safe beside Apply.
	Report() []string
}

// backendDue returns when the Backend's own work is due; false: there is none.
func (c *cycle) backendDue() (time.Time, bool) {
	t, ok := c.cfg.Backend.(Timed)
	if !ok {
		return time.Time{}, false
	}
	at := t.Due()
	return at, !at.IsZero()
}

// takeRemarks hands on what the Backend has to say.
func (c *cycle) takeRemarks() {
	if r, ok := c.cfg.Backend.(Remarker); ok {
		if notes := r.Remarks(); len(notes) > 0 {
			c.cfg.Notes(notes)
		}
	}
}

// report is what the Backend set up.
func (l *Loop) report() []string {
	if r, ok := l.cfg.Backend.(Reporter); ok {
		return r.Report()
	}
	return nil
}
