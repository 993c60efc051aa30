package ipvs

import (
	"errors"
	"fmt"

	"github.com/svcproxy/svcproxy/internal/ipvs/remark"
	"github.com/svcproxy/svcproxy/internal/ipvs/scheduler"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

// Remarks implements dataplane.Remarker.
func (b *backend) Remarks() []plan.Note {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.remarks.Take()
}

// withScheduler carries out an operation on a virtual server; one whose scheduler the
// kernel lacks gets the default.
func (f *family) withScheduler(v ipvs.VirtualServer, op func(ipvs.VirtualServer) error) error {
	if !f.remarks.Missing[v.Scheduler] {
		err := op(v)
		if !errors.Is(err, ipvs.ErrNoScheduler) || v.Scheduler == scheduler.Default {
			return err
		}
		f.remarks.Missing[v.Scheduler] = true
	}
	const what = "this node's kernel has no IPVS scheduler %q, so that %q is used; load or install the kernel module ip_vs_%[1]s on the node, or choose another one with %[3]s"
	id := f.owners[v.Key]
	if svc := f.services[id]; svc != nil && svc.sp.Chosen().Scheduler == v.Scheduler {
		f.remarks.Say(id, remark.NoScheduler, true, fmt.Sprintf(what, v.Scheduler, scheduler.Default, "the annotation svcproxy.io/ipvs-scheduler"))
	} else {
		f.remarks.SayOfNode(f.node, remark.NoScheduler, fmt.Sprintf(what, v.Scheduler, scheduler.Default, "the field ipvs.scheduler of the configuration"))
	}
	v.Scheduler, v.Flags = scheduler.Default, v.Flags&ipvs.Persistent
	f.servers.Want(v.Key, v)
	return op(v)
}
