package cluster

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ReduceSlice reduces an EndpointSlice. A slice without the label
// kubernetes.io/service-name has an empty Service: it belongs to none, and State
// keeps it under the empty name so that its problem can be shown. One with the label
// service.kubernetes.io/headless has nothing in it: no proxy reads it, whatever Service
// it names.
func ReduceSlice(o *discoveryv1.EndpointSlice) *Slice {
	var ps problems
	s := &Slice{
		Name:    nameOf(&o.ObjectMeta),
		Service: strings.Clone(o.Labels[discoveryv1.LabelServiceName]),
		IPv6:    o.AddressType == discoveryv1.AddressTypeIPv6,
		Trigger: trigger(o.Annotations),
	}
	if _, ok := o.Labels[corev1.IsHeadlessService]; ok {
		return s
	}
	if s.Service == "" {
		ps.add(ReasonNoService, "label %s is missing; the EndpointSlice is ignored: set the label to the name of its Service", discoveryv1.LabelServiceName)
	}
	switch o.AddressType {
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
		s.Ports = slicePorts(o.Ports, &ps)
		s.Endpoints = sliceEndpoints(o.Endpoints, s.IPv6, &ps)
	default:
		ps.add(ReasonAddressType, "addressType %q is not supported; the EndpointSlice is ignored: use IPv4 or IPv6", o.AddressType)
	}
	s.Problems = ps.result()
	return s
}

func trigger(annotations map[string]string) time.Time {
	v := annotations[corev1.EndpointsLastChangeTriggerTime]
	if v == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, v)
	if err != nil {
		return time.Time{}
	}
	return t
}

// slicePorts takes a missing name as "", the API server's default (kube-proxy
// ignores such a port, but never meets one).
func slicePorts(in []discoveryv1.EndpointPort, ps *problems) []SlicePort {
	if len(in) == 0 {
		return nil
	}
	out := make([]SlicePort, 0, len(in))
	for i := range in {
		var name string
		if p := in[i].Name; p != nil {
			name = *p
		}
		var number int32
		if p := in[i].Port; p != nil {
			number = *p
		}
		var proto corev1.Protocol
		if p := in[i].Protocol; p != nil {
			proto = *p
		}
		out = addSlicePort(out, "ports["+strconv.Itoa(i)+"]", name, proto, number, ps)
	}
	return orNil(out)
}

func addSlicePort(out []SlicePort, field, name string, proto corev1.Protocol, number int32, ps *problems) []SlicePort {
	known, ok := protocol(proto)
	switch {
	case !ok:
		ps.add(ReasonProtocol, "%s.protocol %q is not supported; the port is ignored: use TCP, UDP or SCTP", field, proto)
	case number == 0:
		ps.add(ReasonPortMissing, "%s.port of port %q: port number missing; the port is ignored: \"all ports\" is not implemented, give the number", field, name)
	case number < 0 || number > math.MaxUint16:
		ps.add(ReasonPort, "%s.port %d is not within 1-65535; the port is ignored: correct it", field, number)
	default:
		out = append(out, SlicePort{Name: Intern(name), Protocol: known, Port: uint16(number)})
	}
	return out
}

func sliceEndpoints(in []discoveryv1.Endpoint, ipv6 bool, ps *problems) []Endpoint {
	if len(in) == 0 {
		return nil
	}
	out := make([]Endpoint, 0, len(in))
	for i := range in {
		e := &in[i]
		if len(e.Addresses) == 0 {
			ps.add(ReasonNoAddress, "endpoints[%d].addresses is empty; the endpoint is ignored: give it an address", i)
			continue
		}
		// The addresses of one endpoint are interchangeable; consumers use the first.
		a, err := ParseAddr(e.Addresses[0])
		if err != nil {
			ps.add(ReasonAddress, "endpoints[%d].addresses[0]: %v; the endpoint is ignored: write an IP address", i, err)
			continue
		}
		if a.Is6() != ipv6 {
			ps.add(ReasonFamily, "endpoints[%d].addresses[0] %s is an %s address, unlike addressType; the endpoint is ignored: put it into a slice of its family", i, a, familyOf(a))
			continue
		}
		out = append(out, Endpoint{
			Addr: a, Node: internPtr(e.NodeName), Topology: topology(e), Flags: flags(&e.Conditions),
		})
	}
	return orNil(out)
}

