package file

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// defaultService fills in what the API server would, as far as it is read here or
// validated: the rest of the defaults lies in the reduction.
func defaultService(s *corev1.Service) {
	defaultNamespaced(s)
	sp := &s.Spec
	if sp.Type == "" {
		sp.Type = corev1.ServiceTypeClusterIP
	}
	if sp.SessionAffinity == "" {
		sp.SessionAffinity = corev1.ServiceAffinityNone
	}
	for i := range sp.Ports {
		if sp.Ports[i].Protocol == "" {
			sp.Ports[i].Protocol = corev1.ProtocolTCP
		}
	}
	switch {
	case len(sp.ClusterIPs) == 0 && sp.ClusterIP != "":
		sp.ClusterIPs = []string{sp.ClusterIP}
	case len(sp.ClusterIPs) > 0 && sp.ClusterIP == "":
		sp.ClusterIP = sp.ClusterIPs[0]
	}
	for i := len(sp.IPFamilies); i < len(sp.ClusterIPs); i++ {
		a, err := cluster.ParseAddr(sp.ClusterIPs[i])
		if err != nil {
			break // None, or a problem of its own
		}
		sp.IPFamilies = append(sp.IPFamilies, familyOf(a))
	}
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

// validateService checks a Service of any type.
func validateService(s *corev1.Service) field.ErrorList {
	errs := validateMeta(&s.ObjectMeta, validation.IsDNS1123Label)
	path := field.NewPath("spec")
	errs = append(errs, oneOf(path.Child("type"), s.Spec.Type,
		corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)...)
	errs = append(errs, validatePorts(path.Child("ports"), &s.Spec)...)
	errs = append(errs, validateAffinity(path, &s.Spec)...)
	errs = append(errs, validateClusterIPs(path, &s.Spec)...)
	for i, ip := range s.Spec.ExternalIPs {
		if strings.TrimSpace(ip) == "" {
			continue // kube-proxy passes over them silently
		}
		_, bad := address(path.Child("externalIPs").Index(i), ip)
		errs = append(errs, bad...)
	}
	errs = append(errs, validatePolicies(path, &s.Spec)...)
	return append(errs, validateLoadBalancer(s)...)
}

func isHeadless(spec *corev1.ServiceSpec) bool { return spec.ClusterIP == corev1.ClusterIPNone }

func validatePorts(path *field.Path, spec *corev1.ServiceSpec) (errs field.ErrorList) {
	if len(spec.Ports) == 0 && !isHeadless(spec) && spec.Type != corev1.ServiceTypeExternalName {
		errs = append(errs, field.Required(path, "a Service forwards at least one port"))
	}
	var names []string
	type numbered struct {
		protocol corev1.Protocol
		port     int32
	}
	ports, nodePorts := map[numbered]struct{}{}, map[numbered]struct{}{}
	for i, p := range spec.Ports {
		path := path.Index(i)
		if p.Name == "" && len(spec.Ports) > 1 {
			errs = append(errs, field.Required(path.Child("name"), "each of several ports needs one"))
		} else {
			errs = append(errs, portName(path.Child("name"), p.Name, &names)...)
		}
		errs = append(errs, oneOf(path.Child("protocol"), p.Protocol, protocols...)...)
		errs = append(errs, invalid(path.Child("port"), p.Port, validation.IsValidPortNum(int(p.Port)))...)
		if _, twice := ports[numbered{p.Protocol, p.Port}]; twice {
			errs = append(errs, field.Duplicate(path.Child("port"), p.Port))
		}
		ports[numbered{p.Protocol, p.Port}] = struct{}{}
		if p.NodePort == 0 {
			continue
		}
		path = path.Child("nodePort")
		errs = append(errs, invalid(path, p.NodePort, validation.IsValidPortNum(int(p.NodePort)))...)
		if spec.Type == corev1.ServiceTypeClusterIP {
			errs = append(errs, field.Forbidden(path, "may not be used when `type` is 'ClusterIP': use NodePort or LoadBalancer"))
		}
		if _, twice := nodePorts[numbered{p.Protocol, p.NodePort}]; twice {
			errs = append(errs, field.Duplicate(path, p.NodePort))
		}
		nodePorts[numbered{p.Protocol, p.NodePort}] = struct{}{}
	}
	return errs
}

func validateAffinity(path *field.Path, spec *corev1.ServiceSpec) field.ErrorList {
	errs := oneOf(path.Child("sessionAffinity"), spec.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	c := spec.SessionAffinityConfig
	if spec.SessionAffinity != corev1.ServiceAffinityClientIP || c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return errs
	}
	n := *c.ClientIP.TimeoutSeconds
	return append(errs, invalidIf(n < 1 || n > 86400, path.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), n,
		"must be within 1 and 86400, seconds")...)
}

