package file

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// The rules below are those of the Kubernetes API for the fields that decide
// about forwarding. Names and labels are checked too: they end in chain comments,
// in set names and in lists joined by newlines.

var protocols = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}

func defaultNamespaced[T metav1.Object](o T) {
	if o.GetNamespace() == "" {
		o.SetNamespace(metav1.NamespaceDefault)
	}
}

func defaultCluster[T metav1.Object](o T) { o.SetNamespace("") }

func validateMeta(m *metav1.ObjectMeta, name func(string) []string) (errs field.ErrorList) {
	path := field.NewPath("metadata")
	errs = append(errs, invalid(path.Child("name"), m.Name, name(m.Name))...)
	if m.Namespace != "" {
		errs = append(errs, invalid(path.Child("namespace"), m.Namespace, validation.IsDNS1123Label(m.Namespace))...)
	}
	return errs
}

func invalid(path *field.Path, value any, messages []string) (errs field.ErrorList) {
	for _, m := range messages {
		errs = append(errs, field.Invalid(path, value, m))
	}
	return errs
}

func invalidIf(bad bool, path *field.Path, value any, message string) field.ErrorList {
	if !bad {
		return nil
	}
	return field.ErrorList{field.Invalid(path, value, message)}
}

func oneOf[T ~string](path *field.Path, value T, allowed ...T) field.ErrorList {
	if slices.Contains(allowed, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(path, value, allowed)}
}

// validateSlice checks an EndpointSlice.
func validateSlice(s *discoveryv1.EndpointSlice) field.ErrorList {
	errs := validateMeta(&s.ObjectMeta, validation.IsDNS1123Subdomain)
	if name, ok := s.Labels[discoveryv1.LabelServiceName]; ok {
		errs = append(errs, invalid(field.NewPath("metadata", "labels").Key(discoveryv1.LabelServiceName), name, validation.IsDNS1123Label(name))...)
	}
	path := field.NewPath("addressType")
	if s.AddressType == "" {
		errs = append(errs, field.Required(path, "say whether the addresses are IPv4 or IPv6"))
	} else {
		errs = append(errs, oneOf(path, s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)...)
	}
	var names []string
	for i, p := range s.Ports {
		path := field.NewPath("ports").Index(i)
		name := ""
		if p.Name != nil {
			name = *p.Name
		}
		errs = append(errs, portName(path.Child("name"), name, &names)...)
		if p.Protocol != nil {
			errs = append(errs, oneOf(path.Child("protocol"), *p.Protocol, protocols...)...)
		}
		if p.Port != nil && *p.Port != 0 { // 0 is "all ports" to the API; the reduction says it is not implemented
			errs = append(errs, invalid(path.Child("port"), *p.Port, validation.IsValidPortNum(int(*p.Port)))...)
		}
	}
	if s.AddressType == discoveryv1.AddressTypeFQDN {
		return errs // not forwarded to
	}
	for i := range s.Endpoints {
		errs = append(errs, validateEndpoint(field.NewPath("endpoints").Index(i), &s.Endpoints[i], s.AddressType == discoveryv1.AddressTypeIPv6)...)
	}
	return errs
}

func validateEndpoint(path *field.Path, e *discoveryv1.Endpoint, ipv6 bool) (errs field.ErrorList) {
	if len(e.Addresses) == 0 {
		errs = append(errs, field.Required(path.Child("addresses"), "must contain at least 1 address"))
	}
	for i, s := range e.Addresses {
		path := path.Child("addresses").Index(i)
		a, bad := address(path, s)
		if errs = append(errs, bad...); len(bad) == 0 {
			errs = append(errs, invalidIf(a.Is6() != ipv6, path, s, "must be of the slice's addressType")...)
		}
	}
	if e.NodeName != nil {
		errs = append(errs, invalid(path.Child("nodeName"), *e.NodeName, validation.IsDNS1123Subdomain(*e.NodeName))...)
	}
	if e.Hints == nil {
		return errs
	}
	for i, z := range e.Hints.ForZones {
		errs = append(errs, invalid(path.Child("hints", "forZones").Index(i).Child("name"), z.Name, validation.IsValidLabelValue(z.Name))...)
	}
	for i, n := range e.Hints.ForNodes {
		errs = append(errs, invalid(path.Child("hints", "forNodes").Index(i).Child("name"), n.Name, validation.IsDNS1123Subdomain(n.Name))...)
	}
	return errs
}

// portName checks a port's name among those before it.
func portName(path *field.Path, name string, names *[]string) (errs field.ErrorList) {
	if name != "" {
		errs = invalid(path, name, validation.IsDNS1123Label(name))
	}
	if slices.Contains(*names, name) {
		errs = append(errs, field.Duplicate(path, name))
	}
	*names = append(*names, name)
	return errs
}

