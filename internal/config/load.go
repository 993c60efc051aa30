package config

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Load returns the configuration that the parsed flags and the file named by
// --config make, or an error that lists every fault with field, value and remedy.
// Warnings are sentences about what was accepted without effect. read is
// [ReadFile] or the like.
//
// With a file the values of all flags are discarded, as in kube-proxy, but for
// --hostname-override, --master, the logging flags that were given and svcproxy's
// own flags.
func (f *Flags) Load(read func(string) ([]byte, error)) (*Config, []string, error) {
	warnings := retiredFlagWarnings(f.set)
	proxy, own := f.fromFlags(), OwnConfiguration{}
	if f.set.Changed("udp-timeout") {
		own.Userspace.UDPIdleTimeout = &metav1.Duration{Duration: f.udpTimeout}
	}
	if f.ConfigFile != "" {
		data, err := read(f.ConfigFile)
		if err != nil {
			return nil, warnings, fmt.Errorf("read configuration file: %w", err)
		}
		var more []string
		proxy, own, more, err = decode(data)
		warnings = append(warnings, more...)
		if err != nil {
			return nil, warnings, fmt.Errorf("configuration file %s: %w", f.ConfigFile, err)
		}
		setDefaults(proxy)
		if err := f.overlayLogging(&proxy.Logging); err != nil {
			return nil, warnings, err
		}
	}
	modeDefault := proxy.Mode == ""
	defaultNodePorts := setPlatformDefaults(proxy, "")
	if err := f.overlayHostname(proxy); err != nil {
		return nil, warnings, err
	}
	f.overlayOwn(&own)
	own.setDefaults()
	warnings = append(warnings, settingWarnings(proxy)...)
	warnings = append(warnings, userspaceWarnings(preferred(string(proxy.Mode)), proxy.PortRange, &own.Userspace)...)
	c, err := resolve(proxy, own, f.master, "")
	if err != nil {
		return nil, warnings, err
	}
	if c.Staleness < usefulStaleness && (len(c.Manifests) == 0 || c.Client.Configured()) {
		warnings = append(warnings, fmt.Sprintf("stalenessLimit %s is shorter than an API server that is well may be silent, about a minute: everything is listed anew again and again; give %s or more", c.Staleness, usefulStaleness))
	}
	c.ModeDefault, c.defaultNodePorts = modeDefault, defaultNodePorts
	if err := c.checkPreference(); err != nil {
		return nil, warnings, err
	}
	return c, warnings, nil
}

// checkPreference checks what only modes after the first take from the file, so that a
// fault is found before a node needs one of them.
func (c *Config) checkPreference() error {
	for _, mode := range c.Preference[1:] {
		if mode == IPVS && !gate(c.proxy.FeatureGates, gateIPVS, true) {
			continue // passed over
		}
		if _, err := c.Choose(mode); err != nil {
			return err
		}
	}
	return nil
}

// overlayLogging lays the logging flags that were given over a file's settings;
// patterns of --vmodule come before the file's.
func (f *Flags) overlayLogging(to *logsapi.LoggingConfiguration) error {
	var fs pflag.FlagSet
	vmodule := to.VModule
	to.VModule = nil
	registerLogging(&fs, to)
	var errs []error
	fs.VisitAll(func(o *pflag.Flag) {
		if given := f.set.Lookup(o.Name); given.Changed {
			if err := o.Value.Set(given.Value.String()); err != nil {
				errs = append(errs, fmt.Errorf("flag --%s: %w", o.Name, err))
			}
		}
	})
	to.VModule = append(to.VModule, vmodule...)
	return errors.Join(errs...)
}

// overlayHostname applies --hostname-override, which wins over the file.
func (f *Flags) overlayHostname(to *v1alpha1.KubeProxyConfiguration) error {
	if f.hostname == "" {
		return nil
	}
	name := strings.TrimSpace(f.hostname)
	if name == "" {
		return fmt.Errorf("flag --hostname-override: %q is only spaces; give the Node's name or leave the flag out", f.hostname)
	}
	to.HostnameOverride = strings.ToLower(name)
	return nil
}

// overlayOwn applies svcproxy's own flags, which win over the file.
func (f *Flags) overlayOwn(to *OwnConfiguration) {
	if len(f.own.Manifests) > 0 {
		to.Manifests = f.own.Manifests
	}
	if f.own.ServiceProxyName != "" {
		to.ServiceProxyName = f.own.ServiceProxyName
	}
	if f.set.Changed("staleness-limit") {
		to.StalenessLimit = &metav1.Duration{Duration: f.stalenessLimit}
	}
}

