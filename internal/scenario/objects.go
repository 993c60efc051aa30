package scenario

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// objects remembers the identity of what exists, as the API server gives it: a
// name that is applied again stays the same object, one that was deleted comes
// back as another, younger one.
type objects struct {
	made int
	ids  map[key]identity
}

type identity struct {
	uid     types.UID
	created metav1.Time
}

// epoch is when the first object of every scenario was created; each further one
// is a second younger. Age decides between Services that claim one address, so it
// must not depend on the clock.
var epoch = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

// stamp gives the object its identity. A creation time in the file stands.
func (s *objects) stamp(o object) {
	k := keyOf(o)
	id, ok := s.ids[k]
	if !ok {
		s.made++
		id = identity{
			uid:     types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", s.made)),
			created: metav1.NewTime(epoch.Add(time.Duration(s.made) * time.Second)),
		}
		if s.ids == nil {
			s.ids = map[key]identity{}
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

func (s *objects) has(k key) bool { _, ok := s.ids[k]; return ok }
func (s *objects) forget(k key)   { delete(s.ids, k) }

// Labels of the world's Nodes.
const (
	labelHostname = "kubernetes.io/hostname"
	labelZone     = "topology.kubernetes.io/zone"
)

// nodeObject is the Node under test as it is now.
func (w *world) nodeObject() object {
	n := newNode(w.nodeName)
	if w.zone != "" {
		n.Labels[labelZone] = w.zone
	}
	for _, p := range w.podCIDRs {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
	}
	// The kubelet reports one address of each family.
	order := []bool{false, true}
	if w.families == Only6 {
		order = []bool{true, false}
	}
	for _, v6 := range order {
		if a, err := w.node().addr(v6); err == nil {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
		}
	}
	return n
}

func newNode(name string) *corev1.Node {
	_, gvk, _ := newObject("Node")
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labelHostname: name}}}
	n.SetGroupVersionKind(gvk)
	return n
}

// givenObjects are those that exist before the script applies any.
func (w *world) givenObjects() []object {
	_, gvk, _ := newObject("ServiceCIDR")
	cidr := &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{serviceRange.String(), prefixService.String()}},
	}
	cidr.SetGroupVersionKind(gvk)
	out := []object{w.nodeObject(), cidr}
	for _, o := range neighbours {
		n := newNode(o.name)
		for _, p := range mustBoth(o.pods) {
			n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
		}
		for _, a := range mustPair(o.addr) {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
		}
		out = append(out, n)
	}
	return out
}
