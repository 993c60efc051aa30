package planner

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// remark adds the notes on the Service as a whole and reports whether it is left
// alone.
func (d *draft) remark() (ignored bool) {
	for _, sl := range d.slices {
		d.notes.slice(sl)
	}
	if d.svc == nil {
		for _, sl := range d.slices {
			if d.s.name.Name == "" {
				break // their problem says that they name no Service
			}
			o := noter{kind: "EndpointSlice", namespace: sl.Name.Namespace, name: sl.Name.Name, list: d.notes.list}
			o.info(NoService, "label kubernetes.io/service-name %q: there is no such Service in namespace %q, or it is headless; correct the label or create the Service", sl.Service, sl.Name.Namespace)
			d.notes.list = o.list
		}
		return true
	}
	d.notes.problems(d.svc.Problems)
	if reason := d.p.ignored(d.svc); reason != "" {
		d.notes.info(reason, "%s", d.whyIgnored(reason))
		return true
	}
	d.remarkAddresses()
	d.remarkRanges()
	d.remarkPorts()
	d.remarkChoice()
	if d.svc.Type == "LoadBalancer" && d.externalLocal() && d.svc.HealthCheckNodePort == 0 {
		d.notes.warn(NoHealthCheckPort, "spec.healthCheckNodePort is 0 although externalTrafficPolicy is Local: load balancers cannot tell which nodes have endpoints; set it")
	}
	return false
}

func (d *draft) whyIgnored(r plan.Reason) string {
	switch r {
	case OtherProxy:
		if !d.svc.HasProxyName {
			return fmt.Sprintf("label service.kubernetes.io/service-proxy-name is missing: this proxy serves only Services where it is %q", d.p.opt.ServiceProxyName)
		}
		return fmt.Sprintf("label service.kubernetes.io/service-proxy-name is %q: another proxy serves the Service; remove the label to have it served here", d.svc.ProxyName)
	case ExternalName:
		return "spec.type is ExternalName: the name is resolved by DNS, there is nothing to forward"
	case Headless:
		return "spec.clusterIP is None: clients get the endpoints' addresses from DNS, there is nothing to forward"
	}
	return "spec.clusterIPs is empty: the API server has not given the Service an address yet; nothing is forwarded until then"
}

func (d *draft) remarkAddresses() {
	if n := len(d.svc.ExternalIPs); n > 0 && !d.p.opt.AllowExternalIPs {
		d.notes.warn(ExternalIPsDisabled, "spec.externalIPs %v have no effect, because the feature gate AllowServiceExternalIPs is off: use a load balancer or enable the gate", d.svc.ExternalIPs)
	} else {
		for _, a := range d.svc.ExternalIPs {
			d.remarkAddress("spec.externalIPs", a)
		}
	}
	for _, in := range d.svc.Ingress {
		if in.Proxy {
			d.notes.info(IPModeProxy, "status.loadBalancer.ingress ip %s has ipMode Proxy: traffic to it goes to the load balancer untouched", in.Addr)
			continue
		}
		d.remarkAddress("status.loadBalancer.ingress", in.Addr)
	}
}

func (d *draft) remarkAddress(field string, a netip.Addr) {
	f := plan.FamilyOf(a)
	why := d.p.refused(a)
	switch _, ok := clusterIPOf(d.svc, f); {
	case why != "":
		d.notes.warn(AddressRefused, "%s address %s %s: it is not served; use an address that is the Service's to have", field, a, why)
	case !ok:
		d.notes.warn(FamilyMismatch, "%s address %s is %s but the Service has no %s ClusterIP: the address is not served; add the family to spec.ipFamilies", field, a, f, f)
	case slices.Contains(d.p.env.own, a):
		d.notes.warn(NodeAddress, "%s address %s is an address of Node %q: the Service's ports on it go to the Service, all others stay the node's; use an address that no node has", field, a, d.p.opt.NodeName)
	}
}

// remarkRanges names the families that source ranges leave open.
func (d *draft) remarkRanges() {
	if len(d.svc.SourceRanges) == 0 {
		return
	}
	for _, f := range plan.Families {
		hasAddr := slices.ContainsFunc(d.svc.Ingress, func(in cluster.Ingress) bool {
			return !in.Proxy && plan.FamilyOf(in.Addr) == f
		})
		if _, served := clusterIPOf(d.svc, f); served && hasAddr && len(ofFamily(d.svc.SourceRanges, f)) == 0 {
			d.notes.warn(SourceRangesIgnored, "spec.loadBalancerSourceRanges %v names no %s range, so that everyone may use the %s load-balancer address: add one", d.svc.SourceRanges, f, f)
		}
	}
}

func (d *draft) remarkPorts() {
	for i := range d.svc.Ports {
		for j := range d.svc.Ports[:i] {
			a, b := &d.svc.Ports[j], &d.svc.Ports[i]
			if a.Port == b.Port && a.Protocol == b.Protocol {
				d.notes.warn(DuplicatePort, "spec.ports %q and %q both have port %d/%s: the first is served; give one of them another port", text(a.Name), text(b.Name), a.Port, a.Protocol)
			}
		}
	}
}

