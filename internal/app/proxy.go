package app

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/choice"
	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/cluster/kube"
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/health"
	"github.com/svcproxy/svcproxy/internal/loopback"
	"github.com/svcproxy/svcproxy/internal/metrics"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
	"github.com/svcproxy/svcproxy/internal/probe"
	"github.com/svcproxy/svcproxy/internal/takeover"
)

// proxy is everything of a running proxy, wired in newProxy from the facts on the
// left to the kernel on the right:
//
//	sources -> state -> planner -> loop -> backend
//
// with the servers, the events and the configuration file at its sides.
type proxy struct {
	env      Env
	flags    *config.Flags
	log      logControl
	node     string
	mode     builtMode
	how      *choice.Result // it was chosen; nil: there was no choice
	families []plan.Family
	noIPv6   error // why IPv6 is not among them
	started  time.Time

	live     *liveConfig
	sources  *sources
	state    *cluster.State
	planner  *planner.Planner // the loop's goroutine alone calls it
	loop     *dataplane.Loop
	carries  dataplane.Server // nil: the kernel carries all traffic
	loopback *loopback.Forwarder
	prober   *probe.Prober
	takeover *takeover.Takeover
	health   *health.Health
	metrics  *metrics.Metrics
	events   *events

	mu     sync.Mutex // guards kernel
	kernel []string   // settings that could not be made
}

// newProxy sets everything up; it reads a kubeconfig, the host's addresses, and whether
// another mode is in force, and starts and writes nothing.
func newProxy(ctx context.Context, env Env, flags *config.Flags, with chosen, log logControl) (*proxy, error) {
	c, mode := with.config, with.mode
	p := &proxy{env: env, flags: flags, log: log, mode: mode, how: with.how, started: time.Now()}
	p.live = newLiveConfig(c, flags.ConfigFile, p.started)
	var err error
	if p.node, err = nodeName(env, c); err != nil {
		return nil, err
	}
	p.families, p.noIPv6 = mode.families(ctx, env.Host)
	p.metrics = metrics.New(mode.Name, env.build(), log.Logger)
	if p.sources, err = newSources(c, sourceOptions{
		node: p.node, version: env.buildVersion(), log: log.Logger, fileLog: log.Logger, count: p.metrics.Transport,
	}); err != nil {
		return nil, err
	}
	p.events = &events{log: log.Logger, node: p.node}
	if p.sources.client != nil {
		p.events.recorder = kube.NewRecorder(p.sources.client, kube.RecorderOptions{Node: p.node, Log: log.Logger})
	}

	p.state = cluster.NewState(time.Now)
	addrs, err := env.Host.Addrs()
	if err != nil {
		return nil, err
	}
	p.state.SetHost(addrs)
	p.prober = newProber(c, p.state, p.metrics, p.events.notes, log.Logger)
	p.planner = planner.New(p.state, plannerOptions(c, p.node, p.families))
	backend, err := mode.New(modeEnv(c, log.Logger, p.metrics, p.families))
	if err != nil {
		return nil, fmt.Errorf("set up mode %s: %w", mode.Name, err)
	}
	p.carries, _ = backend.(dataplane.Server)
	p.health = health.New(health.Config{
		Families: p.families, SyncPeriod: c.SyncPeriod, Eligible: p.eligible, Ready: p.ready,
		Age: p.state.Age, AgeLimit: c.Staleness, Stats: p.metrics, Notes: p.events.notes, Log: log.Logger,
	})
	p.takeover = p.newTakeover(c, backend)
	p.loopback = loopback.New(loopback.Config{
		Families: p.families, Relay: relayOptions(c), Notes: p.events.notes, Log: log.Logger,
	})
	p.loop = dataplane.New(dataplane.Config{
		Mode: mode.Name, Planner: p.checkedPlanner(), Backend: backend, Families: p.families,
		Log: log.Logger, Stats: p.metrics, Health: p.health, Flows: flowTable(mode.OwnFlows),
		Notes: p.events.notes, Age: p.state.Age, First: p.firstSync,
		Follow:   []dataplane.Follower{p.takeover, p.prober, p.loopback},
		Whole:    p.takeover.InForce(ctx),
		Settings: loopSettings(c),
	})
	p.compute()
	p.collectRelayed(backend)
	return p, nil
}

// checkedPlanner is the planner as the loop sees it.
func (p *proxy) checkedPlanner() dataplane.Planner {
	return checkedPlanner{p.planner, p.node, func() bool { return p.state.Node() != nil }, p.sources}
}

