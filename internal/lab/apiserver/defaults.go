package apiserver

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// setDefaults fills in what the API server would, as far as a Service proxy looks
// at it. It allocates neither addresses nor ports.
func setDefaults(o Object) {
	switch o := o.(type) {
	case *corev1.Service:
		defaultService(o)
	case *discoveryv1.EndpointSlice:
		for i := range o.Ports {
			def(&o.Ports[i].Name, "")
			def(&o.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	case *corev1.Node:
		if o.Spec.PodCIDR == "" && len(o.Spec.PodCIDRs) > 0 {
			o.Spec.PodCIDR = o.Spec.PodCIDRs[0]
		}
		if len(o.Spec.PodCIDRs) == 0 && o.Spec.PodCIDR != "" {
			o.Spec.PodCIDRs = []string{o.Spec.PodCIDR}
		}
	}
}

func defaultService(o *corev1.Service) {
	sp := &o.Spec
	if sp.Type == "" {
		sp.Type = corev1.ServiceTypeClusterIP
	}
	if sp.SessionAffinity == "" {
		sp.SessionAffinity = corev1.ServiceAffinityNone
	}
	if sp.SessionAffinity == corev1.ServiceAffinityClientIP && (sp.SessionAffinityConfig == nil || sp.SessionAffinityConfig.ClientIP == nil || sp.SessionAffinityConfig.ClientIP.TimeoutSeconds == nil) {
		timeout := corev1.DefaultClientIPServiceAffinitySeconds
		sp.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
	}
	for i := range sp.Ports {
		p := &sp.Ports[i]
		if p.Protocol == "" {
			p.Protocol = corev1.ProtocolTCP
		}
		if p.TargetPort == (intstr.IntOrString{}) {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	external := sp.Type == corev1.ServiceTypeNodePort || sp.Type == corev1.ServiceTypeLoadBalancer ||
		sp.Type == corev1.ServiceTypeClusterIP && len(sp.ExternalIPs) > 0
	if external && sp.ExternalTrafficPolicy == "" {
		sp.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	for i := range o.Status.LoadBalancer.Ingress {
		if in := &o.Status.LoadBalancer.Ingress[i]; in.IP != "" {
			def(&in.IPMode, corev1.LoadBalancerIPModeVIP)
		}
	}
	if sp.Type == corev1.ServiceTypeExternalName {
		return
	}
	def(&sp.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster)
	if len(sp.ClusterIPs) == 0 && sp.ClusterIP != "" {
		sp.ClusterIPs = []string{sp.ClusterIP}
	}
	if sp.ClusterIP == "" && len(sp.ClusterIPs) > 0 {
		sp.ClusterIP = sp.ClusterIPs[0]
	}
	if len(sp.IPFamilies) == 0 {
		for _, s := range sp.ClusterIPs {
			if a, err := netip.ParseAddr(s); err == nil && a.Is4() {
				sp.IPFamilies = append(sp.IPFamilies, corev1.IPv4Protocol)
			} else if err == nil {
				sp.IPFamilies = append(sp.IPFamilies, corev1.IPv6Protocol)
			}
		}
	}
	if sp.IPFamilyPolicy == nil {
		policy := corev1.IPFamilyPolicySingleStack
		if len(sp.IPFamilies) > 1 {
			policy = corev1.IPFamilyPolicyPreferDualStack
		}
		sp.IPFamilyPolicy = &policy
	}
}

// def sets *p to v if it is unset.
func def[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}
