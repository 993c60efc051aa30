package kube

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
)

// record runs a recorder until the test ends.
func (w *world) record(o RecorderOptions) *Recorder {
	w.t.Helper()
	o.Node = "n1"
	r := NewRecorder(w.client, o)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.Run(ctx)
	}()
	w.t.Cleanup(func() {
		cancel()
		<-ended
	})
	return r
}

func TestRecorder(t *testing.T) {
	for _, contentType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		w := newWorld(t, apiserver.Options{}, variant{contentType: contentType})
		r := w.record(RecorderOptions{})
		odd := Event{Kind: "Service", Namespace: "d", Name: "web", UID: "u1", Warning: true, Reason: "Odd", Message: "spec.ports[0] is odd"}
		r.Record(odd)
		r.Record(odd)
		again := odd
		again.Message = "spec.ports[1] is odd"
		r.Record(again)
		r.Record(Event{Kind: "Node", Name: "n1", Reason: "Starting", Action: "StartKubeProxy", Message: strings.Repeat("ö", 2000)})
		mustBecome(t, "three events", func() bool { return len(w.server.Events()) == 3 })
		have := w.server.Events()
		first := have[0]
		if first.Namespace != "d" || first.Type != "Warning" || first.Reason != "Odd" || first.Action != "Sync" || first.Reporter != "kube-proxy" ||
			first.Object.APIVersion != "v1" || first.Object.Kind != "Service" || first.Object.UID != "u1" || first.Message != odd.Message {
			t.Errorf("event %+v", first)
		}
		if have[1].Message != again.Message {
			t.Errorf("second event %+v", have[1])
		}
		last := have[2]
		if last.Namespace != "default" || last.Type != "Normal" || last.Object.UID != "n1" || len(last.Message) > 1024 || !strings.HasSuffix(last.Message, "ö...") {
			t.Errorf("event on the Node: %+v", last)
		}
	}
}

// TestRecorderDoesNotBlock: with nobody to send to, events are dropped, and told
// when they come up later.
func TestRecorderDoesNotBlock(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	r := NewRecorder(w.client, RecorderOptions{})
	event := func(i int) Event {
		return Event{Kind: "Service", Namespace: "d", Name: fmt.Sprint("s", i), Reason: "Odd", Message: "odd"}
	}
	for i := range maxTold + 1000 {
		r.Record(event(i))
	}
	if len(r.queue) != maxWaiting || len(r.order) > maxTold {
		t.Errorf("%d events wait, %d are remembered", len(r.queue), len(r.order))
	}
	for len(r.queue) > 0 {
		<-r.queue
	}
	dropped := event(maxTold + 999)
	r.Record(dropped)
	if len(r.queue) != 1 || <-r.queue != (Event{Kind: "Service", Namespace: "d", Name: dropped.Name, Reason: "Odd", Action: "Sync", Message: "odd"}) {
		t.Error("an event that was dropped is not told later")
	}
}

// TestRecorderRefused: what the server will never take is tried once, what it
// cannot take now again.
func TestRecorderRefused(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	var attempts atomic.Int32
	w.server.Intercept(func(rw http.ResponseWriter, _ *http.Request) bool {
		switch attempts.Add(1) {
		case 1:
			answer(rw, http.StatusForbidden, metav1.StatusReasonForbidden)
		case 2:
			answer(rw, http.StatusInternalServerError, metav1.StatusReasonInternalError)
		default:
			return false
		}
		return true
	})
	r := w.record(RecorderOptions{Now: func() time.Time { return time.Unix(1_700_000_000, 0) }})
	r.Record(Event{Kind: "EndpointSlice", Namespace: "d", Name: "refused", Reason: "Odd", Message: "odd"})
	r.Record(Event{Kind: "EndpointSlice", Namespace: "d", Name: "delayed", Reason: "Odd", Message: "odd"})
	mustBecome(t, "the event that can be told", func() bool { return len(w.server.Events()) == 1 })
	e := w.server.Events()[0]
	if e.Object.Name != "delayed" || e.Object.APIVersion != "discovery.k8s.io/v1" || attempts.Load() != 3 {
		t.Errorf("event %+v after %d attempts", e, attempts.Load())
	}
}
