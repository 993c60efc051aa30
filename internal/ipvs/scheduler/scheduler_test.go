package scheduler

import (
	"net/netip"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

func TestSchedulers(t *testing.T) {
	endpoints := func(weights ...uint16) [2][]plan.Endpoint {
		var out [2][]plan.Endpoint
		for i, w := range weights {
			out[plan.Cluster] = append(out[plan.Cluster], plan.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr("10.61.1.1"), uint16(80+i)), Weight: w})
		}
		return out
	}
	for _, c := range []struct {
		scheduler string // configured
		policy    plan.Policy
		weights   []uint16
		want      string
		flags     ipvs.Flags
	}{
		{want: "rr"},
		{scheduler: "wlc", want: "wlc"},
		{scheduler: "mh", want: "mh", flags: ipvs.MHPort},
		{scheduler: "sh", want: "sh"},
		{policy: plan.Policy{Scheduler: "random"}, want: "rr"},
		{policy: plan.Policy{Scheduler: "lc"}, scheduler: "wrr", want: "lc"},
		{policy: plan.Policy{Scheduler: "mh", SourcePort: true}, want: "mh", flags: ipvs.MHPort},
		{policy: plan.Policy{Scheduler: "mh", Fallback: true}, want: "mh", flags: ipvs.MHFallback},
		{policy: plan.Policy{Scheduler: "sh", SourcePort: true, Fallback: true}, want: "sh", flags: ipvs.SHPort | ipvs.SHFallback},
		{weights: []uint16{1, 1, 0}, want: "rr"},
		{weights: []uint16{1, 2, 5}, want: "wrr"},
		{weights: []uint16{1, 2, 5}, scheduler: "lc", want: "wlc"},
		{weights: []uint16{1, 2, 5}, policy: plan.Policy{Scheduler: "rr"}, want: "rr"},
	} {
		sp := &plan.ServicePort{Policy: &c.policy, Pools: endpoints(c.weights...)}
		name, flags := Choice{Scheduler: c.scheduler}.Of(sp)
		if name != c.want || flags != c.flags {
			t.Errorf("%+v: have %s %#x", c, name, flags)
		}
	}
}

func TestSticky(t *testing.T) {
	for missing, want := range map[string]string{"": "mh", "mh": "sh", "mh sh": "rr"} {
		if name, _ := (Choice{Missing: missing}).Sticky(); name != want {
			t.Errorf("without %q: have %s, want %s", missing, name, want)
		}
	}
}
