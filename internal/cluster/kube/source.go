package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// proxyNameLabel hands a Service to another proxy than the node's own.
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// Options are what a Source reads, and how patiently.
type Options struct {
	// Node is the name of the own Node.
	Node string
	// ServiceProxyName makes this the proxy of the Services that carry this name
	// in the label service.kubernetes.io/service-proxy-name; "": of those without
	// the label.
	ServiceProxyName string
	// Everything also reads what a proxy has no use for, such as headless
	// Services, so that it can be told why.
	Everything bool
	// Staleness is how long a watch may be silent before it is given up and
	// everything is listed again; 0: 150 s. A healthy server sends a bookmark
	// every minute, the first one of a watch within two.
	Staleness time.Duration
	// RetryMin and RetryMax bound the exponential pause between attempts, of
	// which each is a random part; 0: 0.5 s and 30 s.
	RetryMin, RetryMax time.Duration
	// PageSize is the number of objects asked for at once where the server
	// cannot stream lists; 0: 500.
	PageSize int64
	Log      *slog.Logger
}

// Source delivers facts from an API server. It implements [cluster.Source].
type Source struct {
	client  *Client
	opts    Options
	trouble *trouble
	path    *path
}

// NewSource returns a source that has done nothing yet.
func NewSource(c *Client, o Options) *Source {
	if o.Staleness == 0 {
		o.Staleness = 150 * time.Second
	}
	if o.RetryMin == 0 {
		o.RetryMin = 500 * time.Millisecond
	}
	if o.RetryMax == 0 {
		o.RetryMax = 30 * time.Second
	}
	if o.PageSize == 0 {
		o.PageSize = 500
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Source{client: c, opts: o, trouble: newTrouble(o.Log.With("server", c.host)), path: &path{born: time.Now()}}
}

// Kinds are the kinds that a Source delivers.
func (s *Source) Kinds() []cluster.Kind {
	return []cluster.Kind{cluster.Services, cluster.Slices, cluster.Nodes, cluster.ServiceCIDRs}
}

// Run follows the API server until ctx ends. It returns nil: whatever fails, a
// wrong token or a missing permission included, may be put right while it runs.
func (s *Source) Run(ctx context.Context, to cluster.Sink) error {
	var wg sync.WaitGroup
	for _, f := range s.followers(to) {
		wg.Go(func() { f.run(ctx) })
	}
	wg.Wait()
	return nil
}

// Load delivers everything once, without watching and without trying again.
func (s *Source) Load(ctx context.Context, to cluster.Sink) error {
	var errs []error
	for _, f := range s.followers(to) {
		if err := f.listPages(ctx); err != nil && (!f.optional || !isAbsent(err)) {
			errs = append(errs, fmt.Errorf("list %s at %s: %w", f.resource, s.client.host, err))
			continue
		}
		f.complete()
	}
	return errors.Join(errs...)
}

// feed is one kind: where it is read, and how it reaches the sink.
type feed struct {
	kind     cluster.Kind
	client   *rest.RESTClient
	resource string
	labels   string
	fields   string
	newList  func() runtime.Object
	// optional: the API may be missing, or hidden from old roles; then there are
	// none of the kind.
	optional bool

	set    func(runtime.Object) (cluster.Name, error)
	remove func(cluster.Name)
	// listed is called when the first or another list is complete and what
	// vanished is removed; may be nil.
	listed func()
}

func (s *Source) followers(to cluster.Sink) []*follower {
	feeds := []*feed{s.services(to), s.slices(to), s.node(to), s.serviceCIDRs(to)}
	out := make([]*follower, len(feeds))
	for i, f := range feeds {
		if s.opts.Everything && f.kind != cluster.Nodes {
			f.labels, f.fields = "", ""
		}
		out[i] = newFollower(s, f, to)
	}
	return out
}

func (s *Source) services(to cluster.Sink) *feed {
	labels := "!" + proxyNameLabel
	if s.opts.ServiceProxyName != "" {
		labels = proxyNameLabel + "=" + s.opts.ServiceProxyName
	}
	return &feed{
		kind: cluster.Services, client: s.client.core, resource: "services",
		labels: labels, fields: "spec.clusterIP!=" + corev1.ClusterIPNone,
		newList: func() runtime.Object { return &corev1.ServiceList{} },
		set: func(o runtime.Object) (cluster.Name, error) {
			svc, ok := o.(*corev1.Service)
			if !ok {
				return cluster.Name{}, wrongType(o)
			}
			c := cluster.ReduceService(svc)
			to.SetService(c)
			return c.Name, nil
		},
		remove: to.DeleteService,
	}
}

func (s *Source) slices(to cluster.Sink) *feed {
	return &feed{
		kind: cluster.Slices, client: s.client.discovery, resource: "endpointslices",
		labels:  "!" + corev1.IsHeadlessService,
		newList: func() runtime.Object { return &discoveryv1.EndpointSliceList{} },
		set: func(o runtime.Object) (cluster.Name, error) {
			sl, ok := o.(*discoveryv1.EndpointSlice)
			if !ok {
				return cluster.Name{}, wrongType(o)
			}
			c := cluster.ReduceSlice(sl)
			to.SetSlice(c)
			return c.Name, nil
		},
		remove: to.DeleteSlice,
	}
}

func (s *Source) node(to cluster.Sink) *feed {
	present := false
	return &feed{
		kind: cluster.Nodes, client: s.client.core, resource: "nodes",
		fields:  "metadata.name=" + s.opts.Node,
		newList: func() runtime.Object { return &corev1.NodeList{} },
		set: func(o runtime.Object) (cluster.Name, error) {
			n, ok := o.(*corev1.Node)
			if !ok {
				return cluster.Name{}, wrongType(o)
			}
			c := cluster.ReduceNode(n)
			present = true
			to.SetNode(c)
			return cluster.Name{Name: c.Name}, nil
		},
		remove: func(cluster.Name) {
			present = false
			to.SetNode(nil)
		},
		listed: func() {
			if !present {
				to.SetNode(nil)
			}
		},
	}
}

func (s *Source) serviceCIDRs(to cluster.Sink) *feed {
	byName := map[cluster.Name][]netip.Prefix{}
	complete := false
	publish := func() {
		var all []netip.Prefix
		for _, p := range byName {
			all = append(all, p...)
		}
		to.SetServiceCIDRs(all)
	}
	return &feed{
		kind: cluster.ServiceCIDRs, client: s.client.networking, resource: "servicecidrs", optional: true,
		newList: func() runtime.Object { return &networkingv1.ServiceCIDRList{} },
		set: func(o runtime.Object) (cluster.Name, error) {
			c, ok := o.(*networkingv1.ServiceCIDR)
			if !ok {
				return cluster.Name{}, wrongType(o)
			}
			n := cluster.Name{Name: c.Name}
			byName[n] = cluster.ReduceServiceCIDR(c)
			// A part of the ranges would be wrong, so the first list is awaited.
			if complete {
				publish()
			}
			return n, nil
		},
		remove: func(n cluster.Name) {
			delete(byName, n)
			if complete {
				publish()
			}
		},
		listed: func() {
			complete = true
			publish()
		},
	}
}

func wrongType(o runtime.Object) error {
	return fmt.Errorf("the server sent an object of type %T", o)
}
