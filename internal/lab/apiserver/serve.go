package apiserver

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// target is what a path names: /api/v1/… or /apis/GROUP/VERSION/…, then
// [namespaces/NS/]RESOURCE[/NAME].
type target struct {
	group, version, namespace, resource, name string
}

func parsePath(path string) (target, bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	var t target
	switch {
	case len(parts) >= 3 && parts[0] == "api":
		t.version, parts = parts[1], parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		t.group, t.version, parts = parts[1], parts[2], parts[3:]
	default:
		return t, false
	}
	if parts[0] == "namespaces" && len(parts) >= 3 {
		t.namespace, parts = parts[1], parts[2:]
	}
	t.resource = parts[0]
	if len(parts) > 1 {
		t.name = parts[1]
	}
	return t, len(parts) <= 2
}

func (s *Server) serve(w http.ResponseWriter, req *http.Request) {
	defer s.enter()()
	t, isObject := parsePath(req.URL.Path)
	var st *store
	s.mu.Lock()
	if c := s.stores[t.resource]; isObject && c != nil && c.gvk.Group == t.group && c.gvk.Version == t.version {
		st = c
	}
	s.log(req, t, st)
	delay, intercept := s.delay, s.intercept
	s.mu.Unlock()

	pause(req.Context(), delay)
	if intercept != nil && intercept(w, req) {
		return
	}
	switch {
	case isObject && t.resource == "events" && (t.group == "" || t.group == "events.k8s.io"):
		s.serveEvents(w, req, t)
	case isObject && st == nil:
		s.fail(w, req, http.StatusNotFound, metav1.StatusReasonNotFound, "the server could not find the requested resource")
	case !isObject:
		s.serveAbout(w, req)
	case req.Method != http.MethodGet:
		s.fail(w, req, http.StatusMethodNotAllowed, metav1.StatusReasonMethodNotAllowed, "only events can be written")
	case t.name != "":
		s.serveGet(w, req, st, t)
	case isWatch(req):
		s.serveWatch(w, req, st, t)
	default:
		s.serveList(w, req, st, t)
	}
}

func isWatch(req *http.Request) bool {
	v := req.URL.Query().Get("watch")
	return v == "1" || v == "true"
}

// log remembers a request. Under s.mu.
func (s *Server) log(req *http.Request, t target, st *store) {
	r := Request{Method: req.Method, Path: req.URL.Path, Query: req.URL.Query(), Accept: req.Header.Get("Accept"), Proto: req.Proto}
	switch {
	case st != nil:
		r.Kind = st.gvk.Kind
	case t.resource == "events":
		r.Kind = "Event"
	}
	switch {
	case r.Kind == "":
	case req.Method == http.MethodPost:
		r.Verb = "create"
	case req.Method == http.MethodPatch:
		r.Verb = "patch"
	case t.name != "":
		r.Verb = "get"
	case isWatch(req):
		r.Verb = "watch"
	default:
		r.Verb = "list"
	}
	if len(s.requests) >= maxRequests {
		s.requests = slices.Delete(s.requests, 0, maxRequests/2)
	}
	s.requests = append(s.requests, r)
}

func (s *Server) fail(w http.ResponseWriter, req *http.Request, code int, reason metav1.StatusReason, format string, args ...any) {
	s.codec.status(w, req, metav1.Status{Code: int32(code), Reason: reason, Message: fmt.Sprintf(format, args...)})
}

func (s *Server) serveGet(w http.ResponseWriter, req *http.Request, st *store, t target) {
	s.mu.Lock()
	it := st.items[types.NamespacedName{Namespace: t.namespace, Name: t.name}]
	s.mu.Unlock()
	if it == nil {
		s.fail(w, req, http.StatusNotFound, metav1.StatusReasonNotFound, "%s %q not found", t.resource, t.name)
		return
	}
	m := negotiate(req)
	b, err := s.codec.bytes(it, m)
	if err != nil {
		s.fail(w, req, http.StatusInternalServerError, metav1.StatusReasonInternalError, "%v", err)
		return
	}
	w.Header().Set("Content-Type", s.codec.formats[m].MediaType)
	_, _ = w.Write(b) // the client is gone if this fails
}

// snapshot is the rest of a list that is read in pages.
type snapshot struct {
	rv    uint64
	items []*item
}

