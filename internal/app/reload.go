package app

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/config"
)

// configPoll is how often the configuration file is looked at although nothing was
// notified.
const configPoll = 10 * time.Second

// liveConfig is the configuration in force and how the file stands to it.
type liveConfig struct {
	mu     sync.Mutex // guards all below
	config *config.Config
	status configStatus
	warned map[string]bool // what was said already
}

func newLiveConfig(c *config.Config, file string, now time.Time) *liveConfig {
	return &liveConfig{config: c, status: configStatus{File: file, Loaded: now}, warned: map[string]bool{}}
}

// news returns those of the warnings that were not returned before.
func (l *liveConfig) news(warnings []string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, w := range warnings {
		if !l.warned[w] {
			l.warned[w] = true
			out = append(out, w)
		}
	}
	return out
}

// get returns the configuration in force.
func (l *liveConfig) get() *config.Config {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.config
}

func (l *liveConfig) getStatus() configStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// reject remembers why the file cannot be used.
func (l *liveConfig) reject(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status.Error = err.Error()
}

func (l *liveConfig) accept(c *config.Config, restart []string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.config = c
	l.status.Loaded, l.status.Error, l.status.Restart = now, "", restart
}

// followConfig applies every change of the configuration file until ctx ends.
// content is what was loaded at the start.
func (p *proxy) followConfig(ctx context.Context, content []byte) {
	poll := time.NewTicker(configPoll)
	defer poll.Stop()
	w := config.Watcher{Path: p.flags.ConfigFile, Last: content, Poll: poll.C, Failed: p.reject, Log: p.log.Logger}
	w.Run(ctx, func(content []byte) { p.reload(ctx, content) })
}

// reload makes new content of the configuration file effective as far as that is
// possible while the proxy runs. What is invalid changes nothing.
func (p *proxy) reload(ctx context.Context, content []byte) {
	next, warnings, err := p.flags.Load(func(string) ([]byte, error) { return content, nil })
	if err != nil {
		p.reject(err)
		return
	}
	p.warn(warnings)
	inForce, applied, restart, err := p.live.get().Reload(next)
	if err != nil {
		p.reject(err)
		return
	}
	p.live.accept(inForce, restart, time.Now())
	p.apply(ctx, inForce)
	p.log.Info("configuration file loaded", "file", p.flags.ConfigFile, "applied", applied, "restartNeeded", restart)
	if len(restart) > 0 {
		p.events.onNode("RestartNeeded", true, "fields of the configuration file take effect after a restart only: "+strings.Join(restart, ", "))
	}
}

// reject tells that the file cannot be used.
func (p *proxy) reject(err error) {
	p.live.reject(err)
	p.events.onNode("InvalidConfiguration", true, "the configuration file is rejected, the old settings stay in force: "+err.Error())
}

// warn logs warnings about the configuration, each once.
func (p *proxy) warn(warnings []string) {
	for _, w := range p.live.news(warnings) {
		p.log.Warn("configuration: " + w)
	}
}

// apply hands settings that can change in place to those that use them.
func (p *proxy) apply(ctx context.Context, c *config.Config) {
	p.log.setVerbosity(c.Log)
	if err := setKlogVerbosity(c.Log.Verbosity); err != nil {
		p.log.Error("log settings", "err", err)
	}
	p.warn(addressWarnings(c, p.families))
	setOOMScore(c.OOMScoreAdj, p.log.Logger)
	p.setUpKernel(c)
	p.health.SetSyncPeriod(c.SyncPeriod)
	p.loop.SetSettings(loopSettings(c))
	p.prober.SetPerSecond(c.HealthCheck.ProbesPerSecond)
	options := plannerOptions(c, p.node, p.families)
	if err := p.loop.Do(ctx, func() { p.planner.SetOptions(options) }); err != nil && ctx.Err() == nil {
		p.log.Error("plan with changed settings", "err", err)
	}
}
