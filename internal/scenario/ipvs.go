package scenario

import (
	"fmt"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/ipvsadm"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// ipvs checks PROTO ADDR:PORT [scheduler=S] [servers=N] [persistent=T]
// [weight:IP=W] | absent.
func (k *kernel) ipvs(args []string) error {
	if len(args) < 2 {
		return world.Usagef("want PROTO ADDR:PORT [scheduler=S] [servers=N] [persistent=T] [weight:IP=W] | absent")
	}
	proto, err := lab.ParseProto(args[0])
	if err != nil {
		return world.Usagef("%v", err)
	}
	to, err := k.w.Targets(args[1])
	if err != nil {
		return err
	}
	for _, t := range to {
		err := flow.Eventually(flow.Settle, func() error {
			stdout, stderr, err := k.run(k.w.Node(), "", nil, []string{"ipvsadm", "--save", "--numeric"})
			if err != nil {
				return flow.Final(fmt.Errorf("read virtual servers: %w: %s", err, stderr))
			}
			all, err := ipvsadm.Parse(string(stdout))
			if err != nil {
				return flow.Final(err)
			}
			return all[ipvsadm.ID{Proto: proto, Addr: t.Addr}].Compare(args[2:], k.w.Families == world.Dual && t.V6)
		})
		if err != nil {
			return fmt.Errorf("virtual server %s %s: %w", proto, t.Addr, err)
		}
	}
	return nil
}
