package iptables

import (
	"iter"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// dispatch collects what all Service ports contribute to the chains that all
// packets pass.
type dispatch struct {
	addresses []rule.Entry // nat: ClusterIPs and external addresses
	ports     []rule.Entry // nat: node ports
	cluster   []rule.Entry // filter: verdicts on ClusterIPs
	external  []rule.Entry // filter: verdicts on external addresses
	extPorts  []rule.Entry // filter: verdicts on node ports
	firewall  []rule.Entry // filter: source ranges
	own       rule.Cover   // filter: frontends forwarded with the client's own address
	ownPorts  []rule.Entry // and their node ports
}

// collect adds one Service port.
func (r *renderer) collect(d *dispatch, sp *plan.ServicePort) {
	v := newView(sp)
	p := v.proto
	for _, f := range v.frontends {
		e := rule.Entry{Addr: f.Addr, Proto: p, Port: f.Port, Owner: v.name}
		dst := ""
		if f.Kind != plan.NodePort {
			dst = rule.ToAddr(f.Addr)
		}
		line := func(remark, target string) []string {
			return []string{rule.Join(dst, rule.Protocol(p), rule.Comment(v.name+remark), rule.DPort(p, f.Port), target)}
		}
		if f.target != "" {
			n := e
			n.Rules = line(kindRemark(f.Kind), rule.Jump(f.target))
			if f.Kind == plan.NodePort {
				d.ports = append(d.ports, n)
			} else {
				d.addresses = append(d.addresses, n)
			}
			d.collectOwn(&f, e)
		}
		if f.source != "" {
			n := e
			n.Rules = line(" source ranges", rule.Jump(f.source))
			d.firewall = append(d.firewall, n)
		}
		e.Rules = r.verdicts(v, f, dst)
		switch {
		case f.Kind == plan.ClusterIP:
			d.cluster = append(d.cluster, e)
			rest := rule.Entry{Addr: f.Addr, Owner: v.name, Rules: []string{rule.Join(dst, rule.Comment(sp.ID.Service().String()+" has no such port"), rule.Reject(sys.Family(r.family)))}}
			d.cluster = append(d.cluster, rest)
		case len(e.Rules) == 0:
		case f.Kind == plan.NodePort:
			d.extPorts = append(d.extPorts, e)
		default:
			d.external = append(d.external, e)
		}
	}
}

// collectOwn notes a frontend of which some packets keep the client's address:
// these carry no mark by which a forwarding policy could be told to let them pass.
func (d *dispatch) collectOwn(f *viewed, e rule.Entry) {
	for _, rt := range f.route {
		if rt.Verdict != plan.Forward || rt.SNAT {
			continue
		}
		if f.Kind == plan.NodePort {
			d.ownPorts = append(d.ownPorts, e)
		} else {
			d.own.Add(f.Addr)
		}
		return
	}
}

// kindRemark is what kube-proxy's comments say of a kind of frontend.
func kindRemark(k plan.Kind) string {
	switch k {
	case plan.ClusterIP:
		return " cluster IP"
	case plan.ExternalIP:
		return " external IP"
	case plan.LoadBalancerIP:
		return " loadbalancer IP"
	}
	return ""
}

// verdicts returns the rules of the filter table that refuse or rule.Drop what a
// frontend does not forward.
func (r *renderer) verdicts(v *view, f viewed, dst string) []string {
	routes := f.route
	if len(r.pod) == 0 {
		routes[plan.FromPod] = routes[plan.FromNode]
	}
	line := func(match string, verdict plan.Verdict) string {
		remark, target := " has no endpoints", rule.Reject(sys.Family(r.family))
		switch verdict {
		case plan.Drop:
			remark, target = " has no local endpoints", rule.Drop
		case plan.Forward:
			remark, target = " is forwarded", rule.Return
		}
		src, in, more := "", "", match
		switch {
		case strings.HasPrefix(match, "-s"):
			src, more = match, ""
		case strings.HasPrefix(match, "-i"):
			in, more = match, ""
		}
		return rule.Join(src, dst, in, rule.Protocol(v.proto), rule.Comment(v.name+remark), rule.DPort(v.proto, f.Port), more, target)
	}
	pod, node, outside := routes[plan.FromPod].Verdict, routes[plan.FromNode].Verdict, routes[plan.FromOutside].Verdict
	var out []string
	if pod != node || node != outside {
		for _, p := range r.pod {
			out = append(out, line(p, pod))
		}
		if node != outside {
			out = append(out, line(rule.SrcLocal, node))
		}
	}
	if outside != plan.Forward {
		out = append(out, line("", outside))
	}
	return out
}

// common renders the chains that all packets pass, and the dispatch below them.
func (r *renderer) common(services iter.Seq[*plan.ServicePort], health map[plan.HealthID]plan.HealthPort) *rule.Set {
	r.Reset()
	d := &dispatch{own: rule.Cover{Most: mostCovered}}
	for sp := range services {
		r.collect(d, sp)
	}
	r.natTop(d)
	r.filterServices(d, services)
	r.filterExternal(d)
	r.filterFirewall(d)
	r.filterHealth(health)
	r.filterForward(d)
	r.ends(services)
	return &r.Set
}
