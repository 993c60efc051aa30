package iptables

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strconv"

	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// translated ends a filter chain for packets that were sent to an endpoint: their
// destination is that endpoint now, even if some frontend has the same address.
const translated = translatedOnly + " -j RETURN"

const translatedOnly = "-m conntrack --ctstate DNAT"

// lastRule says that packets must not get past a rule.
const lastRule = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"

func (r *renderer) natTop(d *dispatch) {
	mark := fmt.Sprintf("0x%x", r.mark)
	r.Begin(rule.NAT(chainMarkMasq))
	r.Add("-j MARK --set-xmark " + mark + "/" + mark)
	r.Begin(rule.NAT(chainPostrouting))
	if r.compact { // else the endpoints' chains ask for it
		r.Add(rule.Comment("endpoints that reach themselves through a Service"), translatedOnly, rule.ToItself(sys.Family(r.family)), rule.Masquerade)
	}
	r.Add("-m mark ! --mark "+mark+"/"+mark, rule.Return)
	r.Add("-j MARK --set-xmark " + mark + "/0x0") // so that a tunnel's packets are not translated again
	r.Add(rule.Comment("kubernetes service traffic requiring SNAT"), rule.Masquerade)
	r.Begin(rule.NAT(chainCanary))
	r.Begin(rule.Filter(chainCanary))
	if len(r.pod) > 1 {
		r.Begin(rule.NAT(chainMasqOthers))
		for _, p := range r.pod {
			r.Add(p, rule.Return)
		}
		r.Add(markMasq)
	}
	top := rule.Tree{Set: &r.Set, Chain: rule.NAT, Prefix: prefixAddr}
	r.Begin(rule.NAT(chainServices))
	at := r.Mark()
	top.Write(d.addresses)
	r.AddTo(at, func() { r.toNodePorts(chainNodePorts) })
	r.Begin(rule.NAT(chainNodePorts))
	ports := rule.Tree{Set: &r.Set, Chain: rule.NAT, Prefix: prefixPort}
	ports.Write(d.ports)
}

// toNodePorts leads packets to the addresses that accept node ports to a chain.
func (r *renderer) toNodePorts(chain string) {
	np := r.node.NodePorts[r.family]
	if !np.All {
		for _, a := range np.Addrs {
			r.Add(rule.ToAddr(a), rule.Comment(lastRule), rule.Jump(chain))
		}
		return
	}
	// Service addresses that the node has on an interface are local, but no node
	// port is served on them.
	for _, a := range r.node.Addrs {
		if plan.FamilyOf(a) == r.family && !a.IsLoopback() && !slices.Contains(np.Addrs, a) {
			r.Add(rule.ToAddr(a), rule.Comment("not for node ports"), rule.Return)
		}
	}
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	if r.family == plan.IPv6 {
		loopback = netip.MustParsePrefix("::1/128")
	}
	r.Add("! "+rule.To(loopback), rule.Comment(lastRule), rule.DstLocal, rule.Jump(chain))
}

// filterServices refuses what was sent to a ClusterIP and not translated.
func (r *renderer) filterServices(d *dispatch, services iter.Seq[*plan.ServicePort]) {
	r.Begin(rule.Filter(chainServices))
	at := r.Mark()
	if len(d.cluster)+len(d.external)+len(d.extPorts) > 0 {
		r.Add(translated)
	}
	t := rule.Tree{Set: &r.Set, Chain: rule.Filter, Prefix: prefixAddr}
	t.Write(rule.WithoutRepeats(d.cluster))
	r.AddTo(at, func() {
		if len(d.external)+len(d.extPorts) > 0 {
			r.Add(rule.Comment("external addresses, from this node"), rule.SrcLocal, rule.Jump(chainExternal))
		}
		for _, a := range r.node.ExternalWithin(services, r.family) {
			r.Add(rule.ToAddr(a), rule.Comment("an external address of a Service"), rule.Return)
		}
		for _, p := range r.family.Prefixes(r.node.ServiceCIDRs) {
			r.Add(rule.To(p), rule.Comment("no Service has the address"), rule.Drop)
		}
	})
}

// filterExternal refuses or drops what was sent to an external address or a node
// port and not translated.
func (r *renderer) filterExternal(d *dispatch) {
	r.Begin(rule.Filter(chainExternal))
	at := r.Mark()
	if len(d.external)+len(d.extPorts) > 0 {
		r.Add(translated)
	}
	t := rule.Tree{Set: &r.Set, Chain: rule.Filter, Prefix: prefixExtAddr}
	t.Write(d.external)
	if len(d.extPorts) == 0 {
		return
	}
	r.AddTo(at, func() { r.toNodePorts(chainExternalPorts) })
	r.Begin(rule.Filter(chainExternalPorts))
	ports := rule.Tree{Set: &r.Set, Chain: rule.Filter, Prefix: prefixExtPort}
	ports.Write(d.extPorts)
}

// filterFirewall checks source ranges.
func (r *renderer) filterFirewall(d *dispatch) {
	r.Begin(rule.Filter(chainProxyFirewall))
	if len(d.firewall) == 0 {
		return
	}
	r.Add(translated)
	t := rule.Tree{Set: &r.Set, Chain: rule.Filter, Prefix: prefixFWAddr}
	t.Write(d.firewall)
}

// filterHealth lets health checks in, whatever the host's policy is.
func (r *renderer) filterHealth(health map[plan.HealthID]plan.HealthPort) {
	ids := make([]plan.HealthID, 0, len(health))
	for id := range health {
		if id.Family == r.family {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, plan.HealthID.Compare)
	r.Begin(rule.Filter(chainNodePorts))
	if !r.liberal {
		r.Add(toInvalid)
	}
	for _, id := range ids {
		r.Add("-p tcp", rule.Comment(id.Service.String()+" health check node port"), rule.DPort(rule.TCP, health[id].Port), rule.Accept)
	}
}

// filterForward lets Service traffic through, whatever the host's policy is.
func (r *renderer) filterForward(d *dispatch) {
	r.Begin(rule.Filter(chainForward))
	if !r.liberal {
		r.Add(toInvalid)
	}
	mark := fmt.Sprintf("0x%x", r.mark)
	r.Add(rule.Comment("kubernetes forwarding rules"), "-m mark --mark "+mark+"/"+mark, rule.Accept)
	r.Add(rule.Comment("kubernetes forwarding conntrack rule"), "-m conntrack --ctstate RELATED,ESTABLISHED", rule.Accept)
	own, ports := d.own.Prefixes(), rule.CoverPorts(d.ownPorts, mostCovered)
	if len(own)+len(ports) == 0 {
		return
	}
	r.Add(rule.Comment("new flows to Services"), translatedOnly, rule.Jump(chainAccept))
	r.Begin(rule.Filter(chainAccept))
	for _, p := range own {
		r.Add("-m conntrack --ctorigdst "+rule.Host(p), rule.Accept)
	}
	for _, in := range ports {
		last := in.Port | 0xffff>>in.Bits
		match := strconv.Itoa(int(in.Port))
		if last != in.Port {
			match += ":" + strconv.Itoa(int(last))
		}
		r.Add(rule.Protocol(in.Proto), "-m conntrack --ctorigdstport "+match, rule.Accept)
	}
}
