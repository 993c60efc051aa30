package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// translated ends a filter chain for packets that were sent to an endpoint: their
// destination is that endpoint now, even if some frontend has the same address.
const translated = "-m conntrack --ctstate DNAT -j RETURN"

// lastRule says that packets must not get past a rule.
const lastRule = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"

func (r *renderer) natTop(d *dispatch) {
	mark := fmt.Sprintf("0x%x", r.mark)
	r.begin(natChain(chainMarkMasq))
	r.add("-j MARK --set-xmark " + mark + "/" + mark)
	r.begin(natChain(chainPostrouting))
	r.add("-m mark ! --mark "+mark+"/"+mark, leave)
	r.add("-j MARK --set-xmark " + mark + "/0x0") // so that a tunnel's packets are not translated again
	r.add(comment("kubernetes service traffic requiring SNAT"), "-j MASQUERADE --random-fully")
	r.begin(natChain(chainCanary))
	r.begin(filterChain(chainCanary))
	if len(r.pod) > 1 {
		r.begin(natChain(chainMasqOthers))
		for _, p := range r.pod {
			r.add(p, leave)
		}
		r.add(markMasq)
	}
	top := tree{rules: &r.rules, id: natChain, addr: prefixAddr, port: prefixAddr}
	r.begin(natChain(chainServices))
	at := len(r.chains) - 1
	top.write(d.addresses)
	r.endWith(at, func() { r.toNodePorts(chainNodePorts) })
	r.begin(natChain(chainNodePorts))
	ports := tree{rules: &r.rules, id: natChain, port: prefixPort}
	ports.write(d.ports)
}

// endWith adds rules to the end of a chain behind which others were begun already.
func (r *rules) endWith(at int, add func()) {
	tail := len(r.buf)
	s := r.chains[at]
	r.chains = append(r.chains, span{id: s.id, start: tail, end: tail})
	add()
	more := r.chains[len(r.chains)-1]
	r.chains = r.chains[:len(r.chains)-1]
	text := slices.Clone(r.buf[more.start:more.end])
	r.buf = slices.Insert(r.buf[:tail], s.end, text...)
	r.chains[at].end += len(text)
	r.chains[at].rules += more.rules
	for i := at + 1; i < len(r.chains); i++ {
		r.chains[i].start += len(text)
		r.chains[i].end += len(text)
	}
}

// toNodePorts leads packets to the addresses that accept node ports to a chain.
func (r *renderer) toNodePorts(chain string) {
	np := r.node.NodePorts[r.family]
	if !np.All {
		for _, a := range np.Addrs {
			r.add(toAddr(a), comment(lastRule), jumpTo(chain))
		}
		return
	}
	// Service addresses that the node has on an interface are local, but no node
	// port is served on them.
	for _, a := range r.node.Addrs {
		if plan.FamilyOf(a) == r.family && !a.IsLoopback() && !slices.Contains(np.Addrs, a) {
			r.add(toAddr(a), comment("not for node ports"), leave)
		}
	}
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	if r.family == plan.IPv6 {
		loopback = netip.MustParsePrefix("::1/128")
	}
	r.add("! "+to(loopback), comment(lastRule), dstLocal, jumpTo(chain))
}

// filterServices refuses what was sent to a ClusterIP and not translated.
func (r *renderer) filterServices(d *dispatch) {
	r.begin(filterChain(chainServices))
	at := len(r.chains) - 1
	if len(d.cluster)+len(d.external)+len(d.extPorts) > 0 {
		r.add(translated)
	}
	t := tree{rules: &r.rules, id: filterChain, addr: prefixAddr, port: prefixAddr}
	t.write(withoutRepeats(d.cluster))
	r.endWith(at, func() {
		if len(d.external)+len(d.extPorts) > 0 {
			r.add(comment("external addresses, from this node"), srcLocal, jumpTo(chainExternal))
		}
		for _, p := range r.node.ServiceCIDRs {
			if plan.FamilyOf(p.Addr()) == r.family {
				r.add(to(p.Masked()), comment("no Service has the address"), drop)
			}
		}
	})
}

// withoutRepeats keeps one entry for the ports that a ClusterIP does not have, for
// each address. Entries without rules go.
func withoutRepeats(entries []entry) []entry {
	slices.SortFunc(entries, func(a, b entry) int { return a.compare(&b) })
	out := entries[:0]
	for i, e := range entries {
		repeats := e.proto == 0 && i > 0 && entries[i-1].proto == 0 && entries[i-1].addr == e.addr
		if !repeats && len(e.rules) > 0 {
			out = append(out, e)
		}
	}
	return out
}

// filterExternal refuses or drops what was sent to an external address or a node
// port and not translated.
func (r *renderer) filterExternal(d *dispatch) {
	r.begin(filterChain(chainExternal))
	at := len(r.chains) - 1
	if len(d.external)+len(d.extPorts) > 0 {
		r.add(translated)
	}
	t := tree{rules: &r.rules, id: filterChain, addr: prefixExtAddr, port: prefixExtAddr}
	t.write(d.external)
	if len(d.extPorts) == 0 {
		return
	}
	r.endWith(at, func() { r.toNodePorts(chainExternalPorts) })
	r.begin(filterChain(chainExternalPorts))
	ports := tree{rules: &r.rules, id: filterChain, port: prefixExtPort}
	ports.write(d.extPorts)
}

// filterFirewall checks source ranges.
func (r *renderer) filterFirewall(d *dispatch) {
	r.begin(filterChain(chainProxyFirewall))
	if len(d.firewall) == 0 {
		return
	}
	r.add(translated)
	t := tree{rules: &r.rules, id: filterChain, addr: prefixFWAddr, port: prefixFWAddr}
	t.write(d.firewall)
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
	r.begin(filterChain(chainNodePorts))
	if !r.liberal {
		r.add(toInvalid)
	}
	for _, id := range ids {
		r.add("-p tcp", comment(id.Service.String()+" health check node port"), dport(plan.TCP, health[id].Port), accept)
	}
}

// filterForward lets Service traffic through, whatever the host's policy is.
func (r *renderer) filterForward(d *dispatch) {
	r.begin(filterChain(chainForward))
	if !r.liberal {
		r.add(toInvalid)
	}
	mark := fmt.Sprintf("0x%x", r.mark)
	r.add(comment("kubernetes forwarding rules"), "-m mark --mark "+mark+"/"+mark, accept)
	r.add(comment("kubernetes forwarding conntrack rule"), "-m conntrack --ctstate RELATED,ESTABLISHED", accept)
	own, ports := d.own.prefixes(), coverPorts(d.ownPorts)
	if len(own)+len(ports) == 0 {
		return
	}
	r.add(comment("new flows to Services"), "-m conntrack --ctstate DNAT", jumpTo(chainAccept))
	r.begin(filterChain(chainAccept))
	for _, p := range own {
		r.add("-m conntrack --ctorigdst "+hostOrPrefix(p), accept)
	}
	for _, in := range ports {
		last := in.port | 0xffff>>in.bits
		match := strconv.Itoa(int(in.port))
		if last != in.port {
			match += ":" + strconv.Itoa(int(last))
		}
		r.add(proto(in.proto), "-m conntrack --ctorigdstport "+match, accept)
	}
}

// hostOrPrefix is how the conntrack match prints an address.
func hostOrPrefix(p netip.Prefix) string {
	return strings.TrimSuffix(p.String(), fmt.Sprintf("/%d", p.Addr().BitLen()))
}