// serveList answers a list. As in the real server a page size counts only for
// consistent reads (no resourceVersion): "0" and older versions are answered from
// the cache at once.
func (s *Server) serveList(w http.ResponseWriter, req *http.Request, st *store, t target) {
	q := req.URL.Query()
	match, err := newMatcher(req, st, t.namespace)
	if err != nil {
		s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	limit := 0
	if v := q.Get("limit"); v != "" {
		if limit, err = strconv.Atoi(v); err != nil || limit < 0 {
			s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "limit %q is not a number", v)
			return
		}
	}
	wanted, err := version(q.Get("resourceVersion"))
	if err != nil {
		s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	if q.Get("resourceVersion") != "" {
		limit = 0
	}

	s.mu.Lock()
	var page snapshot
	if token := q.Get("continue"); token != "" {
		snap := s.snapshots[token]
		if snap == nil {
			s.mu.Unlock()
			s.fail(w, req, http.StatusGone, metav1.StatusReasonExpired, "The provided continue parameter is too old to display a consistent list result.")
			return
		}
		delete(s.snapshots, token)
		page = *snap
	} else {
		page = snapshot{s.rv, st.selected(match)}
	}
	if wanted > s.rv {
		rv := s.rv
		s.mu.Unlock()
		s.tooLarge(w, req, wanted, rv)
		return
	}
	next, remaining := "", int64(0)
	if limit > 0 && len(page.items) > limit {
		s.pages++
		next = fmt.Sprintf("%s-%d-%d", st.name, page.rv, s.pages)
		remaining = int64(len(page.items) - limit)
		s.snapshots[next] = &snapshot{page.rv, page.items[limit:]}
		page.items = page.items[:limit]
	}
	_, cut := s.cuts[st.gvk.Kind]
	delete(s.cuts, st.gvk.Kind)
	s.mu.Unlock()
	s.writeList(w, req, st, page, next, remaining, cut)
}

func (s *Server) writeList(w http.ResponseWriter, req *http.Request, st *store, page snapshot, next string, remaining int64, cut bool) {
	gvk := st.gvk
	gvk.Kind += "List"
	list, err := s.codec.scheme.New(gvk)
	if err == nil {
		list.GetObjectKind().SetGroupVersionKind(gvk)
		objs := make([]runtime.Object, len(page.items))
		for i, it := range page.items {
			objs[i] = it.obj
		}
		err = meta.SetList(list, objs)
	}
	if err != nil {
		s.fail(w, req, http.StatusInternalServerError, metav1.StatusReasonInternalError, "%v", err)
		return
	}
	l := list.(metav1.ListMetaAccessor).GetListMeta()
	l.SetResourceVersion(strconv.FormatUint(page.rv, 10))
	if next != "" {
		l.SetContinue(next)
		l.SetRemainingItemCount(&remaining)
	}
	m := negotiate(req)
	b, err := runtime.Encode(s.codec.formats[m].Serializer, list)
	if err != nil {
		s.fail(w, req, http.StatusInternalServerError, metav1.StatusReasonInternalError, "%v", err)
		return
	}
	w.Header().Set("Content-Type", s.codec.formats[m].MediaType)
	if cut {
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b[:len(b)/2])
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(b) // the client is gone if this fails
}

// tooLarge refuses a version that the server has not reached, as the real one
// does after some seconds of waiting.
func (s *Server) tooLarge(w http.ResponseWriter, req *http.Request, wanted, have uint64) {
	s.codec.status(w, req, metav1.Status{
		Code: http.StatusGatewayTimeout, Reason: metav1.StatusReasonTimeout,
		Message: fmt.Sprintf("Too large resource version: %d, current: %d", wanted, have),
		Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{
			{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"},
		}},
	})
}

func version(s string) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	v, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("resourceVersion %q is not a number", s)
	}
	return v, nil
}

// serveAbout answers the paths that are about the server: health, version,
// discovery.
func (s *Server) serveAbout(w http.ResponseWriter, req *http.Request) {
	var body any
	switch path := strings.TrimRight(req.URL.Path, "/"); path {
	case "/healthz", "/livez", "/readyz":
		_, _ = io.WriteString(w, "ok")
		return
	case "/version":
		body = map[string]string{"major": "1", "minor": "37", "gitVersion": "v1.37.2", "platform": "linux/amd64"}
	case "/api":
		body = metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}}
	case "/apis":
		body = s.groups()
	default:
		gv, ok := strings.CutPrefix(path, "/apis/")
		if path == "/api/v1" {
			gv, ok = "v1", true
		}
		if list := s.groupResources(gv); ok && len(list.APIResources) > 0 {
			body = list
			break
		}
		s.fail(w, req, http.StatusNotFound, metav1.StatusReasonNotFound, "the server could not find the requested resource")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body)
}

func (s *Server) groups() metav1.APIGroupList {
	list := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}}
	for _, group := range []string{"discovery.k8s.io", "networking.k8s.io", "events.k8s.io"} {
		v := metav1.GroupVersionForDiscovery{GroupVersion: group + "/v1", Version: "v1"}
		if len(s.groupResources(v.GroupVersion).APIResources) == 0 {
			continue
		}
		list.Groups = append(list.Groups, metav1.APIGroup{Name: group, Versions: []metav1.GroupVersionForDiscovery{v}, PreferredVersion: v})
	}
	return list
}

func (s *Server) groupResources(gv string) metav1.APIResourceList {
	list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: gv}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.stores {
		if st.gvk.GroupVersion().String() == gv {
			list.APIResources = append(list.APIResources, metav1.APIResource{
				Name: st.name, Kind: st.gvk.Kind, Namespaced: st.namespaced, Verbs: metav1.Verbs{"get", "list", "watch"},
			})
		}
	}
	if gv == "v1" || gv == "events.k8s.io/v1" {
		list.APIResources = append(list.APIResources, metav1.APIResource{Name: "events", Kind: "Event", Namespaced: true, Verbs: metav1.Verbs{"create", "patch"}})
	}
	return list
}
