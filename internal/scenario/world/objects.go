package world

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Identities remembers the identity of what exists, as the API server gives it: a
// name that is applied again stays the same object, one that was deleted comes
// back as another, younger one.
type Identities struct {
	made int
	ids  map[Key]identity
}

type identity struct {
	uid     types.UID
	created metav1.Time
}

// epoch is when the first object of every scenario was created; each further one
// is a second younger. Age decides between Services that claim one address, so it
// must not depend on the clock.
var epoch = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

// Stamp gives the object its identity. A creation time in the file stands.
func (s *Identities) Stamp(o Object) {
	k := KeyOf(o)
	id, ok := s.ids[k]
	if !ok {
		s.made++
		id = identity{
			uid:     types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", s.made)),
			created: metav1.NewTime(epoch.Add(time.Duration(s.made) * time.Second)),
		}
		if s.ids == nil {
			s.ids = map[Key]identity{}
		}
		s.ids[k] = id
	}
	if o.GetUID() == "" {
		o.SetUID(id.uid)
	}
	if t := o.GetCreationTimestamp(); t.IsZero() {
		o.SetCreationTimestamp(id.created)
	}
}

// Has reports whether there is such an object.
func (s *Identities) Has(k Key) bool { _, ok := s.ids[k]; return ok }

// Forget ends an identity.
func (s *Identities) Forget(k Key) { delete(s.ids, k) }

// Labels of the world's Nodes.
const (
	labelHostname = "kubernetes.io/hostname"
	labelZone     = "topology.kubernetes.io/zone"
)

// NodeObject is the Node under test as it is now.
func (w *World) NodeObject() Object {
	n := newNode(w.NodeName)
	if w.Zone != "" {
		n.Labels[labelZone] = w.Zone
	}
	for _, p := range w.PodCIDRs {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
	}
	// The kubelet reports one address of each family.
	order := []bool{false, true}
	if w.Families == Only6 {
		order = []bool{true, false}
	}
	for _, v6 := range order {
		if a, err := w.Node().Addr(v6); err == nil {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
		}
	}
	return n
}

func newNode(name string) *corev1.Node {
	_, gvk, _ := NewObject("Node")
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labelHostname: name}}}
	n.SetGroupVersionKind(gvk)
	return n
}

// GivenObjects are those that exist before the script applies any.
func (w *World) GivenObjects() []Object {
	_, gvk, _ := NewObject("ServiceCIDR")
	cidr := &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{serviceRange.String(), ServicesV6.String()}},
	}
	cidr.SetGroupVersionKind(gvk)
	out := []Object{w.NodeObject(), cidr}
	for _, o := range Neighbours {
		n := newNode(o.Name)
		for _, p := range BothRanges(o.Pods) {
			n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
		}
		for _, a := range Both(o.Addr) {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
		}
		out = append(out, n)
	}
	return out
}
