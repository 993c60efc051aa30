package planner

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// environment is what the plan of every Service depends on.
type environment struct {
	node      *cluster.Node // the last one known, nil: none ever
	name      cluster.String
	zone      string
	ips       map[plan.Family]netip.Addr // the node's IP, without an entry: unknown
	own       []netip.Addr               // all addresses that the Node object or the options name
	podsKnown map[plan.Family]bool
	guarded   []netip.Prefix // no external address may be in these
	host      []netip.Addr   // the host's addresses, sorted; not part of equal
}

// equal reports whether all Services would be planned alike, the options being the
// same: ips follow from own then.
func (e *environment) equal(o *environment) bool {
	for _, f := range plan.Families {
		if e.podsKnown[f] != o.podsKnown[f] {
			return false
		}
	}
	return e.name == o.name && e.zone == o.zone && slices.Equal(e.own, o.own) && slices.Equal(e.guarded, o.guarded) && (e.node == nil) == (o.node == nil)
}

// environment reads the node's facts. A Node that is gone leaves its last facts in
// force: its pods run on, and so does traffic to them.
func (p *Planner) environment() environment {
	e := environment{
		node:      p.state.Node(),
		name:      cluster.Intern(p.opt.NodeName),
		ips:       map[plan.Family]netip.Addr{},
		podsKnown: map[plan.Family]bool{},
		host:      p.state.Host(),
	}
	if e.node == nil {
		e.node = p.lastNode()
	}
	if e.node != nil {
		e.zone = e.node.Zone
		e.own = slices.Clone(e.node.Addrs)
		for _, a := range e.node.Addrs {
			if f := plan.FamilyOf(a); !e.ips[f].IsValid() {
				e.ips[f] = a
			}
		}
	}
	if ip := p.opt.NodeIP.Unmap(); ip.IsValid() && !ip.IsUnspecified() {
		e.ips[plan.FamilyOf(ip)] = ip
		e.own = append(e.own, ip)
	}
	for _, f := range p.opt.Families {
		e.podsKnown[f] = p.localTraffic(&e, f).Kind != plan.LocalUnknown
	}
	e.guarded = p.guarded(&e)
	return e
}

// lastNode returns the Node as it was last known, nil: never.
func (p *Planner) lastNode() *cluster.Node {
	if n := p.env.node; n != nil && n.Name == p.opt.NodeName {
		return n
	}
	return nil
}

// localTraffic says how this node's pods of family f are recognised.
func (p *Planner) localTraffic(e *environment, f plan.Family) plan.LocalTraffic {
	var cidrs []netip.Prefix
	switch d := &p.opt.Local; d.Kind {
	case BridgeInterface:
		return plan.LocalTraffic{Kind: plan.LocalInterface, Name: d.Name}
	case InterfaceNamePrefix:
		return plan.LocalTraffic{Kind: plan.LocalInterfacePrefix, Name: d.Name}
	case NodeCIDR:
		if e.node != nil {
			cidrs = e.node.PodCIDRs
		}
	case ClusterCIDR:
		cidrs = d.CIDRs
	}
	cidrs = ofFamily(cidrs, f)
	if len(cidrs) == 0 {
		return plan.LocalTraffic{Kind: plan.LocalUnknown}
	}
	return plan.LocalTraffic{Kind: plan.LocalPrefix, Prefixes: cidrs}
}

// planNode plans the Node's part and adds it to u if it differs.
func (p *Planner) planNode(u *plan.Update) {
	n := &plan.Node{
		Name:      p.opt.NodeName,
		NodePorts: map[plan.Family]plan.NodePorts{},
		Local:     map[plan.Family]plan.LocalTraffic{},
	}
	for _, a := range p.env.host {
		if !isLinkLocal6(a) {
			n.Addrs = append(n.Addrs, a)
		}
	}
	cidrs := p.state.ServiceCIDRs()
	for _, f := range p.opt.Families {
		n.NodePorts[f] = p.nodePorts(f)
		n.Local[f] = p.localTraffic(&p.env, f)
		n.ServiceCIDRs = append(n.ServiceCIDRs, ofFamily(cidrs, f)...)
	}
	if !n.Equal(p.plan.Node) {
		p.plan.Node = n
		u.Node = true
	}
	notes := p.nodeNotes()
	u.Notes = appendNew(u.Notes, p.notes, notes)
	p.notes = notes
}

