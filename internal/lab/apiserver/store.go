package apiserver

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// Object is a typed Kubernetes object with metadata.
type Object interface {
	runtime.Object
	metav1.Object
}

// store holds the objects of one kind, guarded by Server.mu.
type store struct {
	resource
	items   map[types.NamespacedName]*item
	history []change // oldest first
	oldest  uint64   // a watch can start at this version or later
}

func newStore(r resource) *store {
	return &store{resource: r, items: map[types.NamespacedName]*item{}, oldest: 1}
}

// item is one version of an object, immutable but for the cached encodings.
type item struct {
	obj Object
	rv  uint64

	mu      sync.Mutex // guards encoded
	encoded [mediaTypes][]byte
}

// change is one step of the history. old is nil for a new object; now is nil for
// a removed one.
type change struct {
	rv       uint64
	old, now *item
}

// Put creates or replaces an object: a *corev1.Service, *corev1.Node,
// *corev1.Namespace, *discoveryv1.EndpointSlice or *networkingv1.ServiceCIDR. The
// API's defaults are filled in; the object itself is not touched.
func (s *Server) Put(o Object) error {
	o = o.DeepCopyObject().(Object)
	s.mu.Lock()
	defer s.mu.Unlock()
	st, err := s.storeOf(o)
	if err != nil {
		return fmt.Errorf("put %s/%s: %w", o.GetNamespace(), o.GetName(), err)
	}
	if st.namespaced && o.GetNamespace() == "" {
		o.SetNamespace(metav1.NamespaceDefault)
	}
	if o.GetName() == "" {
		return fmt.Errorf("put a %s: metadata.name is empty", st.gvk.Kind)
	}
	setDefaults(o)
	o.GetObjectKind().SetGroupVersionKind(st.gvk)
	key := types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
	old := st.items[key]
	s.rv++
	if old != nil {
		if o.GetUID() == "" {
			o.SetUID(old.obj.GetUID())
		}
		if o.GetCreationTimestamp().Time.IsZero() {
			o.SetCreationTimestamp(old.obj.GetCreationTimestamp())
		}
	}
	if o.GetUID() == "" {
		o.SetUID(types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012x", s.rv)))
	}
	if o.GetCreationTimestamp().Time.IsZero() {
		o.SetCreationTimestamp(metav1.NewTime(time.Now().Truncate(time.Second)))
	}
	it := newItem(o, s.rv)
	st.items[key] = it
	st.record(change{s.rv, old, it}, s.opts.History)
	s.wake()
	return nil
}

// Delete removes an object by kind ("Service"), namespace and name. It reports
// whether there was one.
func (s *Server) Delete(kind, namespace, name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := types.NamespacedName{Namespace: namespace, Name: name}
	for _, st := range s.stores {
		if st.gvk.Kind != kind {
			continue
		}
		old := st.items[key]
		if old == nil {
			return false
		}
		delete(st.items, key)
		s.rv++
		st.record(change{rv: s.rv, old: old}, s.opts.History)
		s.wake()
		return true
	}
	return false
}

// Get returns a copy of an object, nil if there is none.
func (s *Server) Get(kind, namespace, name string) Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.stores {
		if st.gvk.Kind != kind {
			continue
		}
		if it := st.items[types.NamespacedName{Namespace: namespace, Name: name}]; it != nil {
			return it.obj.DeepCopyObject().(Object)
		}
	}
	return nil
}

func (s *Server) storeOf(o Object) (*store, error) {
	gvks, _, err := s.codec.scheme.ObjectKinds(o)
	if err != nil {
		return nil, err
	}
	for _, st := range s.stores {
		if slices.Contains(gvks, st.gvk) {
			return st, nil
		}
	}
	return nil, fmt.Errorf("kind %s is not served", gvks[0].Kind)
}

// record appends to the history and keeps it within limit, by halves so that
// shifting costs nothing on average.
func (st *store) record(c change, limit int) {
	st.history = append(st.history, c)
	if len(st.history) > limit {
		cutoff := len(st.history) - limit/2
		st.oldest = st.history[cutoff-1].rv
		st.history = slices.Clone(st.history[cutoff:])
	}
}

// after returns the changes later than rv.
func (st *store) after(rv uint64) []change {
	i, _ := slices.BinarySearchFunc(st.history, rv+1, func(c change, rv uint64) int {
		switch {
		case c.rv < rv:
			return -1
		case c.rv > rv:
			return 1
		}
		return 0
	})
	return st.history[i:]
}

// selected returns what match lets through, by namespace and name.
func (st *store) selected(match matcher) []*item {
	out := make([]*item, 0, len(st.items))
	for _, it := range st.items {
		if match(it) {
			out = append(out, it)
		}
	}
	slices.SortFunc(out, func(a, b *item) int {
		if c := compare(a.obj.GetNamespace(), b.obj.GetNamespace()); c != 0 {
			return c
		}
		return compare(a.obj.GetName(), b.obj.GetName())
	})
	return out
}

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func newItem(o Object, rv uint64) *item {
	o.SetResourceVersion(strconv.FormatUint(rv, 10))
	return &item{obj: o, rv: rv}
}

// at is the item as the object's last state in a DELETED event of version rv.
func (it *item) at(rv uint64) *item {
	return newItem(it.obj.DeepCopyObject().(Object), rv)
}
