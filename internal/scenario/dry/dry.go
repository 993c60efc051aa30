// Package dry stands in for what a scenario lacks that runs without a process and a
// kernel: the program's reading of its configuration, and its probes of endpoints.
package dry

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

// Options returns what a configuration file and arguments say to the planner.
func Options(file []byte, args []string) (planner.Options, error) {
	flags := config.NewFlags()
	fs := pflag.NewFlagSet("svcproxy", pflag.ContinueOnError)
	fs.SetNormalizeFunc(config.NormalizeName)
	flags.Register(fs)
	if err := fs.Parse(append([]string{"--config", "the configuration"}, args...)); err != nil {
		return planner.Options{}, err
	}
	c, _, err := flags.Load(func(string) ([]byte, error) { return file, nil })
	if err != nil {
		return planner.Options{}, err
	}
	o := planner.Options{
		NodeName: c.HostnameOverride, NodeIP: c.BindAddress, Families: plan.Families[:],
		MasqueradeAll: c.MasqueradeAll, LocalhostNodePorts: c.LocalhostNodePorts,
		ServiceProxyName: c.ServiceProxyName, AllowExternalIPs: c.AllowExternalIPs, DefaultCheck: c.HealthCheck.Default,
		Local: planner.LocalDetector{
			Kind: map[config.LocalMode]planner.DetectorKind{
				config.ClusterCIDR: planner.ClusterCIDR, config.NodeCIDR: planner.NodeCIDR,
				config.BridgeInterface: planner.BridgeInterface, config.InterfaceNamePrefix: planner.InterfaceNamePrefix,
			}[c.Local.Mode],
			CIDRs: c.Local.CIDRs, Name: c.Local.Interface,
		},
	}
	for _, a := range c.NodePortAddresses {
		switch a.Keyword {
		case config.Primary:
			o.NodePorts.Primary = true
		case config.Localhost:
			o.NodePorts.Localhost = true
		case config.All:
			o.NodePorts.All = true
		default:
			o.NodePorts.CIDRs = append(o.NodePorts.CIDRs, a.Range)
		}
	}
	return o, nil
}

// Probe finds out how the endpoints of p are that are to be probed, hands that to
// state, and reports whether anything is news there. listens says whether a server
// accepts connections at an address.
func Probe(p *plan.Plan, listens func(netip.AddrPort) bool, state *cluster.State) (news bool) {
	for id, sp := range p.Services {
		check := sp.Chosen().Check
		if check.Method == plan.NoCheck {
			continue
		}
		name := cluster.Name(id.Service())
		for _, pool := range sp.Pools {
			for _, e := range pool {
				before := len(state.Failing(name))
				state.SetFailing(name, e.Addr, !listens(check.Target(e.Addr)) || !accepts(check))
				news = news || len(state.Failing(name)) != before
			}
		}
	}
	return news
}

// accepts reports whether a check wants the code that the scenarios' servers give:
// the one that the path names ("/status/503"), else 200.
func accepts(c plan.HealthCheck) bool {
	if c.Method == plan.CheckTCP {
		return true
	}
	code := 200
	if s, ok := strings.CutPrefix(c.Path, "/status/"); ok {
		if n, err := strconv.Atoi(s); err == nil {
			code = n
		}
	}
	if c.Code == 0 {
		return code >= 200 && code <= 399
	}
	return code == int(c.Code)
}
