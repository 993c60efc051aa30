package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// start returns a serving server and its address.
func start(t *testing.T, o Options) (*Server, string) {
	t.Helper()
	s := New(o)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.Start(l)
	t.Cleanup(func() { _ = s.Stop() })
	return s, l.Addr().String()
}

// formats are the client configurations that every behaviour must hold for.
var formats = []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf}

// client reads one group and version over client-go's REST client.
type client struct{ *rest.RESTClient }

func mustClient(t *testing.T, addr, contentType string, gv schema.GroupVersion) client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := WriteKubeconfig(path, addr); err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ContentConfig = rest.ContentConfig{
		ContentType: contentType, AcceptContentTypes: contentType, GroupVersion: &gv,
		NegotiatedSerializer: newCodec().factory.WithoutConversion(),
	}
	cfg.APIPath = "/apis"
	if gv.Group == "" {
		cfg.APIPath = "/api"
	}
	cfg.QPS = -1
	c, err := rest.RESTClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return client{c}
}

// get starts a GET that is tried once.
func (c client) get(resource string, o metav1.ListOptions) *rest.Request {
	return c.Get().Resource(resource).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0)
}

func (c client) services(o metav1.ListOptions) (*corev1.ServiceList, error) {
	l := &corev1.ServiceList{}
	return l, c.get("services", o).Do(context.Background()).Into(l)
}

func (c client) watch(t *testing.T, o metav1.ListOptions) watch.Interface {
	t.Helper()
	o.Watch = true
	w, err := c.get("services", o).Watch(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	return w
}

// watchList are the options of a watch that begins with the present state.
func watchList() metav1.ListOptions {
	yes := true
	return metav1.ListOptions{SendInitialEvents: &yes, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, AllowWatchBookmarks: true}
}

func service(ns, name, ip string, labels ...string) *corev1.Service {
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: corev1.ServiceSpec{ClusterIP: ip, Ports: []corev1.ServicePort{{Port: 80}}}}
	for i := 0; i < len(labels); i += 2 {
		metav1.SetMetaDataLabel(&o.ObjectMeta, labels[i], labels[i+1])
	}
	return o
}

func mustPut(t *testing.T, s *Server, objs ...Object) {
	t.Helper()
	for _, o := range objs {
		if err := s.Put(o); err != nil {
			t.Fatal(err)
		}
	}
}

// next returns the type and the name of the next event, with the bookmark's kind
// in place of a name.
func next(t *testing.T, w watch.Interface) string {
	t.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			return "end"
		}
		switch o := e.Object.(type) {
		case *metav1.Status:
			return fmt.Sprintf("%s %d", e.Type, o.Code)
		case Object:
			if e.Type == watch.Bookmark {
				return fmt.Sprintf("%s %s", e.Type, o.GetAnnotations()[metav1.InitialEventsAnnotationKey])
			}
			return fmt.Sprintf("%s %s", e.Type, o.GetName())
		}
		return fmt.Sprintf("%s %T", e.Type, e.Object)
	case <-time.After(20 * time.Second):
		t.Fatal("no event")
		return ""
	}
}

func wantEvents(t *testing.T, w watch.Interface, want ...string) {
	t.Helper()
	for _, e := range want {
		if have := next(t, w); have != e {
			t.Fatalf("event %q, want %q", have, e)
		}
	}
}