// flags applies the defaults: nil is ready, serving, and not terminating.
func flags(c *discoveryv1.EndpointConditions) (f EndpointFlags) {
	if c.Ready == nil || *c.Ready {
		f |= Ready
	}
	if c.Serving == nil || *c.Serving {
		f |= Serving
	}
	if c.Terminating != nil && *c.Terminating {
		f |= Terminating
	}
	return f
}

func topology(e *discoveryv1.Endpoint) Topology {
	var set TopologySet
	if e.Zone != nil {
		set.Zone = *e.Zone
	}
	h := e.Hints
	if h == nil {
		return internTopology(set)
	}
	// The one-element case is nearly every endpoint.
	if len(h.ForZones) == 1 {
		set.HintZones = h.ForZones[0].Name
	} else if len(h.ForZones) > 1 {
		names := make([]string, len(h.ForZones))
		for i, z := range h.ForZones {
			names[i] = z.Name
		}
		set.HintZones = joinNames(names)
	}
	if len(h.ForNodes) == 1 {
		set.HintNodes = h.ForNodes[0].Name
	} else if len(h.ForNodes) > 1 {
		names := make([]string, len(h.ForNodes))
		for i, n := range h.ForNodes {
			names[i] = n.Name
		}
		set.HintNodes = joinNames(names)
	}
	return internTopology(set)
}

func joinNames(names []string) string {
	slices.Sort(names)
	return strings.Join(slices.Compact(names), "\n")
}

// ReduceEndpoints reduces a classic Endpoints object to what the API server's
// mirroring makes of it: slices that have one family and one list of ports each.
// A subset has its own ports, so each subset gives at most two. Their names hold
// slashes, which no API object's name does. An object that asks not to be
// mirrored gives none, and neither does one used as a leader-election lock, or one of a
// headless Service, whose slices no proxy reads.
func ReduceEndpoints(o *corev1.Endpoints) []*Slice {
	_, lock := o.Annotations[annotationLeader]
	_, headless := o.Labels[corev1.IsHeadlessService]
	if lock || headless || o.Labels[labelSkipMirror] == "true" {
		return nil
	}
	var out []*Slice
	for i := range o.Subsets {
		for _, ipv6 := range [...]bool{false, true} {
			if s := subsetSlice(&o.ObjectMeta, i, &o.Subsets[i], ipv6); s != nil {
				out = append(out, s)
			}
		}
	}
	return out
}

// subsetSlice returns the slice of one family, nil if the subset has nothing of
// it. Addresses of no family are the IPv4 slice's problems.
func subsetSlice(m *metav1.ObjectMeta, index int, sub *corev1.EndpointSubset, ipv6 bool) *Slice {
	var ps problems
	field := "subsets[" + strconv.Itoa(index) + "]"
	endpoints := make([]Endpoint, 0, len(sub.Addresses)+len(sub.NotReadyAddresses))
	add := func(list string, addrs []corev1.EndpointAddress, f EndpointFlags) {
		for i := range addrs {
			a, err := ParseAddr(addrs[i].IP)
			if err != nil {
				if !ipv6 {
					ps.add(ReasonAddress, "%s.%s[%d].ip: %v; the endpoint is ignored: write an IP address", field, list, i, err)
				}
				continue
			}
			if a.Is6() == ipv6 {
				endpoints = append(endpoints, Endpoint{
					Addr: a, Node: internPtr(addrs[i].NodeName), Topology: internTopology(TopologySet{}), Flags: f,
				})
			}
		}
	}
	add("addresses", sub.Addresses, Ready|Serving)
	// Mirroring sets only the condition "ready"; unset "serving" means true.
	add("notReadyAddresses", sub.NotReadyAddresses, Serving)
	if len(endpoints) == 0 && len(ps.list) == 0 {
		return nil
	}
	var ports []SlicePort
	for i, p := range sub.Ports {
		ports = addSlicePort(ports, field+".ports["+strconv.Itoa(i)+"]", p.Name, p.Protocol, p.Port, &ps)
	}
	family := corev1.IPv4Protocol
	if ipv6 {
		family = corev1.IPv6Protocol
	}
	name := nameOf(m)
	s := &Slice{
		Name:      Name{Namespace: name.Namespace, Name: name.Name + "/" + string(family) + "/" + strconv.Itoa(index)},
		Service:   name.Name,
		IPv6:      ipv6,
		Ports:     orNil(ports),
		Endpoints: orNil(endpoints),
		Trigger:   trigger(m.Annotations),
	}
	s.Problems = ps.result()
	return s
}

func internPtr(s *string) String {
	if s == nil {
		return Intern("")
	}
	return Intern(*s)
}
