package world

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	yamljson "sigs.k8s.io/yaml"
)

// Object is a Kubernetes object of a kind that the world knows.
type Object interface {
	runtime.Object
	metav1.Object
}

// Key identifies an object.
type Key struct{ Kind, Namespace, Name string }

func (k Key) String() string {
	if k.Namespace == "" {
		return k.Kind + " " + k.Name
	}
	return k.Kind + " " + k.Namespace + "/" + k.Name
}

// KeyOf returns the key of an object.
func KeyOf(o Object) Key {
	return Key{o.GetObjectKind().GroupVersionKind().Kind, o.GetNamespace(), o.GetName()}
}

// NewObject returns an empty object of a kind, spelled as kubectl allows.
func NewObject(kind string) (Object, schema.GroupVersionKind, error) {
	gvk := func(group, kind string) schema.GroupVersionKind {
		return schema.GroupVersionKind{Group: group, Version: "v1", Kind: kind}
	}
	switch strings.ToLower(kind) {
	case "service", "services", "svc":
		return &corev1.Service{}, gvk("", "Service"), nil
	case "endpointslice", "endpointslices", "slice":
		return &discoveryv1.EndpointSlice{}, gvk("discovery.k8s.io", "EndpointSlice"), nil
	case "node", "nodes":
		return &corev1.Node{}, gvk("", "Node"), nil
	case "namespace", "namespaces", "ns":
		return &corev1.Namespace{}, gvk("", "Namespace"), nil
	case "servicecidr", "servicecidrs":
		return &networkingv1.ServiceCIDR{}, gvk("networking.k8s.io", "ServiceCIDR"), nil
	case "endpoints":
		return &corev1.Endpoints{}, gvk("", "Endpoints"), nil //nolint:staticcheck // the file source reads them
	}
	return nil, schema.GroupVersionKind{}, fmt.Errorf("kind %q: the world has Service, EndpointSlice, Endpoints, Node, Namespace and ServiceCIDR", kind)
}

// ClusterScoped reports whether objects of a kind have no namespace.
func ClusterScoped(kind string) bool {
	return kind == "Node" || kind == "Namespace" || kind == "ServiceCIDR"
}

// Decode reads the objects of a YAML file for one family set.
func Decode(data []byte, f Families) ([]Object, error) {
	r := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
	var out []Object
	for n := 1; ; n++ {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		var tree map[string]any
		if err := yamljson.Unmarshal(doc, &tree); err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		if len(tree) == 0 {
			continue
		}
		trees := []any{tree}
		if list, ok := tree["items"].([]any); ok && strings.HasSuffix(fmt.Sprint(tree["kind"]), "List") {
			trees = list
		}
		for _, t := range trees {
			objs, err := fromTree(t, f)
			if err != nil {
				return nil, fmt.Errorf("document %d: %w", n, err)
			}
			out = append(out, objs...)
		}
	}
}

// fromTree makes typed objects of one decoded document: two for a slice that gets
// an IPv6 twin.
func fromTree(tree any, f Families) ([]Object, error) {
	o, err := typed(tree)
	if err != nil {
		return nil, err
	}
	if f != Only6 && f != Dual {
		return []Object{o}, nil
	}
	mapped, err := MapTree(tree) // in place; o is decoded already
	if err != nil {
		return nil, fmt.Errorf("%s: %w", KeyOf(o), err)
	}
	six, err := typed(mapped)
	if err != nil {
		return nil, err
	}
	if f == Only6 {
		return []Object{six}, nil
	}
	return dualStack(o, six), nil
}

func typed(tree any) (Object, error) {
	m, ok := tree.(map[string]any)
	if !ok {
		return nil, errors.New("not an object")
	}
	kind, _ := m["kind"].(string)
	o, gvk, err := NewObject(kind)
	if err != nil {
		return nil, err
	}
	b, err := yamljson.Marshal(m)
	if err != nil {
		return nil, err
	}
	if err := yamljson.UnmarshalStrict(b, o); err != nil {
		return nil, fmt.Errorf("%s: %w", kind, err)
	}
	o.GetObjectKind().SetGroupVersionKind(gvk)
	if o.GetName() == "" {
		return nil, fmt.Errorf("%s: metadata.name is empty", kind)
	}
	if o.GetNamespace() == "" && !ClusterScoped(gvk.Kind) {
		o.SetNamespace(metav1.NamespaceDefault)
	}
	return o, nil
}

// TwinSuffix ends the name of the IPv6 slice beside an IPv4 one.
const TwinSuffix = "-v6"

// dualStack joins an object and its IPv6 counterpart: addresses of both in one
// Service or Node, two slices side by side.
func dualStack(four, six Object) []Object {
	switch o := four.(type) {
	case *corev1.Service:
		o6 := six.(*corev1.Service)
		if len(o.Spec.ClusterIPs) == 0 && o.Spec.ClusterIP != "" {
			o.Spec.ClusterIPs = []string{o.Spec.ClusterIP}
		}
		if len(o6.Spec.ClusterIPs) == 0 && o6.Spec.ClusterIP != "" {
			o6.Spec.ClusterIPs = []string{o6.Spec.ClusterIP}
		}
		if len(o.Spec.ClusterIPs) == 1 && o.Spec.ClusterIPs[0] != corev1.ClusterIPNone {
			o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, o6.Spec.ClusterIPs...)
			policy := corev1.IPFamilyPolicyRequireDualStack
			o.Spec.IPFamilyPolicy = &policy
			o.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
		}
		o.Spec.ExternalIPs = union(o.Spec.ExternalIPs, o6.Spec.ExternalIPs)
		o.Spec.LoadBalancerSourceRanges = union(o.Spec.LoadBalancerSourceRanges, o6.Spec.LoadBalancerSourceRanges)
		for _, in := range o6.Status.LoadBalancer.Ingress {
			if in.IP != "" {
				o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, in)
			}
		}
	case *corev1.Node:
		o6 := six.(*corev1.Node)
		for _, a := range o6.Status.Addresses {
			if !slices.Contains(o.Status.Addresses, a) {
				o.Status.Addresses = append(o.Status.Addresses, a)
			}
		}
		o.Spec.PodCIDRs = union(o.Spec.PodCIDRs, o6.Spec.PodCIDRs)
	case *networkingv1.ServiceCIDR:
		o.Spec.CIDRs = union(o.Spec.CIDRs, six.(*networkingv1.ServiceCIDR).Spec.CIDRs)
	case *discoveryv1.EndpointSlice:
		if o.AddressType == discoveryv1.AddressTypeIPv4 {
			six.SetName(six.GetName() + TwinSuffix)
			return []Object{four, six}
		}
	}
	return []Object{four}
}

func union(a, b []string) []string {
	for _, s := range b {
		if !slices.Contains(a, s) {
			a = append(a, s)
		}
	}
	return a
}

// Encode is the object as a manifest.
func Encode(o Object) ([]byte, error) {
	b, err := yamljson.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", KeyOf(o), err)
	}
	return bytes.ReplaceAll(b, []byte("  creationTimestamp: null\n"), nil), nil
}
