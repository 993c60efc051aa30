package config

import (
	"fmt"
	"reflect"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// OwnAPIVersion and OwnKind identify the document with svcproxy's own settings. It
// may follow the KubeProxyConfiguration in the same file, after a line "---";
// kube-proxy reads only the first document, so that it can use the same file.
const (
	OwnAPIVersion = "svcproxy.io/v1alpha1"
	OwnKind       = "SvcproxyConfiguration"
)

const (
	defaultStaleness = 150 * time.Second
	// usefulStaleness leaves room for the bookmark that an API server sends about
	// once a minute.
	usefulStaleness = 90 * time.Second
	defaultProbes   = 100
	mostProbes      = 100_000
)

// OwnConfiguration is that document. A flag wins over its field.
type OwnConfiguration struct {
	metav1.TypeMeta  `json:",inline"`
	Manifests        []string         `json:"manifests,omitempty"`
	ServiceProxyName string           `json:"serviceProxyName,omitempty"`
	StalenessLimit   *metav1.Duration `json:"stalenessLimit,omitempty"`
	HealthCheck      OwnHealthCheck   `json:"healthCheck,omitempty"`
	// ExternalAddresses limits external and load-balancer addresses.
	ExternalAddresses OwnExternalAddresses `json:"externalAddresses,omitempty"`
	Userspace         OwnUserspace         `json:"userspace,omitempty"`
	IPVS              OwnIPVS              `json:"ipvs,omitempty"`
}

// OwnExternalAddresses keeps Services from taking traffic that is not theirs.
type OwnExternalAddresses struct {
	// RefuseClusterRanges: none may be an address of this node, of pods or of Services.
	RefuseClusterRanges bool     `json:"refuseClusterRanges,omitempty"`
	Refuse              []string `json:"refuse,omitempty"` // nor in these ranges
	Allow               []string `json:"allow,omitempty"`  // all have to be in these, by family
}

// isZero reports whether it limits nothing.
func (o *OwnExternalAddresses) isZero() bool {
	return !o.RefuseClusterRanges && len(o.Refuse) == 0 && len(o.Allow) == 0
}

// externalAddresses parses the limits.
func (r *resolver) externalAddresses(o *OwnExternalAddresses) ExternalAddresses {
	out := ExternalAddresses{RefuseClusterRanges: o.RefuseClusterRanges}
	for i, s := range o.Refuse {
		out.Refuse = append(out.Refuse, r.prefix(at("externalAddresses.refuse", i), s, ""))
	}
	for i, s := range o.Allow {
		out.Allow = append(out.Allow, r.prefix(at("externalAddresses.allow", i), s, ""))
	}
	return out
}

// OwnHealthCheck is about the health checks of endpoints.
type OwnHealthCheck struct {
	// Default is for Services without an annotation, and in its form; "" is off.
	Default string `json:"default,omitempty"`
	// ProbesPerSecond limits those of all endpoints together.
	ProbesPerSecond *int32 `json:"probesPerSecond,omitempty"`
}

// setDefaults fills in what was left out.
func (o *OwnConfiguration) setDefaults() {
	o.APIVersion, o.Kind = OwnAPIVersion, OwnKind
	if o.StalenessLimit == nil {
		o.StalenessLimit = &metav1.Duration{Duration: defaultStaleness}
	}
	if o.HealthCheck.ProbesPerSecond == nil {
		n := int32(defaultProbes)
		o.HealthCheck.ProbesPerSecond = &n
	}
}

// isDefault reports whether the document says nothing.
func (o *OwnConfiguration) isDefault() bool {
	return len(o.Manifests) == 0 && o.ServiceProxyName == "" && o.StalenessLimit.Duration == defaultStaleness &&
		o.HealthCheck.Default == "" && *o.HealthCheck.ProbesPerSecond == defaultProbes && o.ExternalAddresses.isZero() &&
		reflect.DeepEqual(o.Userspace, OwnUserspace{}) && o.IPVS == (OwnIPVS{})
}

// healthCheck parses what is said about the health checks of endpoints.
func (r *resolver) healthCheck(o *OwnHealthCheck) HealthCheck {
	h := HealthCheck{ProbesPerSecond: int(*o.ProbesPerSecond)}
	if o.Default != "" {
		var err error
		if h.Default, err = plan.ParseHealthCheck(o.Default); err != nil {
			r.invalid("healthCheck.default", o.Default, fmt.Sprintf("is no health check: %v", err))
		}
	}
	r.within("healthCheck.probesPerSecond", *o.ProbesPerSecond, 1, mostProbes)
	return h
}