func TestListAndDefaults(t *testing.T) {
	for _, f := range formats {
		t.Run(f, func(t *testing.T) {
			s, addr := start(t, Options{})
			slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "web-1"}, AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{}}}
			mustPut(t, s, service("b", "web", "10.0.0.1"), service("a", "web", "2001:db8::1"), slice,
				&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.0.0.0/16"}}},
				&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: corev1.NodeSpec{PodCIDR: "10.244.0.0/24"}})
			core := mustClient(t, addr, f, corev1.SchemeGroupVersion)
			services, err := core.services(metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if len(services.Items) != 2 || services.Items[0].Namespace != "a" || services.ResourceVersion != fmt.Sprint(s.ResourceVersion()) {
				t.Errorf("services: %d, first in %q, version %s", len(services.Items), services.Items[0].Namespace, services.ResourceVersion)
			}
			v6 := services.Items[0]
			if v6.Spec.IPFamilies[0] != corev1.IPv6Protocol || v6.Spec.ClusterIPs[0] != "2001:db8::1" || v6.Spec.Ports[0].Protocol != corev1.ProtocolTCP || v6.UID == "" || v6.CreationTimestamp.IsZero() {
				t.Errorf("defaults are missing: %+v", v6)
			}
			slices := &discoveryv1.EndpointSliceList{}
			err = mustClient(t, addr, f, discoveryv1.SchemeGroupVersion).get("endpointslices", metav1.ListOptions{}).Namespace("default").Do(context.Background()).Into(slices)
			if err != nil || len(slices.Items) != 1 || *slices.Items[0].Ports[0].Protocol != corev1.ProtocolTCP {
				t.Errorf("slices: %+v, %v", slices, err)
			}
			cidrs := &networkingv1.ServiceCIDRList{}
			err = mustClient(t, addr, f, networkingv1.SchemeGroupVersion).get("servicecidrs", metav1.ListOptions{}).Do(context.Background()).Into(cidrs)
			if err != nil || len(cidrs.Items) != 1 || cidrs.Items[0].Spec.CIDRs[0] != "10.0.0.0/16" {
				t.Errorf("service CIDRs: %+v, %v", cidrs, err)
			}
			node := &corev1.Node{}
			err = core.Get().Resource("nodes").Name("n1").Do(context.Background()).Into(node)
			if err != nil || len(node.Spec.PodCIDRs) != 1 {
				t.Errorf("node: %+v, %v", node, err)
			}
			if err := core.Get().Resource("nodes").Name("n2").Do(context.Background()).Error(); !apierrors.IsNotFound(err) {
				t.Errorf("missing node: %v", err)
			}
		})
	}
}

func TestSelectors(t *testing.T) {
	s, addr := start(t, Options{})
	mustPut(t, s, service("d", "plain", "10.0.0.1"), service("d", "other", "10.0.0.2", "who", "x"), service("d", "headless", "None"))
	c := mustClient(t, addr, runtime.ContentTypeProtobuf, corev1.SchemeGroupVersion)
	for _, tc := range []struct {
		opts metav1.ListOptions
		want string
	}{
		{metav1.ListOptions{LabelSelector: "!who"}, "headless plain"},
		{metav1.ListOptions{LabelSelector: "who=x"}, "other"},
		{metav1.ListOptions{FieldSelector: "spec.clusterIP!=None"}, "other plain"},
		{metav1.ListOptions{FieldSelector: "spec.clusterIP!=None", LabelSelector: "!who"}, "plain"},
		{metav1.ListOptions{FieldSelector: "metadata.name=plain"}, "plain"},
	} {
		l, err := c.services(tc.opts)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, o := range l.Items {
			names = append(names, o.Name)
		}
		if have := strings.Join(names, " "); have != tc.want {
			t.Errorf("%+v: %q, want %q", tc.opts, have, tc.want)
		}
	}
	if _, err := c.services(metav1.ListOptions{FieldSelector: "spec.color=red"}); !apierrors.IsBadRequest(err) {
		t.Errorf("unknown field: %v", err)
	}
}

func TestPages(t *testing.T) {
	s, addr := start(t, Options{})
	for i := range 5 {
		mustPut(t, s, service("d", fmt.Sprint("s", i), "10.0.0.1"))
	}
	c := mustClient(t, addr, runtime.ContentTypeJSON, corev1.SchemeGroupVersion)
	first, err := c.services(metav1.ListOptions{Limit: 2})
	if err != nil || len(first.Items) != 2 || first.Continue == "" || *first.RemainingItemCount != 3 {
		t.Fatalf("first page: %+v, %v", first, err)
	}
	// The list stays as it was when it began.
	s.Delete("Service", "d", "s3")
	second, err := c.services(metav1.ListOptions{Limit: 2, Continue: first.Continue})
	if err != nil || len(second.Items) != 2 || second.Items[1].Name != "s3" || second.ResourceVersion != first.ResourceVersion {
		t.Fatalf("second page: %+v, %v", second, err)
	}
	s.Compact()
	if _, err := c.services(metav1.ListOptions{Limit: 2, Continue: second.Continue}); !apierrors.IsResourceExpired(err) {
		t.Errorf("continue after compaction: %v", err)
	}
	cached, err := c.services(metav1.ListOptions{Limit: 2, ResourceVersion: "0"})
	if err != nil || len(cached.Items) != 4 || cached.Continue != "" {
		t.Errorf("version 0 is answered from the cache at once: %d items, %v", len(cached.Items), err)
	}
	if _, err := c.services(metav1.ListOptions{ResourceVersion: "9999"}); !apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) {
		t.Errorf("version of the future: %v", err)
	}
}

