package config

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
)

// OwnConfiguration is that document. A flag wins over its field.
type OwnConfiguration struct {
	metav1.TypeMeta  `json:",inline"`
	Manifests        []string         `json:"manifests,omitempty"`
	ServiceProxyName string           `json:"serviceProxyName,omitempty"`
	StalenessLimit   *metav1.Duration `json:"stalenessLimit,omitempty"`
}

// setDefaults fills in what was left out.
func (o *OwnConfiguration) setDefaults() {
	o.APIVersion, o.Kind = OwnAPIVersion, OwnKind
	if o.StalenessLimit == nil {
		o.StalenessLimit = &metav1.Duration{Duration: defaultStaleness}
	}
}

// isDefault reports whether the document says nothing.
func (o *OwnConfiguration) isDefault() bool {
	return len(o.Manifests) == 0 && o.ServiceProxyName == "" && o.StalenessLimit.Duration == defaultStaleness
}
