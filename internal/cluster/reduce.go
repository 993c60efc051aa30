package cluster

import (
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The Reduce functions keep what matters of an API object and nothing of the
// object itself: strings are cloned or interned, so that a decode buffer is not
// held. They accept everything a decoder can produce; what cannot be used is left
// out and becomes a Problem. Defaults are those of the API server.

const (
	labelProxyName      = "service.kubernetes.io/service-proxy-name"
	labelApp            = "k8s-app"
	labelSkipMirror     = discoveryv1.LabelSkipMirror
	annotationLeader    = "control-plane.alpha.kubernetes.io/leader"
	annotationPrefix    = "svcproxy.io/"
	taintToBeDeleted    = "ToBeDeletedByClusterAutoscaler"
	defaultAffinity     = 10800 * time.Second
	maxAnnotations      = 32
	maxAnnotationLength = 1024 // bytes, of a key or a value
)

// ReduceService reduces a Service of any type.
func ReduceService(o *corev1.Service) *Service {
	var ps problems
	s := &Service{
		Name:          nameOf(&o.ObjectMeta),
		UID:           types.UID(strings.Clone(string(o.UID))),
		Created:       created(&o.ObjectMeta),
		Type:          serviceType(o.Spec.Type, &ps),
		Headless:      isHeadless(&o.Spec),
		ClusterIPs:    clusterIPs(&o.Spec, &ps),
		ExternalIPs:   externalIPs(o.Spec.ExternalIPs, &ps),
		Ingress:       ingress(o.Status.LoadBalancer.Ingress, &ps),
		SourceRanges:  sourceRanges(o.Spec.LoadBalancerSourceRanges, &ps),
		Ports:         servicePorts(o.Spec.Ports, &ps),
		Affinity:      affinity(&o.Spec, &ps),
		ExternalLocal: o.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
		Annotations:   ownAnnotations(o.Annotations, &ps),
	}
	if p := o.Spec.InternalTrafficPolicy; p != nil {
		s.InternalLocal = *p == corev1.ServiceInternalTrafficPolicyLocal
	}
	s.HealthCheckNodePort = nodePort("spec.healthCheckNodePort", o.Spec.HealthCheckNodePort, &ps)
	s.ProxyName, s.HasProxyName = o.Labels[labelProxyName]
	s.ProxyName = strings.Clone(s.ProxyName)
	s.DNS = o.Labels[labelApp] == "kube-dns" || o.Namespace == metav1.NamespaceSystem &&
		slices.ContainsFunc(o.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == 53 })
	s.Problems = ps.result()
	return s
}

func serviceType(t corev1.ServiceType, ps *problems) corev1.ServiceType {
	for _, known := range [...]corev1.ServiceType{
		corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName,
	} {
		if t == known {
			return known
		}
	}
	if t != "" {
		ps.add(ReasonValue, "spec.type %q is not a Service type; ClusterIP is assumed: use ClusterIP, NodePort, LoadBalancer or ExternalName", t)
	}
	return corev1.ServiceTypeClusterIP
}

func isHeadless(spec *corev1.ServiceSpec) bool {
	return spec.ClusterIP == corev1.ClusterIPNone || len(spec.ClusterIPs) > 0 && spec.ClusterIPs[0] == corev1.ClusterIPNone
}

