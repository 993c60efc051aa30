package flow

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// Span is a stretch of time.
type Span struct{ From, To time.Time }

func (s Span) overlaps(o Span) bool { return !s.To.Before(o.From) && !o.To.Before(s.From) }

// Load is a stream of requests in the background.
type Load struct {
	name  string
	pulse *pulse
	stop  context.CancelFunc
	wg    sync.WaitGroup

	mu     sync.Mutex // guards all below
	ended  []request
	closed bool
}

// request is one that has ended.
type request struct {
	span  Span
	error string // "": it was answered
}

// StartLoad sends rate requests a second, each over a connection of its own; fewer on a
// slow machine, by as much as it is slower (see Patient): there gaps last longer, too.
// While the machine is behind with everything, none are sent, and silence does not count.
func StartLoad(name string, h *lab.Host, d lab.Dialing, rate float64) (*Load, error) {
	p, err := machine()
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	l := &Load{name: name, pulse: p, stop: stop}
	l.wg.Go(func() {
		tick := time.NewTicker(Patient(time.Duration(float64(time.Second) / rate)))
		defer tick.Stop()
		for {
			if !p.late() {
				l.wg.Go(func() { l.request(h, d) })
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return l, nil
}

func (l *Load) request(h *lab.Host, d lab.Dialing) {
	r := request{span: Span{From: time.Now()}}
	s := Attempt(h, d, Patient(Silence))
	r.span.To = time.Now()
	if s.End != lab.Answered {
		if s.End == lab.Dropped && l.pulse.during(r.span) {
			return
		}
		r.error = fmt.Sprintf("to %s at %s: %s", d.To, r.span.From.Format("15:04:05.000"), s)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = append(l.ended, r)
}

// Expect ends the stream and compares its errors. Those of requests that were under way
// at a time in excused do not count.
func (l *Load) Expect(want int, excused ...Span) error {
	counted, failed := l.Count(excused...)
	if len(failed) != want {
		first := ""
		if len(failed) > 0 {
			first = "; first " + failed[0]
		}
		return fmt.Errorf("load %s: %d errors in %d requests, want %d%s", l.name, len(failed), counted, want, first)
	}
	if counted == 0 && want == 0 {
		return fmt.Errorf("load %s: no request was sent", l.name)
	}
	return nil
}

// Count ends the stream and returns how many requests were not under way at any time in
// excused, and the errors of those.
func (l *Load) Count(excused ...Span) (counted int, failed []string) {
	l.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ended {
		if slices.ContainsFunc(excused, r.span.overlaps) {
			continue
		}
		counted++
		if r.error != "" {
			failed = append(failed, r.error)
		}
	}
	return counted, failed
}

// Ended reports whether the stream has been ended.
func (l *Load) Ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// Close ends the stream.
func (l *Load) Close() {
	l.stop()
	l.wg.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// ParseRate reads rate=R, requests per second.
func ParseRate(s string) (float64, error) {
	v, ok := strings.CutPrefix(s, "rate=")
	r, err := strconv.ParseFloat(v, 64)
	if !ok || err != nil || r <= 0 {
		return 0, world.Usagef("%q: want rate=REQUESTS per second", s)
	}
	return r, nil
}
