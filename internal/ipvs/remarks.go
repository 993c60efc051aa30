package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

// Reasons of this mode's own remarks.
const (
	// ReasonNoScheduler: the kernel lacks the scheduler that a Service chose.
	ReasonNoScheduler plan.Reason = "SchedulerMissing"
	// ReasonAffinity: clients stick to their endpoint for longer than was asked for.
	ReasonAffinity plan.Reason = "AffinityLongerThanAsked"
)

// shortestAffinity is the least time for which ip_vs remembers a client: as long as
// connection entries that it closed stay (120 s in state TIME_WAIT), and up to a minute
// until the kernel looks again.
const shortestAffinity = 120 * time.Second

// remarks is what is to be said about Services, and the schedulers that are missing.
type remarks struct {
	missing map[string]bool
	notes   []plan.Note
	said    map[saidKey]bool
}

// saidKey is a remark that was made.
type saidKey struct {
	service plan.Name
	reason  plan.Reason
	what    string
}

func newRemarks() *remarks {
	return &remarks{missing: map[string]bool{}, said: map[saidKey]bool{}}
}

// choice is how virtual servers balance, as far as is known what the kernel has.
func (r *remarks) choice(name string) scheduler.Choice {
	return scheduler.Choice{Scheduler: name, Missing: strings.Join(slices.Sorted(maps.Keys(r.missing)), " ")}
}

// say makes a remark on a Service once.
func (r *remarks) say(id plan.ID, reason plan.Reason, warning bool, what string) {
	key := saidKey{id.Service(), reason, what}
	if r.said[key] {
		return
	}
	r.said[key] = true
	r.notes = append(r.notes, plan.Note{Kind: "Service", Namespace: id.Namespace, Name: id.Name, Reason: reason, Message: what, Warning: warning})
}

// sayOfNode makes a warning on the Node once.
func (r *remarks) sayOfNode(node string, reason plan.Reason, what string) {
	key := saidKey{plan.Name{Name: node}, reason, what}
	if r.said[key] {
		return
	}
	r.said[key] = true
	r.notes = append(r.notes, plan.Note{Kind: "Node", Name: node, Reason: reason, Message: what, Warning: true})
}

// unsay forgets what was said about a Service that is gone.
func (r *remarks) unsay(id plan.ID) {
	maps.DeleteFunc(r.said, func(k saidKey, _ bool) bool { return k.service == id.Service() })
}

// Remarks implements dataplane.Remarker.
func (b *backend) Remarks() []plan.Note {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.remarks.notes
	b.remarks.notes = nil
	return out
}

// withScheduler carries out an operation on a virtual server; one whose scheduler the
// kernel lacks gets the default.
func (f *family) withScheduler(v ipvs.VirtualServer, op func(ipvs.VirtualServer) error) error {
	if !f.remarks.missing[v.Scheduler] {
		err := op(v)
		if !errors.Is(err, ipvs.ErrNoScheduler) || v.Scheduler == scheduler.Default {
			return err
		}
		f.remarks.missing[v.Scheduler] = true
	}
	const what = "this node's kernel has no IPVS scheduler %q, so that %q is used; load or install the kernel module ip_vs_%[1]s on the node, or choose another one with %[3]s"
	id := f.owners[v.Key]
	if svc := f.services[id]; svc != nil && svc.sp.Chosen().Scheduler == v.Scheduler {
		f.remarks.say(id, ReasonNoScheduler, true, fmt.Sprintf(what, v.Scheduler, scheduler.Default, "the annotation svcproxy.io/ipvs-scheduler"))
	} else {
		f.remarks.sayOfNode(f.node, ReasonNoScheduler, fmt.Sprintf(what, v.Scheduler, scheduler.Default, "the field ipvs.scheduler of the configuration"))
	}
	v.Scheduler, v.Flags = scheduler.Default, v.Flags&ipvs.Persistent
	f.servers.Want(v.Key, v)
	return op(v)
}

// remarkOn says what this mode cannot do as a Service port asks.
func (f *family) remarkOn(sp *plan.ServicePort) {
	if sp.Affinity > 0 && sp.Affinity < shortestAffinity && sp.ID.Protocol == plan.TCP {
		f.remarks.say(sp.ID, ReasonAffinity, true, fmt.Sprintf(
			"field spec.sessionAffinityConfig.clientIP.timeoutSeconds: %d s are kept for %d s and more in mode ipvs, as long as the kernel remembers closed connections",
			int(sp.Affinity.Seconds()), int(shortestAffinity.Seconds())))
	}
}
