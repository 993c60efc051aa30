package config

import (
	"bytes"
	"fmt"
	"io"
	"os"

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

// Proxy returns the configuration as the v1alpha1 object that kube-proxy's /configz
// shows. Nothing secret is in it; the kubeconfig is only named.
func (c *Config) Proxy() *v1alpha1.KubeProxyConfiguration { return c.written() }

// written is the configuration as kube-proxy would write it: sync periods and
// masqueradeAll only in the section of the mode that they act on.
func (c *Config) written() *v1alpha1.KubeProxyConfiguration {
	p := c.proxy.DeepCopy()
	if len(c.Preference) > 1 { // all sections may count
		return p
	}
	var none metav1.Duration
	p.IPTables.SyncPeriod, p.IPTables.MinSyncPeriod, p.IPTables.MasqueradeAll = none, none, false
	p.IPVS.SyncPeriod, p.IPVS.MinSyncPeriod = none, none
	p.NFTables.SyncPeriod, p.NFTables.MinSyncPeriod, p.NFTables.MasqueradeAll = none, none, false
	setPeriods(p, c.Mode, c.SyncPeriod, c.MinSyncPeriod)
	if c.Mode == NFTables {
		p.NFTables.MasqueradeAll = c.MasqueradeAll
	} else {
		p.IPTables.MasqueradeAll = c.MasqueradeAll
	}
	return p
}

// WriteFile writes what WriteTo does to a file.
func (c *Config) WriteFile(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	if _, err := c.WriteTo(f); err != nil {
		_ = f.Close()
		return fmt.Errorf("write configuration to %s: %w", name, err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("write configuration to %s: %w", name, err)
	}
	return nil
}
