package fronts

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

func TestFollow(t *testing.T) {
	own, other := netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("203.0.113.5")
	sp := func(name string, fes ...plan.Frontend) *plan.ServicePort {
		return &plan.ServicePort{ID: plan.ID{Name: name, Protocol: plan.TCP, Family: plan.IPv4}, Frontends: fes}
	}
	nodePort := sp("a", plan.Frontend{Kind: plan.NodePort, Port: 31080})
	external := sp("b", plan.Frontend{Kind: plan.ExternalIP, Addr: own, Port: 31080}, plan.Frontend{Kind: plan.ExternalIP, Addr: other, Port: 31080})
	p := &plan.Plan{Services: map[plan.ID]*plan.ServicePort{nodePort.ID: nodePort}}
	change := func(id plan.ID, to *plan.ServicePort) plan.Update {
		if p.Services[id] = to; to == nil {
			delete(p.Services, id)
		}
		return plan.Update{Plan: p, Changed: []plan.Change{{ID: id, New: to}}}
	}
	atOwn := map[ipvs.Key]bool{ipvs.ByAddr(ipvs.TCP, netip.AddrPortFrom(own, 31080)): true}
	atBoth := map[ipvs.Key]bool{ipvs.ByAddr(ipvs.TCP, netip.AddrPortFrom(other, 31080)): true}
	maps.Copy(atBoth, atOwn)
	var f Fronts
	for i, step := range []struct {
		u     func() plan.Update
		addrs []netip.Addr
		anew  bool
		want  map[ipvs.Key]bool
	}{
		{func() plan.Update { return plan.Update{Plan: p} }, []netip.Addr{own}, true, nil},
		{func() plan.Update { return change(external.ID, external) }, []netip.Addr{own}, false, atOwn},
		{func() plan.Update { return change(external.ID, external) }, []netip.Addr{own}, false, atOwn}, // once more
		{func() plan.Update { return plan.Update{Plan: p} }, []netip.Addr{own, other}, false, atBoth},
		{func() plan.Update { return change(nodePort.ID, nil) }, []netip.Addr{own, other}, false, nil},
		{func() plan.Update { return change(nodePort.ID, nodePort) }, []netip.Addr{own, other}, false, atBoth},
		{func() plan.Update { return plan.Update{Plan: p} }, []netip.Addr{own}, true, atOwn},
		{func() plan.Update { return change(external.ID, nil) }, []netip.Addr{own}, false, nil},
	} {
		if have := f.Follow(step.u(), plan.IPv4, step.addrs, step.anew); !maps.Equal(have, step.want) {
			t.Errorf("step %d: have %v, want %v", i, have, step.want)
		}
	}
}