// nodePorts says which addresses of family f accept node ports.
func (p *Planner) nodePorts(f plan.Family) plan.NodePorts {
	selected := p.opt.NodePorts.prefixes(f, p.env.ips[f])
	np := plan.NodePorts{All: len(selected) == 0 || slices.Contains(selected, everything(f))}
	// A family that is open only because nothing of it was selected does not
	// open loopback too: nobody asked for that.
	np.Loopback = p.opt.LocalhostNodePorts &&
		(p.opt.NodePorts.empty() || covers(selected, loopbackAddr(f)))
	for _, a := range p.env.host {
		if plan.FamilyOf(a) != f || a.IsLoopback() || isLinkLocal6(a) {
			continue
		}
		if (np.All || covers(selected, a)) && !p.isServiceAddress(a, selected) {
			np.Addrs = append(np.Addrs, a)
		}
	}
	return np
}

// isServiceAddress reports whether a is on the host only because a Service has it,
// as load-balancer addresses are with some load balancers: node ports are not for
// these. One that the Node object names, or that was selected as such, stays.
func (p *Planner) isServiceAddress(a netip.Addr, selected []netip.Prefix) bool {
	return p.claims.uses[a] > 0 && !slices.Contains(p.env.own, a) &&
		!slices.Contains(selected, netip.PrefixFrom(a, a.BitLen()))
}

// nodeNotes returns the remarks on the Node and on the options that concern it.
func (p *Planner) nodeNotes() []plan.Note {
	notes := noter{kind: "Node", name: p.opt.NodeName}
	switch n := p.env.node; {
	case n == nil:
		notes.info(NodeUnknown, "there is no Node named %q: endpoints without this nodeName count as remote; set --hostname-override to the Node's name", p.opt.NodeName)
	case p.state.Node() == nil:
		notes.uid = string(n.UID)
		notes.warn(NodeGone, "Node %q was deleted: its last zone, addresses and pod ranges stay in force; register the node again or stop the proxy", n.Name)
	default:
		notes.uid = string(n.UID)
		notes.problems(n.Problems)
	}
	for _, f := range p.opt.Families {
		p.remarkNodePorts(f, &notes)
		if !p.env.podsKnown[f] {
			notes.info(PodsUnknown, "detectLocalMode %s knows no %s pod range: no %s traffic to ClusterIPs is masqueraded, and with externalTrafficPolicy Local pods reach this node's endpoints only; set clusterCIDR or another detectLocalMode", p.opt.Local.Kind, f, f)
		}
	}
	return notes.list
}

// remarkNodePorts warns if node ports of family f answer on other addresses than
// the setting seems to say. A family without node ports is not worth a word.
func (p *Planner) remarkNodePorts(f plan.Family, notes *noter) {
	if p.claims.nodePorts[f] == 0 {
		return
	}
	selected := p.opt.NodePorts.prefixes(f, p.env.ips[f])
	if len(selected) == 0 && !p.opt.NodePorts.empty() {
		notes.warn(NodePortsOpen, "nodePortAddresses %s selects no %s address, so that node ports answer on all %s addresses of the node: add a range of that family", p.opt.NodePorts, f, f)
	}
	hasAddr := slices.ContainsFunc(p.env.host, func(a netip.Addr) bool {
		return plan.FamilyOf(a) == f && !a.IsLoopback() && !isLinkLocal6(a)
	})
	if np := p.plan.Node.NodePorts[f]; hasAddr && len(np.Addrs) == 0 && !np.Loopback {
		notes.warn(NodePortsNone, "nodePortAddresses %s covers no %s address of this node, so that its %s node ports answer nowhere: correct the range or remove it", p.opt.NodePorts, f, f)
	}
}

// String is the list as in kube-proxy's configuration.
func (a NodePortAddresses) String() string {
	var out []string
	for _, k := range []struct {
		on   bool
		word string
	}{{a.All, "all"}, {a.Localhost, "localhost"}, {a.Primary, "primary"}} {
		if k.on {
			out = append(out, k.word)
		}
	}
	for _, c := range a.CIDRs {
		out = append(out, c.String())
	}
	return fmt.Sprintf("[%s]", strings.Join(out, " "))
}

func ofFamily(in []netip.Prefix, f plan.Family) []netip.Prefix {
	var out []netip.Prefix
	for _, c := range in {
		if plan.FamilyOf(c.Addr()) == f {
			out = append(out, c.Masked())
		}
	}
	return out
}

func covers(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// isLinkLocal6: such an address means nothing without an interface, and every
// pod's coming and going adds or removes one.
func isLinkLocal6(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }
