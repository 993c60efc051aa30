package apiserver

import (
	"fmt"
	"io"
	"net/http"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

// resource is one kind and where it is served.
type resource struct {
	name       string // plural, as in paths
	gvk        schema.GroupVersionKind
	namespaced bool
}

var resources = []resource{
	{"services", corev1.SchemeGroupVersion.WithKind("Service"), true},
	{"nodes", corev1.SchemeGroupVersion.WithKind("Node"), false},
	{"namespaces", corev1.SchemeGroupVersion.WithKind("Namespace"), false},
	{"endpointslices", discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"), true},
	{"servicecidrs", networkingv1.SchemeGroupVersion.WithKind("ServiceCIDR"), false},
}

// media is a wire format.
type media int

const (
	mediaJSON media = iota
	mediaProtobuf
	mediaTypes
)

// codec encodes and decodes the kinds above and events.
type codec struct {
	scheme  *runtime.Scheme
	factory serializer.CodecFactory
	formats [mediaTypes]runtime.SerializerInfo
}

func newCodec() *codec {
	c := &codec{scheme: runtime.NewScheme()}
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, eventsv1.AddToScheme,
	} {
		// These fail only if one name is given to two types.
		utilruntime.Must(add(c.scheme))
	}
	metav1.AddToGroupVersion(c.scheme, schema.GroupVersion{Version: "v1"})
	c.factory = serializer.NewCodecFactory(c.scheme)
	for m, name := range map[media]string{mediaJSON: runtime.ContentTypeJSON, mediaProtobuf: runtime.ContentTypeProtobuf} {
		c.formats[m], _ = runtime.SerializerInfoForMediaType(c.factory.SupportedMediaTypes(), name)
	}
	return c
}

// negotiate chooses the first format of the Accept header that is supported.
func negotiate(req *http.Request) media {
	for clause := range strings.SplitSeq(req.Header.Get("Accept"), ",") {
		name, _, _ := strings.Cut(clause, ";")
		switch strings.TrimSpace(name) {
		case runtime.ContentTypeProtobuf:
			return mediaProtobuf
		case runtime.ContentTypeJSON, "*/*", "application/*":
			return mediaJSON
		}
	}
	return mediaJSON
}

func (c *codec) write(w io.Writer, m media, o runtime.Object) error {
	return c.formats[m].Serializer.Encode(o, w)
}

// decode reads a request's body by its Content-Type.
func (c *codec) decode(req *http.Request) (runtime.Object, error) {
	body, err := io.ReadAll(io.LimitReader(req.Body, 4<<20))
	if err != nil {
		return nil, fmt.Errorf("read body: %w", err)
	}
	o, _, err := c.factory.UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("decode body: %w", err)
	}
	return o, nil
}

// bytes returns the item's encoding, made once per format.
func (c *codec) bytes(it *item, m media) ([]byte, error) {
	it.mu.Lock()
	defer it.mu.Unlock()
	if it.encoded[m] == nil {
		b, err := runtime.Encode(c.formats[m].Serializer, it.obj)
		if err != nil {
			return nil, err
		}
		it.encoded[m] = b
	}
	return it.encoded[m], nil
}

// status answers with a metav1.Status, in the format that the client asked for.
func (c *codec) status(w http.ResponseWriter, req *http.Request, st metav1.Status) {
	st.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	if st.Status == "" {
		st.Status = metav1.StatusFailure
	}
	m := negotiate(req)
	w.Header().Set("Content-Type", c.formats[m].MediaType)
	w.WriteHeader(int(st.Code))
	// The client is gone if this fails.
	_ = c.write(w, m, &st)
}

// matcher tells whether a request's selectors let an item through.
type matcher func(*item) bool

func newMatcher(req *http.Request, st *store, namespace string) (matcher, error) {
	q := req.URL.Query()
	ls, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		return nil, fmt.Errorf("labelSelector %q: %w", q.Get("labelSelector"), err)
	}
	fs, err := fields.ParseSelector(q.Get("fieldSelector"))
	if err != nil {
		return nil, fmt.Errorf("fieldSelector %q: %w", q.Get("fieldSelector"), err)
	}
	for _, r := range fs.Requirements() {
		if !st.selectable(r.Field) {
			return nil, fmt.Errorf("fieldSelector: field label not supported: %s", r.Field)
		}
	}
	return func(it *item) bool {
		return (namespace == "" || it.obj.GetNamespace() == namespace) &&
			ls.Matches(labels.Set(it.obj.GetLabels())) && (fs.Empty() || fs.Matches(fieldsOf(it.obj)))
	}, nil
}

func (r resource) selectable(field string) bool {
	switch field {
	case "metadata.name":
		return true
	case "metadata.namespace":
		return r.namespaced
	case "spec.clusterIP", "spec.type":
		return r.gvk.Kind == "Service"
	case "spec.unschedulable":
		return r.gvk.Kind == "Node"
	}
	return false
}

func fieldsOf(o Object) fields.Set {
	f := fields.Set{"metadata.name": o.GetName(), "metadata.namespace": o.GetNamespace()}
	switch o := o.(type) {
	case *corev1.Service:
		f["spec.clusterIP"] = o.Spec.ClusterIP
		f["spec.type"] = string(o.Spec.Type)
	case *corev1.Node:
		f["spec.unschedulable"] = fmt.Sprint(o.Spec.Unschedulable)
	}
	return f
}
