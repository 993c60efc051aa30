package iptables

import (
	"iter"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// dispatch collects what all Service ports contribute to the chains that all
// packets pass.
type dispatch struct {
	addresses []entry // nat: ClusterIPs and external addresses
	ports     []entry // nat: node ports
	cluster   []entry // filter: verdicts on ClusterIPs
	external  []entry // filter: verdicts on external addresses
	extPorts  []entry // filter: verdicts on node ports
	firewall  []entry // filter: source ranges
	own       cover   // filter: frontends forwarded with the client's own address
	ownPorts  []entry // and their node ports
}

// collect adds one Service port.
func (r *renderer) collect(d *dispatch, sp *plan.ServicePort) {
	v := newView(sp)
	p := sp.ID.Protocol
	for _, f := range v.frontends {
		e := entry{addr: f.Addr, proto: p, port: f.Port, owner: sp.ID}
		dst := ""
		if f.Kind != plan.NodePort {
			dst = toAddr(f.Addr)
		}
		rule := func(remark, target string) []string {
			return []string{words(dst, proto(p), comment(v.name+remark), dport(p, f.Port), target)}
		}
		if f.target != "" {
			n := e
			n.rules = rule(kindRemark(f.Kind), jumpTo(f.target))
			if f.Kind == plan.NodePort {
				d.ports = append(d.ports, n)
			} else {
				d.addresses = append(d.addresses, n)
			}
			d.collectOwn(&f, e)
		}
		if f.source != "" {
			n := e
			n.rules = rule(" source ranges", jumpTo(f.source))
			d.firewall = append(d.firewall, n)
		}
		e.rules = r.verdicts(v, f, dst)
		switch {
		case f.Kind == plan.ClusterIP:
			d.cluster = append(d.cluster, e)
			rest := entry{addr: f.Addr, owner: sp.ID, rules: []string{words(dst, comment(sp.ID.Service().String()+" has no such port"), reject(r.family))}}
			d.cluster = append(d.cluster, rest)
		case len(e.rules) == 0:
		case f.Kind == plan.NodePort:
			d.extPorts = append(d.extPorts, e)
		default:
			d.external = append(d.external, e)
		}
	}
}

// collectOwn notes a frontend of which some packets keep the client's address:
// these carry no mark by which a forwarding policy could be told to let them pass.
func (d *dispatch) collectOwn(f *viewed, e entry) {
	for _, rt := range f.route {
		if rt.Verdict != plan.Forward || rt.SNAT {
			continue
		}
		if f.Kind == plan.NodePort {
			d.ownPorts = append(d.ownPorts, e)
		} else {
			d.own.add(f.Addr)
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

// words joins the parts of a rule that are not empty.
func words(parts ...string) string {
	var b strings.Builder
	for _, p := range parts {
		if p == "" {
			continue
		}
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(p)
	}
	return b.String()
}

// verdicts returns the rules of the filter table that refuse or drop what a
// frontend does not forward.
func (r *renderer) verdicts(v *view, f viewed, dst string) []string {
	routes := f.route
	if len(r.pod) == 0 {
		routes[plan.FromPod] = routes[plan.FromNode]
	}
	rule := func(match string, verdict plan.Verdict) string {
		remark, target := " has no endpoints", reject(r.family)
		switch verdict {
		case plan.Drop:
			remark, target = " has no local endpoints", drop
		case plan.Forward:
			remark, target = " is forwarded", leave
		}
		src, in, more := "", "", match
		switch {
		case strings.HasPrefix(match, "-s"):
			src, more = match, ""
		case strings.HasPrefix(match, "-i"):
			in, more = match, ""
		}
		return words(src, dst, in, proto(v.sp.ID.Protocol), comment(v.name+remark), dport(v.sp.ID.Protocol, f.Port), more, target)
	}
	pod, node, outside := routes[plan.FromPod].Verdict, routes[plan.FromNode].Verdict, routes[plan.FromOutside].Verdict
	var out []string
	if pod == node && node == outside {
		if outside != plan.Forward {
			out = append(out, rule("", outside))
		}
		return out
	}
	for _, p := range r.pod {
		out = append(out, rule(p, pod))
	}
	if node != outside {
		out = append(out, rule(srcLocal, node))
	}
	if outside != plan.Forward {
		out = append(out, rule("", outside))
	}
	return out
}

// common renders the chains that all packets pass, and the dispatch below them.
func (r *renderer) common(services iter.Seq[*plan.ServicePort], health map[plan.HealthID]plan.HealthPort) *rules {
	r.reset()
	d := &dispatch{own: cover{most: mostCovered}}
	for sp := range services {
		r.collect(d, sp)
	}
	r.natTop(d)
	r.filterServices(d)
	r.filterExternal(d)
	r.filterFirewall(d)
	r.filterHealth(health)
	r.filterForward(d)
	r.ends(services)
	return &r.rules
}

// ends renders the chain that depends on all endpoints.
func (r *renderer) ends(services iter.Seq[*plan.ServicePort]) {
	if r.liberal {
		return
	}
	inv := newInvalid()
	for sp := range services {
		inv.collect(sp)
	}
	r.filterInvalid(inv)
}