func TestWatch(t *testing.T) {
	for _, f := range formats {
		t.Run(f, func(t *testing.T) {
			s, addr := start(t, Options{})
			mustPut(t, s, service("d", "one", "10.0.0.1"), service("d", "hidden", "10.0.0.2", "who", "x"))
			rv := fmt.Sprint(s.ResourceVersion())
			c := mustClient(t, addr, f, corev1.SchemeGroupVersion)
			opts := watchList()
			opts.LabelSelector = "!who"
			w := c.watch(t, opts)
			wantEvents(t, w, "ADDED one", "BOOKMARK true")
			mustPut(t, s, service("d", "two", "10.0.0.3"), service("d", "hidden", "10.0.0.4", "who", "y"), service("d", "one", "10.0.0.5"))
			wantEvents(t, w, "ADDED two", "MODIFIED one")
			mustPut(t, s, service("d", "one", "10.0.0.5", "who", "x"), service("d", "hidden", "10.0.0.4"))
			wantEvents(t, w, "DELETED one", "ADDED hidden")
			s.Delete("Service", "d", "two")
			wantEvents(t, w, "DELETED two")
			s.Bookmark()
			wantEvents(t, w, "BOOKMARK ")

			// Another watch resumes from the beginning and sees the same.
			r := c.watch(t, metav1.ListOptions{LabelSelector: "!who", ResourceVersion: rv})
			wantEvents(t, r, "ADDED two", "MODIFIED one", "DELETED one", "ADDED hidden", "DELETED two")
			s.Disconnect()
			wantEvents(t, r, "end")

			s.Compact()
			g := c.watch(t, metav1.ListOptions{ResourceVersion: rv})
			wantEvents(t, g, "ERROR 410", "end")
		})
	}
}

func TestWatchListRefused(t *testing.T) {
	_, addr := start(t, Options{NoWatchList: true})
	o := watchList()
	o.Watch = true
	_, err := mustClient(t, addr, runtime.ContentTypeProtobuf, corev1.SchemeGroupVersion).get("services", o).Watch(context.Background())
	if !apierrors.IsInvalid(err) {
		t.Errorf("error %v, want Invalid", err)
	}
}

func TestSilence(t *testing.T) {
	s, addr := start(t, Options{})
	c := mustClient(t, addr, runtime.ContentTypeJSON, corev1.SchemeGroupVersion)
	w := c.watch(t, metav1.ListOptions{ResourceVersion: "1"})
	mustPut(t, s, service("d", "one", "10.0.0.1"))
	wantEvents(t, w, "ADDED one")
	s.Silence(true)
	mustPut(t, s, service("d", "two", "10.0.0.2"))
	if l, err := c.services(metav1.ListOptions{}); err != nil || len(l.Items) != 2 {
		t.Errorf("a list is answered in silence: %v, %v", l, err)
	}
	// A watch that begins now gets the state and then nothing either.
	late := c.watch(t, watchList())
	wantEvents(t, late, "ADDED one", "ADDED two", "BOOKMARK true")
	mustPut(t, s, service("d", "three", "10.0.0.3"))
	for _, x := range []watch.Interface{w, late} {
		select {
		case e := <-x.ResultChan():
			t.Fatalf("event %v in silence", e)
		default:
		}
	}
	s.Silence(false)
	wantEvents(t, w, "ADDED two", "ADDED three")
	wantEvents(t, late, "ADDED three")
}

