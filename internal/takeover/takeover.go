// Package takeover makes one mode the only one on a node. Once the loop has the whole
// plan in the kernel, the self-probe shows that packets are forwarded as this mode
// says, and only then is removed what other modes have left, those of a kube-proxy
// included. Until then the old and the new rules serve side by side.
//
// While a kube-proxy runs on the node its rules stay, because it would write them
// again; that is reported, and they are removed once it has ended. A svcproxy in another
// mode that has not ended yet takes the removal for interference and repairs it: what it
// writes is removed again, until nothing has come back for a while.
//
// Limits: the self-probe is a TCP connection from the node to one of its own
// addresses. It shows that the kernel has the mode's hooks, translation and return
// path, and a comparison shows that every Service is there; whether endpoints answer
// is not its business. A family in which the node has no address is not probed.
package takeover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// Reasons of what is told.
const (
	// ReasonVerified: the mode passed its self-probe, and others' objects are gone.
	ReasonVerified plan.Reason = "ModeVerified"
	// ReasonUnverified: the self-probe fails; the objects of the other modes stay.
	ReasonUnverified plan.Reason = "SelfProbeFailed"
	// ReasonRival: a kube-proxy runs on this node too.
	ReasonRival plan.Reason = "KubeProxyRunning"
	// ReasonRivalGone: it has ended.
	ReasonRivalGone plan.Reason = "KubeProxyEnded"
)

// Other is a mode that must not be in force.
type Other struct {
	Name string
	// InForce reports whether packets may pass its objects; nil: it cannot be told,
	// and they are expected to.
	InForce func(context.Context) (bool, error)
	// Remove removes all of them; harmless if there are none. A *dataplane.Draining says
	// that new flows do not pass them any more, while open connections do: it is called
	// again.
	Remove func(context.Context) error
}

// Loop is what programs the mode.
type Loop interface {
	// Do runs f between two Applies and plans again.
	Do(ctx context.Context, f func()) error
	Status() dataplane.Status
}

// Planner puts the self-probe's Service into the plan. It is only called within
// Loop.Do.
type Planner interface {
	Hold(id plan.ID, sp *plan.ServicePort)
	Release(id plan.ID)
}

// Config is what a Takeover works with. Differ, Rival and Leftovers may be nil.
type Config struct {
	Mode     string
	Families []plan.Family
	Others   []Other
	// Leftovers removes what a kube-proxy has left in the mode itself.
	Leftovers func(context.Context) error
	Loop      Loop
	Planner   Planner
	Differ    dataplane.Differ
	// Rival looks for a kube-proxy on this node.
	Rival func(context.Context) *Rival
	// Tell receives what people should know; it must not block.
	Tell  func(reason plan.Reason, warning bool, message string)
	Stats dataplane.Stats
	Log   *slog.Logger

	// Listen and Dial are net.Listen and a dialer's DialContext for TCP; nil: those of
	// the process.
	Listen func(addr string) (net.Listener, error)
	Dial   func(ctx context.Context, addr string) (net.Conn, error)

	// Look is the pause between two looks for a kube-proxy, Retry the first one
	// after a failed attempt; it doubles up to Look. 0: 5 s and 1 s.
	Look, Retry time.Duration
	// Watch is for how long the objects of other modes have to stay away once they were
	// removed; 0: 2 minutes.
	Watch time.Duration
}

// Status is a snapshot for people.
type Status struct {
	// Verified is when the self-probe passed; zero: it did not, or was not needed
	// because no other mode was in force.
	Verified time.Time `json:"verified,omitzero"`
	// InForce are the other modes whose objects are in force still.
	InForce []string `json:"otherModesInForce,omitempty"`
	// Error is why they are.
	Error string `json:"error,omitempty"`
	// Draining says which connections still need objects of other modes, which are not in
	// force.
	Draining string `json:"draining,omitempty"`
	// KubeProxy describes a kube-proxy that runs on this node.
	KubeProxy string `json:"kubeProxy,omitempty"`
}

// Takeover is one at work. Its methods are safe for concurrent use.
type Takeover struct {
	cfg   Config // immutable after New
	begun chan struct{}
	once  sync.Once

	// Of Run alone.
	told    string    // of an attempt that succeeded
	removed time.Time // when objects in force were removed last; zero: never

	mu      sync.Mutex // guards all below
	node    *plan.Node
	applied map[plan.ID]*plan.ServicePort // probes that the kernel has
	plan    *plan.Plan
	changed chan struct{} // has a value when applied changed
	status  Status
}

