package kube

import (
	"context"
	"fmt"
	"hash/maphash"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"golang.org/x/time/rate"
)

// reporter is the component that events come from; what people filter by.
const reporter = "kube-proxy"

const (
	maxWaiting = 256  // events waiting to be sent; more are dropped
	maxTold    = 4096 // events remembered as told
	maxNote    = 1024 // bytes, the API's limit
)

// Event is one remark on an object.
type Event struct {
	// Kind, Namespace, Name and UID name the object: a Service, EndpointSlice,
	// Node or ServiceCIDR.
	Kind, Namespace, Name, UID string
	// Warning makes it a Warning event, else it is Normal.
	Warning bool
	Reason  string // one CamelCase word
	Action  string // what was tried, one CamelCase word; "": Sync
	Message string // cut at 1,024 bytes
}

// Recorder reports events of events.k8s.io/v1 to the API server, each once, as
// far as that works: it never blocks its caller, and what cannot be sent is
// dropped. Safe for concurrent use.
type Recorder struct {
	client *Client
	node   string
	log    *slog.Logger
	now    func() time.Time
	limit  *rate.Limiter
	queue  chan Event

	seed maphash.Seed

	mu sync.Mutex // guards told and order
	// told holds the keys of the events recorded; order the same, oldest first,
	// so that it stays bounded.
	told  map[uint64]struct{}
	order []uint64
}

// RecorderOptions are the surroundings of a Recorder.
type RecorderOptions struct {
	Node string // the own node's name, part of the events' origin
	Log  *slog.Logger
	Now  func() time.Time // nil: time.Now
	// PerSecond and Burst limit what is sent; 0: 1 and 25.
	PerSecond float64
	Burst     int
}

// NewRecorder returns a recorder; events are sent while Run runs.
func NewRecorder(c *Client, o RecorderOptions) *Recorder {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.PerSecond == 0 {
		o.PerSecond = 1
	}
	if o.Burst == 0 {
		o.Burst = 25
	}
	return &Recorder{
		client: c, node: o.Node, log: o.Log, now: o.Now,
		limit: rate.NewLimiter(rate.Limit(o.PerSecond), o.Burst),
		queue: make(chan Event, maxWaiting), told: map[uint64]struct{}{}, seed: maphash.MakeSeed(),
	}
}

// Record queues an event unless the same was recorded before: same object,
// reason and message.
func (r *Recorder) Record(e Event) {
	if e.Action == "" {
		e.Action = "Sync"
	}
	e.Message = cut(e.Message, maxNote)
	if !r.remember(e) {
		return
	}
	select {
	case r.queue <- e:
	default:
		r.forget(e) // so that it is told when there is room
		r.log.Debug("event dropped: too many are waiting", "reason", e.Reason, "kind", e.Kind, "namespace", e.Namespace, "name", e.Name)
	}
}

// key stands for what makes two events the same.
func (r *Recorder) key(e Event) uint64 {
	e.Warning, e.Action = false, ""
	return maphash.Comparable(r.seed, e)
}

func (r *Recorder) remember(e Event) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.key(e)
	if _, ok := r.told[k]; ok {
		return false
	}
	if len(r.order) >= maxTold {
		delete(r.told, r.order[0])
		r.order = r.order[1:]
	}
	r.told[k] = struct{}{}
	r.order = append(r.order, k)
	return true
}

func (r *Recorder) forget(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.told, r.key(e))
}

// Run sends until ctx ends.
func (r *Recorder) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-r.queue:
			if r.limit.Wait(ctx) != nil {
				return
			}
			r.send(ctx, e)
		}
	}
}

// send tries a few times; events are not worth more.
func (r *Recorder) send(ctx context.Context, e Event) {
	const attempts = 4
	for attempt := range attempts {
		err := r.create(ctx, e)
		switch {
		case err == nil || apierrors.IsAlreadyExists(err):
			return
		case ctx.Err() != nil:
			return
		case isFinal(err) || attempt == attempts-1:
			r.log.Debug("event not reported", "reason", e.Reason, "kind", e.Kind, "namespace", e.Namespace, "name", e.Name, "error", err)
			return
		}
		wait(ctx, time.Second<<attempt)
	}
}

// isFinal reports errors that the same event would meet again.
func isFinal(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsNotFound(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}

func (r *Recorder) create(ctx context.Context, e Event) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	ev := r.event(e)
	return r.client.events.Post().Resource("events").Namespace(ev.Namespace).Body(ev).MaxRetries(0).Do(ctx).Error()
}

func (r *Recorder) event(e Event) *eventsv1.Event {
	now := r.now()
	ref := corev1.ObjectReference{Kind: e.Kind, APIVersion: apiVersion(e.Kind), Namespace: e.Namespace, Name: e.Name, UID: types.UID(e.UID)}
	if e.Kind == "Node" && e.UID == "" {
		// As the kubelet does: `kubectl describe node` finds both.
		ref.UID = types.UID(e.Name)
	}
	namespace := e.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // where events on cluster-wide objects go
	}
	kind := corev1.EventTypeNormal
	if e.Warning {
		kind = corev1.EventTypeWarning
	}
	ev := &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s.%x", e.Name, now.UnixNano())},
		EventTime:           metav1.NewMicroTime(now),
		ReportingController: reporter,
		ReportingInstance:   cut(reporter+"-"+r.node, 128),
		Action:              e.Action, Reason: e.Reason, Regarding: ref, Note: e.Message, Type: kind,
	}
	ev.SetGroupVersionKind(eventsv1.SchemeGroupVersion.WithKind("Event"))
	return ev
}

func apiVersion(kind string) string {
	switch kind {
	case "EndpointSlice":
		return discoveryv1.SchemeGroupVersion.String()
	case "ServiceCIDR":
		return networkingv1.SchemeGroupVersion.String()
	}
	return corev1.SchemeGroupVersion.String()
}

// cut shortens s to at most n bytes of whole characters.
func cut(s string, n int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= n {
		return s
	}
	const dots = "..."
	n -= len(dots)
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + dots
}