func TestCutAndRestart(t *testing.T) {
	s, addr := start(t, Options{})
	mustPut(t, s, service("d", "one", "10.0.0.1"), service("d", "two", "10.0.0.2"))
	c := mustClient(t, addr, runtime.ContentTypeProtobuf, corev1.SchemeGroupVersion)
	s.CutNext("Service", 1)
	wantEvents(t, c.watch(t, watchList()), "ADDED one", "end")
	s.CutNext("Service", 0)
	if l, err := c.services(metav1.ListOptions{}); err == nil {
		t.Errorf("a list that breaks off: %d items and no error", len(l.Items))
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.services(metav1.ListOptions{}); err == nil {
		t.Error("a stopped server answers")
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	s.Start(l)
	if l, err := c.services(metav1.ListOptions{}); err != nil || len(l.Items) != 2 {
		t.Errorf("after the restart: %v, %v", l, err)
	}
}

func TestEvents(t *testing.T) {
	for _, f := range formats {
		t.Run(f, func(t *testing.T) {
			s, addr := start(t, Options{})
			c := mustClient(t, addr, f, eventsv1.SchemeGroupVersion)
			ctx := context.Background()
			create := func(c client, o runtime.Object) error {
				return c.Post().Resource("events").Namespace("d").Body(o).Do(ctx).Error()
			}
			e := &eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "web.1"}, EventTime: metav1.NowMicro(), Type: "Warning", Reason: "Odd", Action: "Sync", Note: "it is odd",
				ReportingController: "kube-proxy", ReportingInstance: "kube-proxy-n1", Regarding: corev1.ObjectReference{Kind: "Service", Namespace: "d", Name: "web"},
			}
			e.SetGroupVersionKind(eventsv1.SchemeGroupVersion.WithKind("Event"))
			if err := create(c, e); err != nil {
				t.Fatal(err)
			}
			if err := create(c, e); !apierrors.IsAlreadyExists(err) {
				t.Errorf("second create: %v", err)
			}
			patch, err := json.Marshal(map[string]any{"series": map[string]any{"count": 3, "lastObservedTime": metav1.NowMicro()}})
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Patch(types.StrategicMergePatchType).Resource("events").Namespace("d").Name("web.1").Body(patch).Do(ctx).Error(); err != nil {
				t.Fatal(err)
			}
			classic := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "web.2"}, Reason: "Old", Source: corev1.EventSource{Component: "kubelet"}}
			classic.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Event"))
			if err := create(mustClient(t, addr, f, corev1.SchemeGroupVersion), classic); err != nil {
				t.Fatal(err)
			}
			bad := e.DeepCopy()
			bad.Name, bad.Action = "web.3", ""
			if err := create(c, bad); !apierrors.IsInvalid(err) {
				t.Errorf("event without action: %v", err)
			}
			have := s.Events()
			if len(have) != 2 {
				t.Fatalf("%d events, want 2", len(have))
			}
			first := have[0]
			if first.Reason != "Odd" || first.Count != 3 || first.Reporter != "kube-proxy" || first.Object.Name != "web" || first.Message != "it is odd" {
				t.Errorf("event %+v", first)
			}
			if have[1].Reporter != "kubelet" {
				t.Errorf("event %+v", have[1])
			}
		})
	}
}

// mustRead returns what a path answers, with its status code.
func mustRead(t *testing.T, addr, path string) (int, string) {
	t.Helper()
	res, err := http.Get("http://" + addr + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(body)
}

func TestAbout(t *testing.T) {
	s, addr := start(t, Options{Missing: []string{"ServiceCIDR"}})
	for _, tc := range []struct {
		path, want string
		code       int
	}{
		{"/healthz", "ok", 200},
		{"/version", `"major":"1"`, 200},
		{"/api", `"v1"`, 200},
		{"/api/v1", `"services"`, 200},
		{"/apis", `"discovery.k8s.io/v1"`, 200},
		{"/apis/discovery.k8s.io/v1", `"endpointslices"`, 200},
		{"/apis/events.k8s.io/v1", `"events"`, 200},
		{"/apis/networking.k8s.io/v1", `"NotFound"`, 404},
		{"/apis/networking.k8s.io/v1/servicecidrs", `"NotFound"`, 404},
		{"/elsewhere", `"NotFound"`, 404},
	} {
		code, body := mustRead(t, addr, tc.path)
		if code != tc.code || !strings.Contains(body, tc.want) {
			t.Errorf("%s: %d %s, want %d and %s", tc.path, code, body, tc.code, tc.want)
		}
	}
	if _, body := mustRead(t, addr, "/apis"); strings.Contains(body, "networking") {
		t.Errorf("a group without kinds is listed: %s", body)
	}
	s.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusForbidden)
		return true
	})
	if code, _ := mustRead(t, addr, "/api/v1/nodes"); code != http.StatusForbidden {
		t.Errorf("intercepted request: %d", code)
	}
	want := Request{Method: "GET", Verb: "list", Kind: "Node", Path: "/api/v1/nodes"}
	last := s.Requests()[len(s.Requests())-1]
	if last.Method != want.Method || last.Verb != want.Verb || last.Kind != want.Kind || last.Path != want.Path {
		t.Errorf("logged %+v, want %+v", last, want)
	}
}