// clusterIPs returns one address per family. An entry of clusterIPs counts only
// with its entry of ipFamilies, if that list is set at all.
func clusterIPs(spec *corev1.ServiceSpec, ps *problems) []netip.Addr {
	if isHeadless(spec) {
		return nil
	}
	in := spec.ClusterIPs
	if len(in) == 0 && spec.ClusterIP != "" {
		in = []string{spec.ClusterIP}
	}
	out := make([]netip.Addr, 0, min(len(in), 2))
	for i, s := range in {
		a, err := ParseAddr(s)
		switch {
		case err != nil:
			ps.add(ReasonAddress, "spec.clusterIPs[%d]: %v; it is ignored: delete and create the Service again", i, err)
		case len(spec.IPFamilies) > 0 && (i >= len(spec.IPFamilies) || spec.IPFamilies[i] != familyOf(a)):
			ps.add(ReasonFamily, "spec.clusterIPs[%d] %s does not match spec.ipFamilies %v; it is ignored: list its family %s at the same place", i, a, spec.IPFamilies, familyOf(a))
		case slices.ContainsFunc(out, func(o netip.Addr) bool { return o.Is4() == a.Is4() }):
			ps.add(ReasonFamily, "spec.clusterIPs[%d] %s is a second %s address; it is ignored: a Service has one per family", i, a, familyOf(a))
		default:
			out = append(out, a)
		}
	}
	return orNil(out)
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

// externalIPs skips blank entries silently: the API server does not validate them.
func externalIPs(in []string, ps *problems) []netip.Addr {
	if len(in) == 0 {
		return nil
	}
	out := make([]netip.Addr, 0, len(in))
	for i, s := range in {
		if strings.TrimSpace(s) == "" {
			continue
		}
		a, err := ParseAddr(s)
		if err != nil {
			ps.add(ReasonAddress, "spec.externalIPs[%d]: %v; it is ignored: write an IPv4 or IPv6 address", i, err)
			continue
		}
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return orNil(out)
}

// ingress keeps the entries with an address; a hostname needs no rules.
func ingress(in []corev1.LoadBalancerIngress, ps *problems) []Ingress {
	if len(in) == 0 {
		return nil
	}
	out := make([]Ingress, 0, len(in))
	for i := range in {
		if in[i].IP == "" {
			continue
		}
		a, err := ParseAddr(in[i].IP)
		if err != nil {
			ps.add(ReasonAddress, "status.loadBalancer.ingress[%d].ip: %v; it is ignored: the load balancer's controller has to write an address", i, err)
			continue
		}
		mode := in[i].IPMode
		out = append(out, Ingress{Addr: a, Proxy: mode != nil && *mode != corev1.LoadBalancerIPModeVIP})
	}
	return orNil(out)
}

// sourceRanges trims the entries, as white space passes the API's validation.
func sourceRanges(in []string, ps *problems) []netip.Prefix {
	if len(in) == 0 {
		return nil
	}
	out := make([]netip.Prefix, 0, len(in))
	for i, s := range in {
		if s = strings.TrimSpace(s); s == "" {
			continue
		}
		p, err := ParsePrefix(s)
		if err != nil {
			ps.add(ReasonAddress, "spec.loadBalancerSourceRanges[%d]: %v; it is ignored: write it like 192.0.2.0/24", i, err)
			continue
		}
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return orNil(out)
}

func servicePorts(in []corev1.ServicePort, ps *problems) []ServicePort {
	if len(in) == 0 {
		return nil
	}
	out := make([]ServicePort, 0, len(in))
	for i := range in {
		p := &in[i]
		proto, ok := protocol(p.Protocol)
		if !ok {
			ps.add(ReasonProtocol, "spec.ports[%d].protocol %q is not supported; the port is ignored: use TCP, UDP or SCTP", i, p.Protocol)
			continue
		}
		if p.Port < 1 || p.Port > math.MaxUint16 {
			ps.add(ReasonPort, "spec.ports[%d].port %d is not within 1-65535; the port is ignored: correct it", i, p.Port)
			continue
		}
		name := Intern(p.Name)
		if slices.ContainsFunc(out, func(o ServicePort) bool { return o.Name == name && o.Protocol == proto }) {
			ps.add(ReasonDuplicate, "spec.ports[%d]: a %s port named %q is listed before; this one is ignored: give it another name", i, proto, p.Name)
			continue
		}
		np := nodePort("spec.ports["+strconv.Itoa(i)+"].nodePort", p.NodePort, ps)
		out = append(out, ServicePort{Name: name, Protocol: proto, Port: uint16(p.Port), NodePort: np})
	}
	return orNil(out)
}

func nodePort(field string, v int32, ps *problems) uint16 {
	if v < 0 || v > math.MaxUint16 {
		ps.add(ReasonPort, "%s %d is not within 1-65535; it is ignored: correct it", field, v)
		return 0
	}
	return uint16(v)
}

// protocol returns the API's own constant, so that no decoded string is kept.
func protocol(p corev1.Protocol) (corev1.Protocol, bool) {
	switch p {
	case "", corev1.ProtocolTCP:
		return corev1.ProtocolTCP, true
	case corev1.ProtocolUDP:
		return corev1.ProtocolUDP, true
	case corev1.ProtocolSCTP:
		return corev1.ProtocolSCTP, true
	}
	return "", false
}

func affinity(spec *corev1.ServiceSpec, ps *problems) time.Duration {
	switch spec.SessionAffinity {
	case "", corev1.ServiceAffinityNone:
		return 0
	case corev1.ServiceAffinityClientIP:
	default:
		ps.add(ReasonValue, "spec.sessionAffinity %q is unknown; there is no affinity: use None or ClientIP", spec.SessionAffinity)
		return 0
	}
	c := spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return defaultAffinity
	}
	if n := *c.ClientIP.TimeoutSeconds; n > 0 {
		return time.Duration(n) * time.Second
	}
	ps.add(ReasonValue, "spec.sessionAffinityConfig.clientIP.timeoutSeconds %d is not within 1-86400; 10800 is used: correct it", *c.ClientIP.TimeoutSeconds)
	return defaultAffinity
}

// ownAnnotations keeps those under svcproxy.io/, a bounded number of bounded ones.
func ownAnnotations(in map[string]string, ps *problems) map[string]string {
	var out map[string]string
	for _, k := range slices.Sorted(maps.Keys(in)) {
		if !strings.HasPrefix(k, annotationPrefix) {
			continue
		}
		v := in[k]
		if len(k) > maxAnnotationLength || len(v) > maxAnnotationLength || len(out) == maxAnnotations {
			ps.add(ReasonAnnotation, "metadata.annotations[%.80q] is ignored: at most %d annotations of %d bytes are read", k, maxAnnotations, maxAnnotationLength)
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[strings.Clone(k)] = strings.Clone(v)
	}
	return out
}

// ReduceNode reduces a Node. Addresses are the InternalIPs, then the ExternalIPs.
func ReduceNode(o *corev1.Node) *Node {
	var ps problems
	n := &Node{
		Name:     strings.Clone(o.Name),
		UID:      types.UID(strings.Clone(string(o.UID))),
		Zone:     strings.Clone(o.Labels[corev1.LabelTopologyZone]),
		Deleting: o.DeletionTimestamp != nil,
	}
	for _, kind := range [...]corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for i, a := range o.Status.Addresses {
			if a.Type != kind {
				continue
			}
			addr, err := ParseAddr(a.Address)
			if err != nil {
				ps.add(ReasonAddress, "status.addresses[%d].address: %v; it is ignored: the kubelet or the cloud controller has to write an address", i, err)
				continue
			}
			if !slices.Contains(n.Addrs, addr) {
				n.Addrs = append(n.Addrs, addr)
			}
		}
	}
	cidrs := o.Spec.PodCIDRs
	if len(cidrs) == 0 && o.Spec.PodCIDR != "" {
		cidrs = []string{o.Spec.PodCIDR}
	}
	for i, s := range cidrs {
		p, err := ParsePrefix(s)
		if err != nil {
			ps.add(ReasonAddress, "spec.podCIDRs[%d]: %v; it is ignored: write it like 10.0.1.0/24", i, err)
			continue
		}
		n.PodCIDRs = append(n.PodCIDRs, p)
	}
	for _, t := range o.Spec.Taints {
		n.Deleting = n.Deleting || t.Key == taintToBeDeleted
	}
	n.Problems = ps.result()
	return n
}

// ReduceServiceCIDR returns the prefixes of a ServiceCIDR; the API server has
// validated them, so one that does not parse is left out.
func ReduceServiceCIDR(o *networkingv1.ServiceCIDR) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(o.Spec.CIDRs))
	for _, s := range o.Spec.CIDRs {
		if p, err := ParsePrefix(s); err == nil {
			out = append(out, p)
		}
	}
	return orNil(out)
}

func nameOf(m *metav1.ObjectMeta) Name {
	return Name{Namespace: Intern(m.Namespace).Value(), Name: strings.Clone(m.Name)}
}

func created(m *metav1.ObjectMeta) int64 {
	if m.CreationTimestamp.IsZero() {
		return 0
	}
	return m.CreationTimestamp.Unix()
}

// orNil returns nil for an empty list and gives back unused capacity of a list
// that lost entries.
func orNil[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	if cap(s) > len(s) {
		return append(make([]T, 0, len(s)), s...)
	}
	return s
}