// New returns a Takeover that has touched nothing.
func New(cfg Config) *Takeover {
	if cfg.Look == 0 {
		cfg.Look = 5 * time.Second
	}
	if cfg.Retry == 0 {
		cfg.Retry = time.Second
	}
	if cfg.Watch == 0 {
		cfg.Watch = 2 * time.Minute
	}
	if cfg.Rival == nil {
		cfg.Rival = func(context.Context) *Rival { return nil }
	}
	if cfg.Leftovers == nil {
		cfg.Leftovers = func(context.Context) error { return nil }
	}
	if cfg.Listen == nil {
		cfg.Listen = func(addr string) (net.Listener, error) { return net.Listen("tcp", addr) }
	}
	if cfg.Dial == nil {
		cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	return &Takeover{cfg: cfg, begun: make(chan struct{}), applied: map[plan.ID]*plan.ServicePort{}, changed: make(chan struct{}, 1)}
}

// Follow implements dataplane.Follower.
func (t *Takeover) Follow(u plan.Update) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.plan, t.node = u.Plan, u.Plan.Node
	for _, c := range u.Changed {
		if !isProbe(c.ID) {
			continue
		}
		if c.New == nil {
			delete(t.applied, c.ID)
		} else {
			t.applied[c.ID] = c.New
		}
		select {
		case t.changed <- struct{}{}:
		default:
		}
	}
}

// Begin says that the whole plan is in the kernel.
func (t *Takeover) Begin() { t.once.Do(func() { close(t.begun) }) }

// Status returns a snapshot.
func (t *Takeover) Status() Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.status
	s.InForce = append([]string(nil), s.InForce...)
	return s
}

// Problem says what keeps this mode from being the only one, "" if nothing does.
func (t *Takeover) Problem() string {
	s := t.Status()
	switch {
	case s.KubeProxy != "":
		return "a kube-proxy runs on this node too: " + s.KubeProxy
	case s.Error != "":
		return s.Error
	}
	return ""
}

