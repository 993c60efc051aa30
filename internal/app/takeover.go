package app

import (
	"context"
	"fmt"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/takeover"
)

// newTakeover makes this mode the only one on the node, once it works.
func (p *proxy) newTakeover(c *config.Config, backend dataplane.Backend) *takeover.Takeover {
	env := modeEnv(c, p.log.Logger, p.metrics, p.families)
	cfg := takeover.Config{
		Mode: p.mode.Name, Families: p.families, Loop: loopOf{p}, Planner: p.planner,
		Rival: takeover.Finder{}.Find, Tell: p.events.onNode, Stats: p.metrics, Log: p.log.Logger,
	}
	cfg.Differ, _ = backend.(dataplane.Differ)
	for _, m := range builtModes(c) {
		if m.Name == p.mode.Name {
			if m.CleanupKubeProxy != nil {
				cfg.Leftovers = func(ctx context.Context) error { return m.CleanupKubeProxy(ctx, env) }
			}
			continue
		}
		remove := m.Cleanup
		if m.HandOver != nil {
			remove = m.HandOver
		}
		o := takeover.Other{Name: m.Name, Remove: func(ctx context.Context) error { return remove(ctx, env) }}
		if m.InForce != nil {
			o.InForce = func(ctx context.Context) (bool, error) { return m.InForce(ctx, env) }
		}
		cfg.Others = append(cfg.Others, o)
	}
	return takeover.New(cfg)
}

// loopOf is the proxy's loop, which is made after what follows it.
type loopOf struct{ p *proxy }

func (l loopOf) Do(ctx context.Context, f func()) error { return l.p.loop.Do(ctx, f) }
func (l loopOf) Status() dataplane.Status               { return l.p.loop.Status() }

// firstSync is called once, when the whole plan is in the kernel.
func (p *proxy) firstSync() {
	p.takeover.Begin()
	settle(p.env.Getenv)
}

// takeoverProblem says what a rollout should wait for: a mode that does not pass its
// own probe.
func (p *proxy) takeoverProblem() string {
	s := p.takeover.Status()
	if s.KubeProxy != "" || s.Error == "" {
		return ""
	}
	return fmt.Sprintf("mode %s is not alone yet: %s", p.mode.Name, s.Error)
}
