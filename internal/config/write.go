package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// WriteTo writes the configuration as a file that [Flags.Load] reads back to the
// same. It implements [io.WriterTo].
func (c *Config) WriteTo(w io.Writer) (int64, error) {
	proxy, err := yaml.Marshal(c.written())
	if err != nil {
		return 0, fmt.Errorf("encode %s: %w", kind, err)
	}
	out := bytes.NewBuffer(proxy)
	if !c.own.isDefault() {
		own, err := yaml.Marshal(c.own)
		if err != nil {
			return 0, fmt.Errorf("encode %s: %w", OwnKind, err)
		}
		out.WriteString("---\n")
		out.Write(own)
	}
	return out.WriteTo(w)
}

// MarshalJSON returns the body of /configz: the documents of the file, each under
// its API group. Nothing secret is in them; the kubeconfig is only named.
func (c *Config) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{"kubeproxy.config.k8s.io": c.written(), "svcproxy.io": c.own})
}

// written is the configuration as kube-proxy would write it: sync periods and
// masqueradeAll only in the section of the mode that they act on.
func (c *Config) written() *v1alpha1.KubeProxyConfiguration {
	p := c.proxy.DeepCopy()
	var none metav1.Duration
	p.IPTables.SyncPeriod, p.IPTables.MinSyncPeriod, p.IPTables.MasqueradeAll = none, none, false
	p.IPVS.SyncPeriod, p.IPVS.MinSyncPeriod = none, none
	p.NFTables.SyncPeriod, p.NFTables.MinSyncPeriod, p.NFTables.MasqueradeAll = none, none, false
	setPeriods(p, c.SyncPeriod, c.MinSyncPeriod)
	if c.Mode == NFTables {
		p.NFTables.MasqueradeAll = c.MasqueradeAll
	} else {
		p.IPTables.MasqueradeAll = c.MasqueradeAll
	}
	return p
}
