// Package remark collects what ipvs mode has to say about Services and the Node.
package remark

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// Reasons of this mode's own remarks.
const (
	// NoScheduler: the kernel lacks the scheduler that a Service chose.
	NoScheduler plan.Reason = "SchedulerMissing"
	// Affinity: clients stick to their endpoint for longer than was asked for.
	Affinity plan.Reason = "AffinityLongerThanAsked"
	// Taken: somebody else has a virtual server where a node port needs one.
	Taken plan.Reason = "VirtualServerTaken"
)

// shortestAffinity is the least time for which ip_vs remembers a client: as long as
// connection entries that it closed stay (120 s in state TIME_WAIT), and up to a minute
// until the kernel looks again.
const shortestAffinity = 120 * time.Second

// Log is what is to be said about Services, and the schedulers that are missing.
type Log struct {
	Missing map[string]bool // by name
	notes   []plan.Note
	said    map[saidKey]bool
}

// saidKey is a remark that was made.
type saidKey struct {
	service plan.Name
	reason  plan.Reason
	what    string
}

// New returns one in which nothing is missing.
func New() *Log {
	return &Log{Missing: map[string]bool{}, said: map[saidKey]bool{}}
}

// Choice is how virtual servers balance, as far as is known what the kernel has.
func (r *Log) Choice(name string) scheduler.Choice {
	return scheduler.Choice{Scheduler: name, Missing: strings.Join(slices.Sorted(maps.Keys(r.Missing)), " ")}
}

// Say makes a remark on a Service once.
func (r *Log) Say(id plan.ID, reason plan.Reason, warning bool, what string) {
	key := saidKey{id.Service(), reason, what}
	if r.said[key] {
		return
	}
	r.said[key] = true
	r.notes = append(r.notes, plan.Note{Kind: "Service", Namespace: id.Namespace, Name: id.Name, Reason: reason, Message: what, Warning: warning})
}

// SayOfNode makes a warning on the Node once.
func (r *Log) SayOfNode(node string, reason plan.Reason, what string) {
	key := saidKey{plan.Name{Name: node}, reason, what}
	if r.said[key] {
		return
	}
	r.said[key] = true
	r.notes = append(r.notes, plan.Note{Kind: "Node", Name: node, Reason: reason, Message: what, Warning: true})
}

// Unsay forgets what was said about a Service that is gone.
func (r *Log) Unsay(id plan.ID) {
	maps.DeleteFunc(r.said, func(k saidKey, _ bool) bool { return k.service == id.Service() })
}

// Take returns what was said since the last call.
func (r *Log) Take() []plan.Note {
	out := r.notes
	r.notes = nil
	return out
}

// Lacks says that the kernel has not the scheduler of a Service port, which chose it, or
// of the node's configuration.
func (r *Log) Lacks(name string, id plan.ID, chose bool, node string) {
	const what = "this node's kernel has no IPVS scheduler %q, so that %q is used; load or install the kernel module ip_vs_%[1]s on the node, or choose another one with %[3]s"
	if chose {
		r.Say(id, NoScheduler, true, fmt.Sprintf(what, name, scheduler.Default, "the annotation svcproxy.io/ipvs-scheduler"))
	} else {
		r.SayOfNode(node, NoScheduler, fmt.Sprintf(what, name, scheduler.Default, "the field ipvs.scheduler of the configuration"))
	}
}

// On says what the mode cannot do as a Service port asks.
func (r *Log) On(sp *plan.ServicePort) {
	if sp.Affinity > 0 && sp.Affinity < shortestAffinity && sp.ID.Protocol == plan.TCP {
		r.Say(sp.ID, Affinity, true, fmt.Sprintf(
			"field spec.sessionAffinityConfig.clientIP.timeoutSeconds: %d s are kept for %d s and more in mode ipvs, as long as the kernel remembers closed connections",
			int(sp.Affinity.Seconds()), int(shortestAffinity.Seconds())))
	}
}
