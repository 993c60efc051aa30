package scenario

import (
	"net/netip"
	"time"

	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// stage is where a scenario plays: a world of namespaces with a proxy in it, or
// the plan alone. The world's data is up to date when a stage is told of a change.
type stage interface {
	declared(h *world.Host) error
	listen(h *world.Host, s world.Server, on bool) error
	addr(a netip.Addr, add bool) error
	link(h *world.Host) error // it was cut or joined
	// nodeAddrs replaces the node's addresses, before start; old are the former.
	nodeAddrs(old []netip.Addr) error
	config(fragment []byte) error
	start(args []string, mustFail bool) error
	restart(how restarting) error
	put(world.Object) error
	remove(world.Key) error
	sync(within time.Duration) error
	flow(*flow.Spec) error
	health(healthCheck) error
	close() error
}

// healthCheck is one line `health PORT [path=/P] -> CODE [endpoints=N]`.
type healthCheck struct {
	to        []world.Target // the node's address, by family
	from      *world.Host    // nil: the node itself
	path      string
	code      int
	endpoints int // -1: any
}
