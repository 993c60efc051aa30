package file

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// maxFailures bounds what is said about one object.
const maxFailures = 16

// decoded is what became of one object of a document.
type decoded struct {
	object   *object   // nil: it is not to be used
	failures []failure // the reasons, or mere warnings if there is an object
	ignored  bool      // of a kind that is not read
	other    bool      // another node's Node
}

// decode turns an item into an object. node is the own node's name.
func (it *item) decode(node string) decoded {
	switch it.typeMeta {
	case typeMeta{"v1", "Service"}:
		return convert(it, defaultService, validateService, func(s *corev1.Service, o *object) {
			o.service = cluster.ReduceService(s)
		})
	case typeMeta{"discovery.k8s.io/v1", "EndpointSlice"}:
		return convert(it, defaultNamespaced[*discoveryv1.EndpointSlice], validateSlice, func(s *discoveryv1.EndpointSlice, o *object) {
			o.slices = []*cluster.Slice{cluster.ReduceSlice(s)}
		})
	case typeMeta{"v1", "Endpoints"}:
		return convert(it, defaultNamespaced[*corev1.Endpoints], validateEndpoints, func(e *corev1.Endpoints, o *object) {
			o.slices = cluster.ReduceEndpoints(e)
		})
	case typeMeta{"v1", "Node"}:
		if k, err := it.key(); err == nil && k.name.Name != node {
			return decoded{other: true}
		}
		return convert(it, defaultCluster[*corev1.Node], validateNode, func(n *corev1.Node, o *object) {
			o.node = cluster.ReduceNode(n)
		})
	case typeMeta{"networking.k8s.io/v1", "ServiceCIDR"}:
		return convert(it, defaultCluster[*networkingv1.ServiceCIDR], validateServiceCIDR, func(c *networkingv1.ServiceCIDR, o *object) {
			o.cidrs = cluster.ReduceServiceCIDR(c)
		})
	}
	if want := it.readVersion(); want != "" {
		key, _ := it.key() // without a name the document alone is named
		return decoded{failures: []failure{{
			key: key, field: it.prefix + "apiVersion", reason: fmt.Sprintf("%s is not read; write the object in %s", it.APIVersion, want),
		}}}
	}
	return decoded{ignored: true}
}

// readVersion returns the version in which the item would be read: "" if there is
// none, because its kind or its API group is another.
func (t typeMeta) readVersion() string {
	group, _, _ := strings.Cut(t.APIVersion, "/")
	for _, read := range [...]typeMeta{{"discovery.k8s.io/v1", "EndpointSlice"}, {"networking.k8s.io/v1", "ServiceCIDR"}} {
		if t.Kind == read.Kind && strings.HasPrefix(read.APIVersion, group+"/") {
			return read.APIVersion
		}
	}
	return ""
}

// isNamespaced reports whether objects of a kind that is read have a namespace.
func isNamespaced(kind string) bool { return kind != "Node" && kind != "ServiceCIDR" }

// key reads an object's name and nothing else, so that an object that does not
// decode can still be told.
func (it *item) key() (objectKey, error) {
	var head struct {
		Metadata struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"metadata"`
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(it.data, &head); err != nil {
		return objectKey{}, err
	}
	k := objectKey{kind: it.Kind, name: cluster.Name{Namespace: head.Metadata.Namespace, Name: head.Metadata.Name}}
	switch {
	case k.name.Name == "":
		return objectKey{}, errors.New("metadata.name: missing: name the object")
	case !isNamespaced(it.Kind):
		k.name.Namespace = ""
	case k.name.Namespace == "":
		k.name.Namespace = metav1.NamespaceDefault
	}
	return k, nil
}

// convert decodes, defaults, validates and reduces.
func convert[T any](it *item, defaults func(*T), validate func(*T) field.ErrorList, reduce func(*T, *object)) decoded {
	key, err := it.key()
	if err != nil {
		f := decodeFailure(objectKey{}, it.prefix, err)
		f.reason = it.Kind + ": " + f.reason
		return decoded{failures: []failure{f}}
	}
	o := new(T)
	warnings, err := kjson.UnmarshalStrict(it.data, o)
	if err != nil {
		return decoded{failures: []failure{decodeFailure(key, it.prefix, err)}}
	}
	defaults(o)
	if errs := validate(o); len(errs) > 0 {
		return decoded{failures: fieldFailures(key, it.prefix, errs)}
	}
	d := decoded{object: &object{key: key}}
	reduce(o, d.object)
	for _, w := range warnings {
		d.failures = addFailure(d.failures, strictFailure(key, it.prefix, w))
	}
	return d
}

func addFailure(list []failure, f failure) []failure {
	switch {
	case len(list) < maxFailures:
		return append(list, f)
	case len(list) == maxFailures:
		return append(list, failure{key: f.key, reason: "more of the kind is not listed"})
	}
	return list
}

func fieldFailures(key objectKey, prefix string, errs field.ErrorList) (out []failure) {
	for _, e := range errs {
		out = addFailure(out, failure{key: key, field: prefix + e.Field, reason: e.ErrorBody()})
	}
	return out
}

// decodeFailure names the field if the decoder does.
func decodeFailure(key objectKey, prefix string, err error) failure {
	f := failure{key: key, field: strings.TrimSuffix(prefix, "."), reason: oneLine(err.Error())}
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		f.field = prefix + wrong.Field
		f.reason = fmt.Sprintf("is a %s, want %s", wrong.Value, wanted(wrong.Type))
	}
	return f
}

// wanted says what a field of a Go type takes.
func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "text"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map, reflect.Pointer:
		return "fields with values"
	}
	return "a number"
}

// strictFailure is a field that the API does not know, or that is there twice.
func strictFailure(key objectKey, prefix string, err error) failure {
	f := failure{key: key, field: strings.TrimSuffix(prefix, "."), reason: err.Error()}
	var named kjson.FieldError
	if errors.As(err, &named) {
		f.field = prefix + named.FieldPath()
		if strings.HasPrefix(f.reason, "unknown field") {
			f.reason = "no such field in " + key.kind + ": correct its spelling or place, or remove it"
		}
	}
	return f
}
