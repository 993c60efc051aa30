package config

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// OwnIPVS is about ipvs mode, beyond what kube-proxy has of it.
type OwnIPVS struct {
	// DrainTimeout is how long flows to endpoints that are gone may go on, for Services
	// without an annotation.
	DrainTimeout *metav1.Duration `json:"drainTimeout,omitempty"`
}

// ownIPVS parses the settings of ipvs mode that kube-proxy does not have.
func (r *resolver) ownIPVS(o *OwnIPVS, into *IPVSOptions) {
	if o.DrainTimeout != nil {
		into.DrainTimeout = r.positive("ipvs.drainTimeout", *o.DrainTimeout)
	}
}