// remarkFamily names what is left out because the Service has no ClusterIP of
// family f.
func (d *draft) remarkFamily(f plan.Family) {
	for _, sl := range d.slices {
		if sl.IPv6 == (f == plan.IPv6) && len(sl.Endpoints) > 0 {
			d.notes.info(FamilyMismatch, "EndpointSlice %s has %s endpoints but the Service has no %s ClusterIP: they are not used; add the family to spec.ipFamilies", sl.Name.Name, f, f)
		}
	}
}

// remarkPort says why the port with index i, whose frontends are in buf, leads
// nowhere or not everywhere. found is the number of its endpoints; usable: one of
// them takes traffic.
func (d *draft) remarkPort(i, found int, usable bool) {
	port := &d.svc.Ports[i]
	switch {
	case !usable && found > 0:
		d.notes.info(NoEndpoints, "port %s (%s): none of %d endpoints is ready, or terminating and still serving: connections are refused", portText(port), d.family, found)
		return
	case !usable && !d.remarkMismatch(port):
		d.notes.info(NoEndpoints, "port %s (%s) has no endpoints: connections are refused", portText(port), d.family)
		return
	}
	d.remarkWeights(port)
	internal, external := false, false
	for _, f := range d.p.buf.frontends {
		dropped := f.Route[plan.FromOutside].Verdict == plan.Drop
		internal = internal || dropped && f.Kind == plan.ClusterIP
		external = external || dropped && f.Kind != plan.ClusterIP
	}
	doubt := ""
	if d.p.env.node == nil {
		doubt = fmt.Sprintf("; there is no Node named %q, check --hostname-override", d.p.opt.NodeName)
	}
	if internal {
		d.notes.info(NoLocalEndpoints, "port %s (%s), internalTrafficPolicy Local: no endpoint is on this node, traffic to the ClusterIP is dropped%s", portText(port), d.family, doubt)
	}
	if external {
		d.notes.info(NoLocalEndpoints, "port %s (%s), externalTrafficPolicy Local: no endpoint is on this node, traffic from outside is dropped%s", portText(port), d.family, doubt)
	}
}

// remarkMismatch adds a note if the slices have ports but none that fits. It is a
// warning only if a port of the slices fits no port of the Service either: while
// one of the two objects is behind the other, a new port alone is no mistake.
func (d *draft) remarkMismatch(port *cluster.ServicePort) bool {
	ports := 0
	var spare []string
	for _, sl := range d.slices {
		if sl.IPv6 != (d.family == plan.IPv6) || len(sl.Endpoints) == 0 {
			continue
		}
		for i := range sl.Ports {
			sp := &sl.Ports[i]
			ports++
			fits := func(o cluster.ServicePort) bool {
				return interned(o.Name) == interned(sp.Name) && o.Protocol == sp.Protocol
			}
			if name := fmt.Sprintf("%q/%s", text(sp.Name), sp.Protocol); !slices.ContainsFunc(d.svc.Ports, fits) && !slices.Contains(spare, name) {
				spare = append(spare, name)
			}
		}
	}
	name := fmt.Sprintf("%q/%s", text(port.Name), port.Protocol)
	switch {
	case ports == 0:
		return false
	case len(spare) > 0:
		slices.Sort(spare)
		d.notes.warn(PortNameMismatch, "spec.ports name %s: no EndpointSlice (%s) has a port of that name and protocol, but %s: connections are refused; give both the same name", name, d.family, strings.Join(spare, ", "))
	default:
		d.notes.info(PortNameMismatch, "spec.ports name %s: no EndpointSlice (%s) has a port of that name and protocol: connections are refused; check that the pods have the target port", name, d.family)
	}
	return true
}

// remarkLost names the Service that has what w asks for.
func (d *draft) remarkLost(w wanted) {
	winner := d.p.claims.owner[w.key].name
	if w.kind == plan.NodePort {
		d.notes.warn(NodePortConflict, "spec.ports nodePort %d/%s (%s) belongs to Service %s, which comes first by age, then by name: it leads here once that one gives it up; choose another node port", w.key.port, w.key.protocol, w.key.family, winner)
		return
	}
	d.notes.warn(AddressConflict, "%s %s port %d/%s belongs to Service %s, which comes first by age, then by name: it leads here once that one gives it up; choose another address or port", w.kind, w.key.addr, w.key.port, w.key.protocol, winner)
}

// portText is a port's name and number for messages.
func portText(p *cluster.ServicePort) string {
	if n := text(p.Name); n != "" {
		return fmt.Sprintf("%s %d/%s", n, p.Port, p.Protocol)
	}
	return fmt.Sprintf("%d/%s", p.Port, p.Protocol)
}