// decode reads a file: a KubeProxyConfiguration, and perhaps our own document
// behind it. Fields that do not exist, or twice, are warnings.
func decode(data []byte) (*v1alpha1.KubeProxyConfiguration, OwnConfiguration, []string, error) {
	proxy, own := &v1alpha1.KubeProxyConfiguration{}, OwnConfiguration{}
	var warnings []string
	seen := map[string]bool{}
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
	for n := 1; ; n++ {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, own, warnings, fmt.Errorf("document %d: %w", n, err)
		}
		body, strictErr := yaml.YAMLToJSONStrict(document)
		if strictErr != nil {
			if body, err = yaml.YAMLToJSON(document); err != nil {
				return nil, own, warnings, fmt.Errorf("document %d: not YAML or JSON: %w", n, err)
			}
			warnings = append(warnings, fmt.Sprintf("configuration file, document %d: %v; the last value counts", n, strictErr))
		}
		if string(body) == "null" {
			continue // only comments
		}
		if !bytes.HasPrefix(body, []byte("{")) {
			return nil, own, warnings, fmt.Errorf("document %d: it holds no fields but %s; begin it with \"apiVersion: %s\" and \"kind: %s\"", n, shorten(body), apiVersion, kind)
		}
		var t metav1.TypeMeta
		if err := kjson.UnmarshalCaseSensitivePreserveInts(body, &t); err != nil {
			return nil, own, warnings, fmt.Errorf("document %d: %w", n, err)
		}
		target := targetOf(t, proxy, &own)
		switch {
		case target == nil && !seen[kind]:
			return nil, own, warnings, fmt.Errorf("document %d: apiVersion %q, kind %q is not known; the file begins with a %s %s, and a %s %s may follow",
				n, t.APIVersion, t.Kind, apiVersion, kind, OwnAPIVersion, OwnKind)
		case target == nil, target == proxy && seen[kind]: // kube-proxy reads the first document only
			warnings = append(warnings, fmt.Sprintf("configuration file, document %d, of apiVersion %q and kind %q, has no effect; remove it", n, t.APIVersion, t.Kind))
			continue
		case seen[t.Kind]:
			return nil, own, warnings, fmt.Errorf("document %d: a second %s; keep one", n, t.Kind)
		}
		seen[t.Kind] = true
		if target == proxy && own.Userspace.UDPIdleTimeout == nil {
			if own.Userspace.UDPIdleTimeout, err = formerUDPTimeout(body); err != nil {
				return nil, own, warnings, fmt.Errorf("document %d: %w", n, err)
			}
		}
		more, err := decodeInto(body, target)
		warnings = append(warnings, more...)
		if err != nil {
			return nil, own, warnings, fmt.Errorf("document %d: %w", n, err)
		}
	}
	if !seen[kind] {
		return nil, own, warnings, fmt.Errorf("it holds no %s; begin it with \"apiVersion: %s\" and \"kind: %s\"", kind, apiVersion, kind)
	}
	return proxy, own, warnings, nil
}

// shorten is the beginning of a value.
func shorten(value []byte) string {
	const enough = 40
	if len(value) > enough {
		return strings.ToValidUTF8(string(value[:enough]), "") + "..."
	}
	return string(value)
}

// targetOf returns where a document of type t goes, nil if nowhere.
func targetOf(t metav1.TypeMeta, proxy *v1alpha1.KubeProxyConfiguration, own *OwnConfiguration) any {
	switch {
	case t.APIVersion == apiVersion && t.Kind == kind:
		return proxy
	case t.APIVersion == OwnAPIVersion && t.Kind == OwnKind:
		return own
	}
	return nil
}

// decodeInto fills in target; what only a strict reader minds comes back as
// warnings.
func decodeInto(body []byte, target any) (warnings []string, err error) {
	strict, err := kjson.UnmarshalStrict(body, target)
	if err != nil {
		return nil, wrongValues(body, target, err)
	}
	for _, e := range strict {
		path, ok := fieldOf(e.Error())
		if path == fieldUDPTimeout {
			continue
		}
		if why := retiredField(path); ok && why != "" {
			warnings = append(warnings, fmt.Sprintf("configuration field %s is retired: %s; remove it", path, why))
			continue
		}
		warnings = append(warnings, fmt.Sprintf("configuration file: %v: ignored; check its name and place", e))
	}
	return warnings, nil
}

// fieldUDPTimeout is a field that v1alpha1 had when kube-proxy had a userspace mode.
const fieldUDPTimeout = "udpIdleTimeout"

// formerUDPTimeout takes it from a document.
func formerUDPTimeout(body []byte) (*metav1.Duration, error) {
	var former struct {
		Value *json.RawMessage `json:"udpIdleTimeout"`
	}
	if err := json.Unmarshal(body, &former); err != nil || former.Value == nil {
		return nil, nil // what is wrong elsewhere is said by the decoder of the whole
	}
	var d metav1.Duration
	if err := json.Unmarshal(*former.Value, &d); err != nil {
		return nil, fmt.Errorf("%s: %s cannot be used; give a time like 30s", fieldUDPTimeout, *former.Value)
	}
	return &d, nil
}

// settingWarnings names settings that are valid and have no effect.
func settingWarnings(c *v1alpha1.KubeProxyConfiguration) []string {
	var out []string
	if c.WindowsRunAsService || c.Winkernel != (v1alpha1.KubeProxyWinkernelConfiguration{}) {
		out = append(out, "configuration fields winkernel and windowsRunAsService only have an effect on Windows; remove them")
	}
	if o := c.Logging.Options; o.Text.SplitStream || o.JSON.SplitStream {
		out = append(out, "split log streams have no effect: all logs go to standard error; remove logging.options.*.splitStream")
	}
	return append(out, gateWarnings(c.FeatureGates)...)
}
