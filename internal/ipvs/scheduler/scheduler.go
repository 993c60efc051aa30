// Package scheduler says how the virtual servers of a Service balance.
package scheduler

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

// Default balances where nothing is chosen, as with kube-proxy.
const Default = "rr"

// schedulers are those of Linux; each but the first is the kernel module ip_vs_NAME.
var schedulers = [...]string{"rr", "wrr", "lc", "wlc", "fo", "ovf", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "twos"}

// Missing lists the schedulers that the kernel lacks, having tried each; the modules of
// those that it has are loaded then.
func Missing(ctx context.Context, k ipvs.IPVS) []string {
	var out []string
	for _, s := range schedulers {
		if err := k.Probe(ctx, ipvs.IPv4, s); errors.Is(err, ipvs.ErrNoScheduler) {
			out = append(out, s)
		}
	}
	return out
}

// Choice is how virtual servers balance.
type Choice struct {
	Scheduler string // of all Services that choose none; "" stands for rr
	Missing   string // schedulers that this kernel lacks, each in front of a space
}

// isMissing reports whether the kernel is known to lack a scheduler.
func (c Choice) isMissing(scheduler string) bool {
	return slices.Contains(strings.Fields(c.Missing), scheduler)
}

// Of returns a Service port's scheduler and the flags for it. Weights that differ have
// no effect in rr and lc, so that their weighted kin are used where nobody asked for
// the former.
func (c Choice) Of(sp *plan.ServicePort) (string, ipvs.Flags) {
	p := sp.Chosen()
	name := p.Scheduler
	if !slices.Contains(schedulers[:], name) || c.isMissing(name) {
		name = cmp.Or(c.Scheduler, Default)
		if c.isMissing(name) {
			name = Default
		}
		if weighted := map[string]string{"rr": "wrr", "lc": "wlc"}[name]; weighted != "" && weightsDiffer(sp) && !c.isMissing(weighted) {
			name = weighted
		}
		if name == "mh" && p.Scheduler == "" { // as kube-proxy sets it
			return name, ipvs.MHPort
		}
	}
	var flags ipvs.Flags
	switch name {
	case "sh":
		flags = pick(p.SourcePort, ipvs.SHPort) | pick(p.Fallback, ipvs.SHFallback)
	case "mh":
		flags = pick(p.SourcePort, ipvs.MHPort) | pick(p.Fallback, ipvs.MHFallback)
	}
	return name, flags
}

// Sticky returns a scheduler that gives a client the same endpoint by its address, for
// virtual servers by mark: with persistence these do not translate ports.
func (c Choice) Sticky() (string, ipvs.Flags) {
	switch {
	case !c.isMissing("mh"):
		return "mh", ipvs.MHFallback
	case !c.isMissing("sh"):
		return "sh", ipvs.SHFallback
	}
	return Default, 0
}

func pick(yes bool, f ipvs.Flags) ipvs.Flags {
	if yes {
		return f
	}
	return 0
}

// weightsDiffer reports whether some endpoint is to have more of the new flows than
// another that has some.
func weightsDiffer(sp *plan.ServicePort) bool {
	for _, pool := range sp.Pools {
		first := uint16(0)
		for _, e := range pool {
			switch {
			case e.Weight == 0:
			case first == 0:
				first = e.Weight
			case e.Weight != first:
				return true
			}
		}
	}
	return false
}
