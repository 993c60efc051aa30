package app

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/health"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// servers are the two addresses that answer about the proxy.
func (p *proxy) servers(c *config.Config) []health.Server {
	failed := func(reason plan.Reason) func(error) {
		return func(err error) { p.events.onNode(reason, true, err.Error()) }
	}
	return []health.Server{
		{
			Name: "health", Addr: address(c.Healthz), Handler: p.health.Handler(),
			HardFail: c.BindAddressHardFail, Failed: failed("FailedToStartProxierHealthcheck"), Log: p.log.Logger, Listen: p.listen,
		},
		{
			Name: "metrics", Addr: address(c.Metrics), Handler: p.diagnostics(c).Handler(),
			HardFail: c.BindAddressHardFail, Failed: failed("FailedToStartMetricServer"), Log: p.log.Logger, Listen: p.listen,
		},
	}
}

// listen opens a server's address. Where IPv6 is off an IPv4 wildcard takes IPv4 only;
// else it takes both families, as kube-proxy's does.
func (p *proxy) listen(network, addr string) (net.Listener, error) {
	a, err := netip.ParseAddrPort(addr)
	if err == nil && a.Addr().Is4() && !slices.Contains(p.families, plan.IPv6) {
		network = "tcp4"
	}
	return net.Listen(network, addr)
}

// address is the form in which servers take it, "" for none.
func address(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func (p *proxy) diagnostics(c *config.Config) health.Diagnostics {
	return health.Diagnostics{
		Program: "svcproxy", Version: p.env.buildVersion(), Mode: p.mode.Name, Started: p.started,
		Metrics: p.metrics.Handler(),
		Config:  func() (any, error) { return p.live.get().Proxy(), nil },
		Status:  func() any { return p.getStatus() },
		Flags:   p.flags.Values, SetVerbosity: p.setVerbosity, Profiling: c.Profiling,
	}
}

// setVerbosity changes -v until the configuration file changes.
func (p *proxy) setVerbosity(text string) error {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return fmt.Errorf("give a number from 0 on: %w", err)
	}
	l := p.live.get().Log
	l.Verbosity = int(n)
	p.log.setVerbosity(l)
	return setKlogVerbosity(l.Verbosity)
}

// eligible reports whether this node should receive traffic from load balancers.
func (p *proxy) eligible() (ok bool, why string) {
	n := p.state.Node()
	switch {
	case n != nil && n.Deleting:
		return false, fmt.Sprintf("Node %s is being deleted", p.node)
	case n == nil && usesAPI(p.live.get()):
		if complete, missing := p.state.Complete(); !complete {
			return false, fmt.Sprintf("whether there is a Node called %s is not known yet: %s did not answer so far", p.node, strings.Join(missing, ", "))
		}
		return false, fmt.Sprintf("there is no Node called %s; if that is not this node's name, set --hostname-override", p.node)
	}
	return true, ""
}

// ready reports whether everything was in the kernel once, and what is awaited.
func (p *proxy) ready() (ok bool, missing []string) {
	s := p.loop.Status()
	missing = s.Waiting
	if !s.Synced && s.LastError != "" {
		missing = append(missing, "the kernel could not be programmed: "+s.LastError)
	}
	if problem := p.takeoverProblem(); problem != "" {
		return false, append(missing, problem)
	}
	return s.Synced, missing
}
