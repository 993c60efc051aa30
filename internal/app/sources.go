package app

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/cluster/file"
	"github.com/svcproxy/svcproxy/internal/cluster/kube"
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

// sources are where the facts come from: directories of manifests, then the API
// server; of two objects of one name the one of the earlier source counts.
type sources struct {
	files  []*file.Source
	api    *kube.Source // nil: no API server is asked
	client *kube.Client // nil with it
}

// sourceOptions say what sources are to read, and where they tell.
type sourceOptions struct {
	node       string
	everything bool // also objects that a proxy has no use for
	version    string
	log        *slog.Logger
	fileLog    *slog.Logger // for problems in manifests; nil: they are only kept
	// count is laid around the API client's transport; nil: nothing is.
	count func(http.RoundTripper) http.RoundTripper
}

// newSources sets up what is configured; nothing is read but a kubeconfig.
func newSources(c *config.Config, o sourceOptions) (*sources, error) {
	s := &sources{}
	for _, dir := range c.Manifests {
		s.files = append(s.files, file.New(dir, file.Options{Node: o.node, Log: o.fileLog}))
	}
	if !usesAPI(c) {
		return s, nil
	}
	client, err := kube.NewClient(kube.Connection{
		Kubeconfig: c.Client.Kubeconfig, Master: c.Client.Master,
		ContentType: c.Client.ContentType, AcceptContentTypes: c.Client.AcceptContentTypes,
		QPS: c.Client.QPS, Burst: c.Client.Burst,
		UserAgent: "svcproxy/" + o.version, Wrap: o.count,
	})
	if err != nil {
		return nil, err
	}
	s.client = client
	s.api = kube.NewSource(client, kube.Options{
		Node: o.node, ServiceProxyName: c.ServiceProxyName, Everything: o.everything,
		Staleness: c.Staleness, Log: o.log,
	})
	return s, nil
}

// follow returns what has to run so that everything reaches the state, and stays
// up to date.
func (s *sources) follow(state *cluster.State) []func(context.Context) error {
	var out []func(context.Context) error
	for i, f := range s.files {
		sink := state.Sink(fileSourceName(i), file.Delivers()...)
		out = append(out, func(ctx context.Context) error { return f.Run(ctx, sink) })
	}
	if s.api != nil {
		sink := state.Sink("API server", s.api.Kinds()...)
		out = append(out, func(ctx context.Context) error { return s.api.Run(ctx, sink) })
	}
	return out
}

// load delivers everything once.
func (s *sources) load(ctx context.Context, state *cluster.State) error {
	for i, f := range s.files {
		if err := f.Load(state.Sink(fileSourceName(i), file.Delivers()...)); err != nil {
			return err
		}
	}
	if s.api != nil {
		return s.api.Load(ctx, state.Sink("API server", s.api.Kinds()...))
	}
	return nil
}

// problems returns what is wrong in the manifests now.
func (s *sources) problems() []string {
	var out []string
	for _, f := range s.files {
		for _, p := range f.Problems() {
			out = append(out, p.String())
		}
	}
	return out
}

func fileSourceName(i int) string { return fmt.Sprintf("manifests %d", i+1) }

// surveyOptions say for which node to plan.
type surveyOptions struct {
	node       string        // "": the configured one, or this host
	addrs      []netip.Addr  // of its interfaces; nil: this host's
	families   []plan.Family // nil: those that this host can do
	everything bool          // also read objects that a proxy has no use for
}

// surveyed are the facts as they are now, and a planner over them.
type surveyed struct {
	state   *cluster.State
	planner *planner.Planner
}

// survey reads all facts once.
func survey(ctx context.Context, env Env, c *config.Config, o surveyOptions) (*surveyed, error) {
	log := newLog(env.Stderr, quiet(c.Log))
	if err := log.bridgeKlog(c.Log.Verbosity); err != nil {
		return nil, err
	}
	var err error
	if o.node == "" {
		if o.node, err = nodeName(env, c); err != nil {
			return nil, err
		}
	}
	if o.families == nil {
		o.families = plan.Families[:]
	}
	src, err := newSources(c, sourceOptions{node: o.node, everything: o.everything, version: env.buildVersion(), log: log.Logger})
	if err != nil {
		return nil, err
	}
	if o.addrs == nil {
		if o.addrs, err = env.Host.Addrs(); err != nil {
			return nil, err
		}
	}
	s := &surveyed{state: cluster.NewState(time.Now)}
	s.state.SetHost(o.addrs)
	if err := src.load(ctx, s.state); err != nil {
		return nil, err
	}
	warn(env, src.problems())
	s.planner = planner.New(s.state, plannerOptions(c, o.node, o.families))
	running := checkedPlanner{s.planner, o.node, func() bool { return s.state.Node() != nil }, src}
	if ok, missing := running.Ready(); !ok {
		warn(env, []string{"the running proxy would write nothing yet, but wait: " + strings.Join(missing, "; ")})
	}
	return s, nil
}