// Run works until ctx ends.
func (t *Takeover) Run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-t.begun:
	}
	done, pause := false, t.cfg.Retry
	ended := false // a kube-proxy has, since the last attempt that succeeded
	var rival *Rival
	for {
		now := t.cfg.Rival(ctx)
		if ctx.Err() != nil {
			return
		}
		if t.tellRival(rival, now) {
			done, ended = false, true // it may have written until its last moment
		}
		rival = now
		if done && rival == nil && t.cameBack(ctx) {
			done = false
		}
		if !done {
			err := t.attempt(ctx, rival, ended)
			if ctx.Err() != nil {
				return
			}
			_, drains := errors.AsType[*dataplane.Draining](err)
			done = err == nil
			ended = ended && !done && !drains
			t.tellAttempt(err)
		}
		wait := t.cfg.Look
		if !done && rival == nil {
			wait, pause = pause, min(2*pause, t.cfg.Look)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// cameBack reports whether objects of other modes are in force again that were removed a
// short while ago: their process runs still, or wrote them before it ended.
func (t *Takeover) cameBack(ctx context.Context) bool {
	if t.removed.IsZero() || time.Since(t.removed) > t.cfg.Watch {
		return false
	}
	back := t.inForce(ctx)
	if len(back) > 0 {
		t.cfg.Log.Warn("the objects of other modes are back and are removed again; a process in that mode has written them: end it", "modes", back)
	}
	return len(back) > 0
}

// errRival: the objects in force are those of a kube-proxy at work.
var errRival = errors.New("they are kept while the kube-proxy runs that writes them")

// attempt verifies this mode and removes the others. ended: a kube-proxy has written
// what Apply may not know of.
func (t *Takeover) attempt(ctx context.Context, rival *Rival, ended bool) error {
	inForce := t.inForce(ctx)
	t.update(func(s *Status) { s.InForce = inForce })
	if len(inForce) > 0 {
		if err := t.verify(ctx); err != nil {
			return fmt.Errorf("the self-probe of mode %s fails, so the objects of %s stay in force: %w", t.cfg.Mode, strings.Join(inForce, ", "), err)
		}
	}
	if (len(inForce) > 0 || t.Status().Draining != "") && rival != nil && rival.Mode != t.cfg.Mode {
		return errRival
	}
	var errs []error
	var draining *dataplane.Draining
	for _, o := range t.cfg.Others {
		if err := o.Remove(ctx); errors.As(err, &draining) {
			t.cfg.Log.Debug("objects of another mode stay for a while", "mode", o.Name, "why", err)
		} else if err != nil {
			errs = append(errs, fmt.Errorf("remove the objects of mode %s: %w", o.Name, err))
		}
	}
	if rival == nil && (ended || len(inForce) > 0) {
		if err := t.cfg.Leftovers(ctx); err != nil {
			errs = append(errs, fmt.Errorf("remove what a kube-proxy left: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	t.update(func(s *Status) { s.InForce = nil })
	if len(inForce) > 0 {
		t.removed = time.Now()
	}
	text := fmt.Sprintf("mode %s passed its self-probe; the objects of %s were removed", t.cfg.Mode, strings.Join(inForce, ", "))
	if draining != nil {
		text += fmt.Sprintf(", but for what open connections of mode %s need", draining.Mode)
	}
	if len(inForce) > 0 && text != t.told {
		t.told = text
		t.cfg.Tell(ReasonVerified, false, text)
	}
	if draining != nil {
		return draining
	}
	return nil
}

// InForce reports whether packets may pass objects of other modes.
func (t *Takeover) InForce(ctx context.Context) bool { return len(t.inForce(ctx)) > 0 }

// inForce lists the other modes whose objects packets may pass.
func (t *Takeover) inForce(ctx context.Context) []string {
	var out []string
	for _, o := range t.cfg.Others {
		if o.InForce == nil {
			out = append(out, o.Name)
			continue
		}
		found, err := o.InForce(ctx)
		if err != nil && ctx.Err() == nil {
			t.cfg.Log.Warn("whether another mode is in force cannot be told", "mode", o.Name, "err", err)
		}
		if found || err != nil {
			out = append(out, o.Name)
		}
	}
	return out
}

// verify shows that the kernel forwards as this mode says.
func (t *Takeover) verify(ctx context.Context) error {
	for _, f := range t.cfg.Families {
		if err := t.probe(ctx, f); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
	}
	if err := t.compare(ctx); err != nil {
		return err
	}
	t.update(func(s *Status) { s.Verified = time.Now() })
	return nil
}

// compare looks for differences between the plan and the kernel, while nothing is
// pending and everything was accepted.
func (t *Takeover) compare(ctx context.Context) error {
	if t.cfg.Differ == nil {
		return nil
	}
	var lines []string
	var err error
	if doErr := t.cfg.Loop.Do(ctx, func() {
		s := t.cfg.Loop.Status()
		t.mu.Lock()
		p := t.plan
		t.mu.Unlock()
		if p != nil && s.PendingSince.IsZero() && len(s.Quarantined) == 0 {
			lines, err = t.cfg.Differ.Diff(ctx, p)
		}
	}); doErr != nil {
		return doErr
	}
	switch {
	case err != nil:
		return fmt.Errorf("compare the plan with the kernel: %w", err)
	case len(lines) > 0:
		return fmt.Errorf("the kernel differs from the plan in %d places, the first: %s", len(lines), lines[0])
	}
	return nil
}

// tellRival tells when a kube-proxy appears or ends, and reports whether one ended.
func (t *Takeover) tellRival(was, now *Rival) (ended bool) {
	text, gauge := "", 0.0
	if now != nil {
		text, gauge = now.String(), 1
	}
	t.update(func(s *Status) { s.KubeProxy = text })
	t.cfg.Stats.Set("svcproxy_kube_proxy_running", gauge)
	switch {
	case was == nil && now != nil:
		t.cfg.Tell(ReasonRival, true, fmt.Sprintf("a kube-proxy runs on this node too: %s. Both program every Service; end it (remove the kube-proxy DaemonSet, or its flag in the distribution)", text))
	case was != nil && now == nil:
		t.cfg.Tell(ReasonRivalGone, false, "the kube-proxy on this node has ended")
		return true
	}
	return false
}

// tellAttempt remembers how an attempt went and tells what is new.
func (t *Takeover) tellAttempt(err error) {
	text, drains := "", ""
	if draining, ok := errors.AsType[*dataplane.Draining](err); ok {
		drains, err = draining.Error(), nil
	} else if err != nil {
		text = err.Error()
	}
	t.mu.Lock()
	was := t.status.Error
	t.status.Error = text
	if !errors.Is(err, errRival) {
		t.status.Draining = drains
	}
	t.mu.Unlock()
	switch {
	case err == nil || was == text:
	case errors.Is(err, errRival):
		t.cfg.Log.Info("the objects of other modes stay for now", "why", err)
	default:
		t.cfg.Tell(ReasonUnverified, true, text)
	}
}

func (t *Takeover) update(f func(*Status)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(&t.status)
}