func validateClusterIPs(path *field.Path, spec *corev1.ServiceSpec) (errs field.ErrorList) {
	if len(spec.ClusterIPs) == 0 || spec.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	path, families := path.Child("clusterIPs"), path.Child("ipFamilies")
	errs = append(errs, invalidIf(spec.ClusterIPs[0] != spec.ClusterIP, path.Index(0), spec.ClusterIPs[0], "must be the same as clusterIP "+spec.ClusterIP)...)
	errs = append(errs, invalidIf(len(spec.ClusterIPs) > 2, path, strings.Join(spec.ClusterIPs, ", "), "may be at most one address of each family")...)
	if isHeadless(spec) {
		if spec.Type != corev1.ServiceTypeClusterIP {
			errs = append(errs, field.Invalid(path.Index(0), corev1.ClusterIPNone, "may not be used when `type` is '"+string(spec.Type)+"'"))
		}
		return append(errs, invalidIf(len(spec.ClusterIPs) > 1, path, strings.Join(spec.ClusterIPs, ", "), "may have nothing beside None")...)
	}
	var seen []corev1.IPFamily
	for i, s := range spec.ClusterIPs {
		a, err := cluster.ParseAddr(s)
		if err != nil {
			errs = append(errs, field.Invalid(path.Index(i), s, "must be a valid IP address, or None alone"))
			continue
		}
		f := familyOf(a)
		errs = append(errs, invalidIf(slices.Contains(seen, f), path.Index(i), s, "is a second "+string(f)+" address")...)
		seen = append(seen, f)
		if i < len(spec.IPFamilies) {
			errs = append(errs, invalidIf(spec.IPFamilies[i] != f, families.Index(i), spec.IPFamilies[i], "does not match clusterIPs: "+s+" is "+string(f))...)
		}
	}
	return errs
}

// isExternal reports whether externalTrafficPolicy has a meaning.
func isExternal(spec *corev1.ServiceSpec) bool {
	return spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer ||
		spec.Type == corev1.ServiceTypeClusterIP && len(spec.ExternalIPs) > 0
}

func validatePolicies(path *field.Path, spec *corev1.ServiceSpec) (errs field.ErrorList) {
	if p := spec.ExternalTrafficPolicy; p != "" {
		path := path.Child("externalTrafficPolicy")
		errs = append(errs, oneOf(path, p, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)...)
		errs = append(errs, invalidIf(!isExternal(spec), path, p, "may only be set for externally-accessible services: NodePort, LoadBalancer, or with externalIPs")...)
	}
	if p := spec.InternalTrafficPolicy; p != nil {
		errs = append(errs, oneOf(path.Child("internalTrafficPolicy"), *p, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)...)
	}
	if n := spec.HealthCheckNodePort; n != 0 {
		path := path.Child("healthCheckNodePort")
		errs = append(errs, invalid(path, n, validation.IsValidPortNum(int(n)))...)
		errs = append(errs, invalidIf(spec.Type != corev1.ServiceTypeLoadBalancer || spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal,
			path, n, "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'")...)
	}
	return errs
}

func validateLoadBalancer(s *corev1.Service) (errs field.ErrorList) {
	path := field.NewPath("spec", "loadBalancerSourceRanges")
	if len(s.Spec.LoadBalancerSourceRanges) > 0 && s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		errs = append(errs, field.Forbidden(path, "may only be used when `type` is 'LoadBalancer'"))
	}
	for i, r := range s.Spec.LoadBalancerSourceRanges {
		errs = append(errs, prefix(path.Index(i), strings.TrimSpace(r))...)
	}
	for i, in := range s.Status.LoadBalancer.Ingress {
		path := field.NewPath("status", "loadBalancer", "ingress").Index(i)
		if in.IP != "" {
			_, err := cluster.ParseAddr(in.IP)
			errs = append(errs, invalidIf(err != nil, path.Child("ip"), in.IP, "must be a valid IP address")...)
		}
		if in.IPMode != nil {
			errs = append(errs, oneOf(path.Child("ipMode"), *in.IPMode, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)...)
		}
	}
	return errs
}
