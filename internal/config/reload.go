package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"k8s.io/kube-proxy/config/v1alpha1"
)

// Reload lays the settings of next that can change while the proxy runs over c.
// It returns the configuration that is then in force, the fields that took effect
// and those that need a restart, by their path in the file.
func (c *Config) Reload(next *Config) (inForce *Config, applied, restart []string, err error) {
	if next.Mode != c.Mode && slices.Contains(next.Preference, c.Mode) { // a choice is not made anew
		if next, err = next.Choose(c.Mode); err != nil {
			return nil, nil, nil, err
		}
	}
	merged := c.proxy.DeepCopy()
	overlayLive(merged, next.proxy.DeepCopy())
	if next.Mode != c.Mode && next.defaultNodePorts { // the default of a mode that is not in force
		merged.NodePortAddresses = nil
	}
	defaultNodePorts := setPlatformDefaults(merged, c.Mode)
	own := c.own
	own.HealthCheck, own.ExternalAddresses = next.own.HealthCheck, next.own.ExternalAddresses
	inForce, err = resolve(merged, own, c.Client.Master, c.Mode)
	if err != nil {
		return nil, nil, nil, err
	}
	inForce.ModeDefault, inForce.defaultNodePorts = c.ModeDefault, defaultNodePorts
	applied, err = changedFields(c, inForce)
	if err != nil {
		return nil, nil, nil, err
	}
	restart, err = changedFields(inForce, next)
	return inForce, applied, restart, err
}

// overlayLive copies the fields that can change in place: what the planner, the
// loop, the kernel's settings and the log read anew. Addresses of servers, the
// API client, the mode and what is built into its rules are not among them.
func overlayLive(to, from *v1alpha1.KubeProxyConfiguration) {
	to.BindAddress = from.BindAddress
	to.ClusterCIDR = from.ClusterCIDR
	to.DetectLocalMode = from.DetectLocalMode
	to.DetectLocal = from.DetectLocal
	to.NodePortAddresses = from.NodePortAddresses
	to.OOMScoreAdj = from.OOMScoreAdj

	to.IPTables.SyncPeriod = from.IPTables.SyncPeriod
	to.IPTables.MinSyncPeriod = from.IPTables.MinSyncPeriod
	to.IPTables.MasqueradeAll = from.IPTables.MasqueradeAll
	to.IPTables.LocalhostNodePorts = from.IPTables.LocalhostNodePorts
	to.IPVS.SyncPeriod = from.IPVS.SyncPeriod
	to.IPVS.MinSyncPeriod = from.IPVS.MinSyncPeriod
	to.NFTables.SyncPeriod = from.NFTables.SyncPeriod
	to.NFTables.MinSyncPeriod = from.NFTables.MinSyncPeriod
	to.NFTables.MasqueradeAll = from.NFTables.MasqueradeAll

	liberal := to.Conntrack.TCPBeLiberal // decides which rules there are
	to.Conntrack = from.Conntrack
	to.Conntrack.TCPBeLiberal = liberal

	to.Logging.Verbosity = from.Logging.Verbosity
	to.Logging.VModule = from.Logging.VModule
	if on, ok := from.FeatureGates[gateExternalIPs]; ok {
		to.FeatureGates = maps.Clone(to.FeatureGates)
		if to.FeatureGates == nil {
			to.FeatureGates = map[string]bool{}
		}
		to.FeatureGates[gateExternalIPs] = on
	} else {
		delete(to.FeatureGates, gateExternalIPs)
	}
}

// changedFields returns the paths of the fields whose values differ, sorted, also
// of those that have no effect in the mode.
func changedFields(a, b *Config) ([]string, error) {
	fa, err := fields(a)
	if err != nil {
		return nil, err
	}
	fb, err := fields(b)
	if err != nil {
		return nil, err
	}
	var out []string
	for path := range fa {
		if !reflect.DeepEqual(fa[path], fb[path]) {
			out = append(out, path)
		}
	}
	for path := range fb {
		if _, ok := fa[path]; !ok {
			out = append(out, path)
		}
	}
	slices.Sort(out)
	return out, nil
}

// fields flattens a configuration; lists stay whole.
func fields(c *Config) (map[string]any, error) {
	out := map[string]any{}
	for _, document := range []any{&c.proxy, c.own} {
		data, err := json.Marshal(document)
		if err != nil {
			return nil, fmt.Errorf("compare configurations: %w", err)
		}
		var tree map[string]any
		if err := json.Unmarshal(data, &tree); err != nil {
			return nil, fmt.Errorf("compare configurations: %w", err)
		}
		flatten(out, "", tree)
	}
	delete(out, "kind")
	delete(out, "apiVersion")
	return out, nil
}

func flatten(to map[string]any, prefix string, tree map[string]any) {
	for name, v := range tree {
		if sub, ok := v.(map[string]any); ok {
			flatten(to, prefix+name+".", sub)
			continue
		}
		to[prefix+name] = v
	}
}