// address checks an address that packets are sent to or from outside to: none of
// the special ones that stay on a host or a link.
func address(path *field.Path, s string) (netip.Addr, field.ErrorList) {
	a, err := cluster.ParseAddr(s)
	switch {
	case err != nil:
		return a, field.ErrorList{field.Invalid(path, s, "must be a valid IP address, like 192.0.2.1 or 2001:db8::1")}
	case a.IsUnspecified():
		return a, field.ErrorList{field.Invalid(path, s, "may not be the unspecified address")}
	case a.IsLoopback():
		return a, field.ErrorList{field.Invalid(path, s, "may not be in the loopback range (127.0.0.0/8, ::1)")}
	case a.IsLinkLocalUnicast(), a.IsLinkLocalMulticast():
		return a, field.ErrorList{field.Invalid(path, s, "may not be a link-local address")}
	}
	return a, nil
}

// validateEndpoints checks a classic Endpoints.
func validateEndpoints(e *corev1.Endpoints) field.ErrorList {
	errs := validateMeta(&e.ObjectMeta, validation.IsDNS1123Subdomain)
	for i := range e.Subsets {
		s, path := &e.Subsets[i], field.NewPath("subsets").Index(i)
		for list, addrs := range map[string][]corev1.EndpointAddress{"addresses": s.Addresses, "notReadyAddresses": s.NotReadyAddresses} {
			for j, a := range addrs {
				path := path.Child(list).Index(j)
				_, bad := address(path.Child("ip"), a.IP)
				errs = append(errs, bad...)
				if a.NodeName != nil {
					errs = append(errs, invalid(path.Child("nodeName"), *a.NodeName, validation.IsDNS1123Subdomain(*a.NodeName))...)
				}
			}
		}
		var names []string
		for j, p := range s.Ports {
			path := path.Child("ports").Index(j)
			if p.Name == "" && len(s.Ports) > 1 {
				errs = append(errs, field.Required(path.Child("name"), "each of several ports needs one"))
			} else {
				errs = append(errs, portName(path.Child("name"), p.Name, &names)...)
			}
			errs = append(errs, invalid(path.Child("port"), p.Port, validation.IsValidPortNum(int(p.Port)))...)
			if p.Protocol != "" {
				errs = append(errs, oneOf(path.Child("protocol"), p.Protocol, protocols...)...)
			}
		}
	}
	slices.SortStableFunc(errs, func(a, b *field.Error) int { return strings.Compare(a.Field, b.Field) })
	return errs
}

// validateNode checks the own Node.
func validateNode(n *corev1.Node) field.ErrorList {
	errs := validateMeta(&n.ObjectMeta, validation.IsDNS1123Subdomain)
	if zone, ok := n.Labels[corev1.LabelTopologyZone]; ok {
		errs = append(errs, invalid(field.NewPath("metadata", "labels").Key(corev1.LabelTopologyZone), zone, validation.IsValidLabelValue(zone))...)
	}
	for i, s := range n.Spec.PodCIDRs {
		errs = append(errs, prefix(field.NewPath("spec", "podCIDRs").Index(i), s)...)
	}
	if s := n.Spec.PodCIDR; s != "" {
		errs = append(errs, prefix(field.NewPath("spec", "podCIDR"), s)...)
	}
	for i, a := range n.Status.Addresses {
		if a.Type != corev1.NodeInternalIP && a.Type != corev1.NodeExternalIP {
			continue
		}
		if _, err := cluster.ParseAddr(a.Address); err != nil {
			errs = append(errs, field.Invalid(field.NewPath("status", "addresses").Index(i).Child("address"), a.Address, "must be a valid IP address"))
		}
	}
	return errs
}

func prefix(path *field.Path, s string) field.ErrorList {
	_, err := cluster.ParsePrefix(s)
	return invalidIf(err != nil, path, s, "must be a valid CIDR, like 192.0.2.0/24 or 2001:db8::/64")
}

// validateServiceCIDR checks a ServiceCIDR.
func validateServiceCIDR(c *networkingv1.ServiceCIDR) field.ErrorList {
	errs := validateMeta(&c.ObjectMeta, validation.IsDNS1123Subdomain)
	path := field.NewPath("spec", "cidrs")
	if len(c.Spec.CIDRs) == 0 {
		errs = append(errs, field.Required(path, "give one CIDR, or one of each family"))
	}
	for i, s := range c.Spec.CIDRs {
		errs = append(errs, prefix(path.Index(i), s)...)
	}
	return errs
}
