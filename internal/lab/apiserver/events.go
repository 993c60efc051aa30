package apiserver

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// Event is an event that a client reported, of either API group.
type Event struct {
	Namespace, Name string
	Type            string // Normal, Warning
	Reason          string
	Message         string // note, in events.k8s.io
	Action          string
	Reporter        string // reportingController, or source.component
	// Object is what the event is about.
	Object corev1.ObjectReference
	// Count is how often it was reported, by the client's own counting.
	Count int

	stored runtime.Object
}

// Events returns the events received so far, in the order of their creation.
func (s *Server) Events() []Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Event, len(s.events))
	for i, e := range s.events {
		out[i] = *e
		out[i].stored = nil
	}
	return out
}

func (s *Server) serveEvents(w http.ResponseWriter, req *http.Request, t target) {
	switch req.Method {
	case http.MethodPost:
		s.createEvent(w, req, t)
	case http.MethodPatch, http.MethodPut:
		s.patchEvent(w, req, t)
	default:
		s.fail(w, req, http.StatusMethodNotAllowed, metav1.StatusReasonMethodNotAllowed, "events can be created, patched and replaced only")
	}
}

func (s *Server) createEvent(w http.ResponseWriter, req *http.Request, t target) {
	o, err := s.codec.decode(req)
	if err != nil {
		s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	e, err := newEvent(o)
	if err != nil {
		s.fail(w, req, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "%v", err)
		return
	}
	if e.Namespace != t.namespace {
		s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "the namespace of the object (%s) does not match the namespace of the request (%s)", e.Namespace, t.namespace)
		return
	}
	s.mu.Lock()
	if slices.ContainsFunc(s.events, func(o *Event) bool { return o.Namespace == e.Namespace && o.Name == e.Name }) {
		s.mu.Unlock()
		s.fail(w, req, http.StatusConflict, metav1.StatusReasonAlreadyExists, "events %q already exists", e.Name)
		return
	}
	s.rv++
	s.events = append(s.events, e)
	m := o.(Object)
	m.SetResourceVersion(fmt.Sprint(s.rv))
	m.SetUID(types.UID(fmt.Sprintf("00000000-0000-4000-9000-%012x", s.rv)))
	s.mu.Unlock()
	s.answerEvent(w, req, http.StatusCreated, o)
}

// patchEvent merges the body, in JSON, into the stored event: clients use it to
// count repetitions, for which all kinds of patch come to the same.
func (s *Server) patchEvent(w http.ResponseWriter, req *http.Request, t target) {
	body, err := io.ReadAll(io.LimitReader(req.Body, 1<<20))
	if err != nil {
		s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "read body: %v", err)
		return
	}
	s.mu.Lock()
	i := slices.IndexFunc(s.events, func(e *Event) bool { return e.Namespace == t.namespace && e.Name == t.name })
	if i < 0 {
		s.mu.Unlock()
		s.fail(w, req, http.StatusNotFound, metav1.StatusReasonNotFound, "events %q not found", t.name)
		return
	}
	patched := s.events[i].stored.DeepCopyObject()
	err = json.Unmarshal(body, patched)
	var e *Event
	if err == nil {
		e, err = newEvent(patched)
	}
	if err == nil {
		s.events[i] = e
	}
	s.mu.Unlock()
	if err != nil {
		s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "patch: %v", err)
		return
	}
	s.answerEvent(w, req, http.StatusOK, patched)
}

func (s *Server) answerEvent(w http.ResponseWriter, req *http.Request, code int, o runtime.Object) {
	m := negotiate(req)
	w.Header().Set("Content-Type", s.codec.formats[m].MediaType)
	w.WriteHeader(code)
	_ = s.codec.write(w, m, o) // the client is gone if this fails
}

// newEvent checks what the real server insists on and extracts the rest.
func newEvent(o runtime.Object) (*Event, error) {
	switch o := o.(type) {
	case *eventsv1.Event:
		e := &Event{
			Namespace: o.Namespace, Name: o.Name, Type: o.Type, Reason: o.Reason, Message: o.Note, Action: o.Action,
			Reporter: o.ReportingController, Object: o.Regarding, Count: 1, stored: o,
		}
		if o.Series != nil {
			e.Count = int(o.Series.Count)
		}
		for _, f := range []struct{ name, value string }{
			{"metadata.name", o.Name}, {"reportingController", o.ReportingController}, {"reportingInstance", o.ReportingInstance},
			{"action", o.Action}, {"reason", o.Reason}, {"type", o.Type},
		} {
			if f.value == "" {
				return nil, fmt.Errorf("%s: Required value", f.name)
			}
		}
		if o.EventTime.IsZero() {
			return nil, fmt.Errorf("eventTime: Required value")
		}
		if len(o.Note) > 1024 {
			return nil, fmt.Errorf("note: Too long: may not be more than 1024 bytes")
		}
		return e, nil
	case *corev1.Event:
		return &Event{
			Namespace: o.Namespace, Name: o.Name, Type: o.Type, Reason: o.Reason, Message: o.Message, Action: o.Action,
			Reporter: o.Source.Component, Object: o.InvolvedObject, Count: max(1, int(o.Count)), stored: o,
		}, nil
	}
	return nil, fmt.Errorf("%T is not an event", o)
}
