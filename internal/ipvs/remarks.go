package ipvs

import (
	"errors"

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
	svc := f.services[f.owners[v.Key]]
	f.remarks.Lacks(v.Scheduler, f.owners[v.Key], svc != nil && svc.sp.Chosen().Scheduler == v.Scheduler, f.node)
	v.Scheduler, v.Flags = scheduler.Default, v.Flags&ipvs.Persistent
	f.servers.Want(v.Key, v)
	return op(v)
}
