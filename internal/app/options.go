package app

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

// nodeName returns the name of this node's Node object: what is configured, or the
// host's name, in lower case as Kubernetes has it.
func nodeName(env Env, c *config.Config) (string, error) {
	if c.HostnameOverride != "" {
		return c.HostnameOverride, nil
	}
	name, err := env.Hostname()
	if err != nil {
		return "", fmt.Errorf("find this host's name: %w; give the Node's name with --hostname-override", err)
	}
	name = strings.ToLower(strings.TrimSpace(name))
	if name == "" {
		return "", fmt.Errorf("this host has no name; give the Node's name with --hostname-override")
	}
	return name, nil
}

// plannerOptions says to the planner what is configured.
func plannerOptions(c *config.Config, node string, families []plan.Family) planner.Options {
	return planner.Options{
		NodeName:           node,
		NodeOptional:       !usesAPI(c),
		NodeIP:             c.BindAddress,
		Families:           families,
		MasqueradeAll:      c.MasqueradeAll,
		Local:              localDetector(c.Local),
		NodePorts:          nodePortAddresses(c.NodePortAddresses),
		LocalhostNodePorts: c.LocalhostNodePorts,
		ServiceProxyName:   c.ServiceProxyName,
		AllowExternalIPs:   c.AllowExternalIPs,
		Guard: planner.Guard{
			ClusterRanges: c.ExternalAddresses.RefuseClusterRanges,
			Refuse:        c.ExternalAddresses.Refuse, Allow: c.ExternalAddresses.Allow,
		},
		DefaultCheck: c.HealthCheck.Default,
	}
}

func localDetector(l config.Local) planner.LocalDetector {
	kinds := map[config.LocalMode]planner.DetectorKind{
		config.ClusterCIDR:         planner.ClusterCIDR,
		config.NodeCIDR:            planner.NodeCIDR,
		config.BridgeInterface:     planner.BridgeInterface,
		config.InterfaceNamePrefix: planner.InterfaceNamePrefix,
	}
	return planner.LocalDetector{Kind: kinds[l.Mode], CIDRs: l.CIDRs, Name: l.Interface}
}

func nodePortAddresses(addrs []config.NodePortAddress) planner.NodePortAddresses {
	var out planner.NodePortAddresses
	for _, a := range addrs {
		switch a.Keyword {
		case config.Primary:
			out.Primary = true
		case config.Localhost:
			out.Localhost = true
		case config.All:
			out.All = true
		default:
			out.CIDRs = append(out.CIDRs, a.Range)
		}
	}
	return out
}

// usesAPI: an API server is asked unless there are manifests and nobody named one.
func usesAPI(c *config.Config) bool { return len(c.Manifests) == 0 || c.Client.Configured() }

// addressWarnings are remarks on the addresses in a configuration that are valid
// and perhaps not what was meant; kube-proxy gives them too.
func addressWarnings(c *config.Config, families []plan.Family) []string {
	var out []string
	if len(c.NodePortAddresses) == 0 {
		out = append(out, `nodePortAddresses is not set: node ports answer on every address of the node; "primary" is the safer choice`)
	}
	hasFamily := func(f plan.Family) bool {
		return len(c.NodePortAddresses) == 0 || slices.ContainsFunc(c.NodePortAddresses, func(a config.NodePortAddress) bool {
			return a.Keyword != "" || plan.FamilyOf(a.Range.Addr()) == f
		})
	}
	for _, f := range families {
		if !hasFamily(f) {
			out = append(out, fmt.Sprintf("nodePortAddresses has no %s entry: %s node ports answer on every address; add a range of the family, or 127.0.0.1/32 or ::1/128 for none", f, f))
		}
		if c.Local.Mode == config.ClusterCIDR && len(c.Local.CIDRs) > 0 && len(families) > 0 {
			if !slices.ContainsFunc(c.Local.CIDRs, func(p netip.Prefix) bool { return plan.FamilyOf(p.Addr()) == f }) {
				out = append(out, fmt.Sprintf("clusterCIDR has no %s range: %s traffic of this node's pods is not recognised", f, f))
			}
		}
	}
	return out
}
