// Package dataplane runs a mode: it waits for facts, paces, plans, applies,
// retries, and then tells health, metrics and the clean-up of stale flows. What a
// mode is, is defined here too.
package dataplane

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Backend makes a kernel do what a plan says. One goroutine calls Apply and
// Invalidate.
type Backend interface {
	// Apply makes the node forward exactly what u.Plan says. u.Changed is enough
	// to know what differs from the last Apply that returned nil; after
	// Invalidate, and at first, the whole plan counts. Harmless if repeated. An
	// error that one object causes is an *ObjectError.
	Apply(ctx context.Context, u plan.Update) error
	// Invalidate forgets what is believed about the kernel: the next Apply reads
	// it back and repairs it.
	Invalidate()
}

// Watcher is a Backend that can notice that somebody else changed its kernel
// objects.
type Watcher interface {
	// Watch calls disturbed, with what was found, until ctx ends. It may run
	// beside Apply.
	Watch(ctx context.Context, disturbed func(what string)) error
}

// Server is a Backend that carries traffic itself.
type Server interface {
	// Serve runs beside the loop until ctx ends, and returns when the traffic that it
	// carries then has ended or had its time.
	Serve(ctx context.Context) error
}

// Differ is a Backend that can compare a plan with the kernel without writing.
type Differ interface {
	// Diff returns a line for each difference, "-" before what the kernel has
	// too much, "+" before what it lacks; none if the kernel is as planned.
	Diff(ctx context.Context, p *plan.Plan) ([]string, error)
}

// Follower works beside a Backend on what the kernel was made to do, as the
// forwarder of node ports on loopback and the prober of endpoints do.
type Follower interface {
	// Follow receives every update after it was applied, the partial one included,
	// so that all that was ever in u.Changed is the plan. It is called on the loop's
	// goroutine and must not block or keep the plan's maps.
	Follow(u plan.Update)
}

// ObjectError is a failure that one ServicePort causes. The rest was applied or
// can be, without it.
type ObjectError struct {
	ID  plan.ID
	Err error
}

func (e *ObjectError) Error() string {
	return fmt.Sprintf("%s %s %s: %v", e.ID, e.ID.Protocol, e.ID.Family, e.Err)
}

func (e *ObjectError) Unwrap() error { return e.Err }

// Stats receives figures by the metric's name without the "kubeproxy_" prefix
// (own metrics carry "svcproxy_"), and the values of its labels in order.
type Stats interface {
	Add(metric string, v float64, labels ...string)
	Set(metric string, v float64, labels ...string)
	Observe(metric string, v float64, labels ...string)
}

// Env is what a mode gets from outside.
type Env struct {
	Log      *slog.Logger
	Stats    Stats
	Families []plan.Family // those that the host can do
	// MasqueradeBit is the bit of the packet mark that asks for source NAT, 0 to 31.
	MasqueradeBit int
	// BeLiberal: conntrack accepts out-of-window TCP segments, so that nothing
	// needs to be dropped as INVALID.
	BeLiberal bool
}

// Mark returns the packet mark that asks for source NAT.
func (e Env) Mark() uint32 { return 1 << e.MasqueradeBit }

// Mode is one way of making Services work.
type Mode struct {
	Name string
	// OwnFlows: the mode ends stale UDP flows itself; entries of the connection
	// tracking table are left alone.
	OwnFlows bool
	// Supported returns nil or what is missing, by name, and the remedy.
	Supported func(context.Context) error
	// Limits says what some Services cannot have here although the mode works, and the
	// remedy. nil: there is nothing of that kind.
	Limits func(context.Context) []string
	// New touches nothing.
	New func(Env) (Backend, error)
	// Cleanup removes every trace, kube-proxy's in the same mode too; safe if there is
	// none, and without API.
	Cleanup func(context.Context, Env) error
	// CleanupOwn removes svcproxy's objects and leaves those of a kube-proxy in the same
	// mode. nil: both use the same ones, or there are none of svcproxy alone.
	CleanupOwn func(context.Context, Env) error
	// HandOver is Cleanup once another mode has taken over, for one whose objects open
	// connections need: new flows are the other mode's at once, and until the last
	// connection has ended or had its time it returns a *Draining and is called again.
	// nil: Cleanup does.
	HandOver func(context.Context, Env) error
	// InForce reports whether new flows may still pass objects of the mode, svcproxy's
	// or kube-proxy's. nil: it cannot be told.
	InForce func(context.Context, Env) (bool, error)
	// CleanupKubeProxy removes what a kube-proxy in this mode has left, but for what
	// svcproxy has taken over. nil: there is nothing that could be told apart.
	CleanupKubeProxy func(context.Context, Env) error
}

// Draining says that open connections still need objects of a mode that is not in force
// any more.
type Draining struct {
	Mode        string
	Connections int
	Until       time.Time // when they end at the latest
}

func (d *Draining) Error() string {
	return fmt.Sprintf("%d open connections of mode %s may go on until %s", d.Connections, d.Mode, d.Until.Format(time.RFC3339))
}
