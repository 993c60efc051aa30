// Package kube reads the facts from a Kubernetes API server: list and watch of
// Services, EndpointSlices, the own Node and ServiceCIDRs ([Source]), and reports
// events to it ([Recorder]).
//
// Every object is reduced to its compact form as soon as it is decoded; no typed
// object outlives the call that decoded it. There is no clientset and no informer:
// the follower in follow.go is the whole of it, because client-go's reflector
// gathers a complete list of objects before it hands over the first and reports
// neither bookmarks nor silence.
package kube

import (
	"context"
	"errors"
	"fmt"
	"mime"
	"net"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/connrotation"
	"k8s.io/client-go/util/flowcontrol"
)

// Connection says how to reach the API server. The zero value is a pod's own
// cluster with the defaults of kube-proxy.
type Connection struct {
	// Kubeconfig is a file; "" with Master "" as well: the service account that
	// the pod runs with.
	Kubeconfig string
	// Master is the URL of the API server; it takes precedence over the file's.
	Master string
	// ContentType is what requests are written in: application/json or
	// application/vnd.kubernetes.protobuf, which is the default.
	ContentType string
	// AcceptContentTypes is the Accept header; "": ContentType, else JSON.
	AcceptContentTypes string
	// QPS and Burst limit requests per second, watches and further pages of a
	// list excepted. 0: 5 and 10. QPS below 0: no limit.
	QPS   float32
	Burst int
	// UserAgent names the program to the API server.
	UserAgent string
	// Dial opens connections; nil: a net.Dialer with keep-alive.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Wrap is laid around the transport of all requests; nil: nothing is.
	Wrap func(http.RoundTripper) http.RoundTripper
}

// Client reaches one API server. Safe for concurrent use.
type Client struct {
	core, discovery, networking, events *rest.RESTClient
	// conns are all open connections, to be closed when one is found dead.
	conns *connrotation.Dialer
	host  string
}

// NewClient reads the kubeconfig file, if there is one, and the files that it
// names. It does not contact the server.
func NewClient(c Connection) (*Client, error) {
	cfg, err := c.restConfig()
	if err != nil {
		return nil, err
	}
	dial := c.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	}
	conns := connrotation.NewDialer(dial)
	cfg.Dial = conns.DialContext
	if c.Wrap != nil {
		cfg.Wrap(c.Wrap)
	}
	hc, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("set up the connection to %s: %w", cfg.Host, err)
	}
	codecs := newCodecs()
	k := &Client{conns: conns, host: cfg.Host}
	for _, g := range []struct {
		client **rest.RESTClient
		gv     schema.GroupVersion
		path   string
	}{
		{&k.core, corev1.SchemeGroupVersion, "/api"},
		{&k.discovery, discoveryv1.SchemeGroupVersion, "/apis"},
		{&k.networking, networkingv1.SchemeGroupVersion, "/apis"},
		{&k.events, eventsv1.SchemeGroupVersion, "/apis"},
	} {
		gc := rest.CopyConfig(cfg)
		gc.GroupVersion, gc.APIPath, gc.NegotiatedSerializer = &g.gv, g.path, codecs
		if *g.client, err = rest.RESTClientForConfigAndClient(gc, hc); err != nil {
			return nil, fmt.Errorf("set up the client of %s at %s: %w", g.gv, cfg.Host, err)
		}
	}
	return k, nil
}

// Host returns the URL of the API server.
func (k *Client) Host() string { return k.host }

func (c Connection) restConfig() (*rest.Config, error) {
	var cfg *rest.Config
	var err error
	if c.Kubeconfig == "" && c.Master == "" {
		cfg, err = rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("no API server: this is not a pod of a cluster; give --kubeconfig, --master, or clientConnection.kubeconfig in the configuration file")
		}
		if err != nil {
			return nil, fmt.Errorf("read the pod's service account: %w", err)
		}
	} else {
		cfg, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			&clientcmd.ClientConfigLoadingRules{ExplicitPath: c.Kubeconfig},
			&clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: c.Master}},
		).ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("read kubeconfig %q: %w", c.Kubeconfig, err)
		}
	}
	if c.ContentType == "" {
		c.ContentType = runtime.ContentTypeProtobuf
	}
	if err := checkMedia("contentType", c.ContentType); err != nil {
		return nil, err
	}
	if err := checkAccept(c.AcceptContentTypes); err != nil {
		return nil, err
	}
	cfg.ContentType, cfg.AcceptContentTypes = c.ContentType, c.AcceptContentTypes
	cfg.UserAgent = c.UserAgent
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.QPS, cfg.Burst = c.QPS, c.Burst
	if cfg.QPS == 0 {
		cfg.QPS = rest.DefaultQPS
	}
	if cfg.Burst == 0 {
		cfg.Burst = rest.DefaultBurst
	}
	if cfg.QPS > 0 {
		// One limit for all groups together.
		cfg.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(cfg.QPS, cfg.Burst)
	}
	return cfg, nil
}

func checkMedia(field, value string) error {
	name, _, err := mime.ParseMediaType(value)
	if err == nil && (name == runtime.ContentTypeJSON || name == runtime.ContentTypeProtobuf) {
		return nil
	}
	return fmt.Errorf("clientConnection.%s %q is not supported: use %s or %s", field, value, runtime.ContentTypeProtobuf, runtime.ContentTypeJSON)
}

// checkAccept wants at least one type that can be decoded; the server chooses
// among those that it knows.
func checkAccept(value string) error {
	if value == "" {
		return nil
	}
	var err error
	for part := range strings.SplitSeq(value, ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(part), ";")
		if name == "*/*" || name == "application/*" {
			return nil
		}
		if err = checkMedia("acceptContentTypes", name); err == nil {
			return nil
		}
	}
	return err
}

// newCodecs knows the kinds that are read and written here and no others: a whole
// scheme costs megabytes.
func newCodecs() runtime.NegotiatedSerializer {
	s := runtime.NewScheme()
	s.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Service{}, &corev1.ServiceList{}, &corev1.Node{}, &corev1.NodeList{})
	s.AddKnownTypes(discoveryv1.SchemeGroupVersion, &discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{})
	s.AddKnownTypes(networkingv1.SchemeGroupVersion, &networkingv1.ServiceCIDR{}, &networkingv1.ServiceCIDRList{})
	s.AddKnownTypes(eventsv1.SchemeGroupVersion, &eventsv1.Event{})
	for _, gv := range []schema.GroupVersion{corev1.SchemeGroupVersion, discoveryv1.SchemeGroupVersion, networkingv1.SchemeGroupVersion, eventsv1.SchemeGroupVersion} {
		metav1.AddToGroupVersion(s, gv)
	}
	return serializer.NewCodecFactory(s).WithoutConversion()
}