func loopSettings(c *config.Config) dataplane.Settings {
	return dataplane.Settings{MinInterval: c.MinSyncPeriod, SyncPeriod: c.SyncPeriod}
}

// compute defines the metrics that are looked up when they are asked for.
func (p *proxy) compute() {
	p.metrics.Compute("svcproxy_view_age_seconds", func() float64 { return p.state.Age().Seconds() })
	p.metrics.Compute("svcproxy_services", func() float64 { n, _ := p.state.Counts(); return float64(n) })
	p.metrics.Compute("svcproxy_endpoints", func() float64 { _, n := p.state.Counts(); return float64(n) })
	p.metrics.Compute("svcproxy_synced", func() float64 {
		if p.loop.Synced() {
			return 1
		}
		return 0
	})
}

// run runs the proxy until ctx ends; what is in the kernel stays.
// It returns early only for what cannot heal. content is that of the configuration
// file.
func (p *proxy) run(ctx context.Context, content []byte) error {
	if p.carries != nil {
		defer oneMoreProcessor()()
	}
	c := p.live.get()
	p.log.Info("svcproxy starts", "version", p.env.buildVersion(), "node", p.node, "mode", p.mode.Name,
		"families", fmt.Sprint(p.families), "sources", strings.Join(p.sourceNames(), ", "))
	p.warn(addressWarnings(c, p.families))
	if p.noIPv6 != nil {
		p.log.Info("IPv6 is off", "why", p.noIPv6)
	}
	p.announce(c)
	p.setUpKernel(c)

	g := newGroup(ctx)
	for _, follow := range p.sources.follow(p.state) {
		g.run(follow)
	}
	g.run(p.followAddresses)
	g.run(p.loop.Run)
	if p.carries != nil {
		g.run(p.carries.Serve)
	}
	g.run(p.prober.Run)
	g.run(endless(p.loopback.Run))
	g.run(endless(p.health.Run))
	g.run(endless(p.takeover.Run))
	for _, server := range p.servers(c) {
		g.run(server.Run)
	}
	if p.events.recorder != nil {
		g.run(endless(p.events.recorder.Run))
	}
	if p.flags.ConfigFile != "" {
		g.run(endless(func(ctx context.Context) { p.followConfig(ctx, content) }))
	}
	err := g.wait()
	switch {
	case err != nil:
	case p.carries != nil:
		p.log.Info("svcproxy ends; its rules stay")
	default:
		p.log.Info("svcproxy ends; the kernel keeps forwarding")
	}
	return err
}

// announce tells the cluster that this node's proxy starts.
func (p *proxy) announce(c *config.Config) {
	p.events.onNode("Starting", false, "svcproxy starts in "+p.mode.Name+" mode")
	p.tellChoice()
	if c.ModeDefault {
		p.log.Info("no mode is configured", "default", p.mode.Name)
	}
}

// setUpKernel makes the kernel's settings and remembers what failed.
func (p *proxy) setUpKernel(c *config.Config) {
	failed := setUpKernel(p.env.Host, c.Conntrack, p.log.Logger)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kernel = failed
}

// followAddresses keeps the addresses of the host's interfaces up to date.
func (p *proxy) followAddresses(ctx context.Context) error {
	const pause = 5 * time.Second
	for {
		err := p.env.Host.Watch(ctx, p.state.SetHost)
		if ctx.Err() != nil {
			return nil
		}
		p.log.Warn("changes of the host's addresses are not seen for now", "err", err, "retry", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// sourceNames says where the facts come from.
func (p *proxy) sourceNames() []string {
	out := append([]string(nil), p.live.get().Manifests...)
	if p.sources.client != nil {
		out = append(out, p.sources.client.Host())
	}
	return out
}

// getStatus is what /status serves.
func (p *proxy) getStatus() status {
	s := status{
		Version: p.env.buildVersion(), Node: p.node, Started: p.started,
		Config: p.live.getStatus(), Sources: p.sourceNames(), Loop: p.loop.Status(), HealthChecks: p.prober.Status(),
		Choice: p.how, Takeover: p.takeover.Status(),
	}
	s.Services, s.Endpoints = p.state.Counts()
	p.mu.Lock()
	s.Problems = append(s.Problems, p.kernel...)
	p.mu.Unlock()
	s.Problems = append(s.Problems, p.sources.problems()...)
	if problem := p.takeover.Problem(); problem != "" {
		s.Problems = append(s.Problems, problem)
	}
	return s
}
