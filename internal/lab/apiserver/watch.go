package apiserver

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// watcher is one open watch.
type watcher struct {
	server    *Server
	store     *store
	match     matcher
	media     media
	frames    io.Writer     // one Write is one frame
	out       *bufio.Writer // below frames, above the connection
	flush     func()
	bookmarks bool // allowed by the client

	initial  []*item
	listEnd  bool // send the bookmark that ends the initial state
	cutAfter int  // break off after so many initial objects; -1: do not

	// guarded by Server.mu
	sent  uint64 // all changes up to this version were written
	live  bool
	asked uint64 // Server.bookmarks that were answered
}

// goneError says that a watch cannot start where the client wants.
type goneError struct{ wanted, oldest uint64 }

func (e goneError) Error() string {
	return fmt.Sprintf("too old resource version: %d (%d)", e.wanted, e.oldest)
}

func (s *Server) serveWatch(w http.ResponseWriter, req *http.Request, st *store, t target) {
	q := req.URL.Query()
	match, err := newMatcher(req, st, t.namespace)
	if err != nil {
		s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	from, err := version(q.Get("resourceVersion"))
	if err != nil {
		s.fail(w, req, http.StatusBadRequest, metav1.StatusReasonBadRequest, "%v", err)
		return
	}
	if why := s.refuseWatch(req); why != "" {
		s.fail(w, req, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "%s", why)
		return
	}
	m := negotiate(req)
	out := bufio.NewWriterSize(w, 64<<10)
	wt := &watcher{
		server: s, store: st, match: match, media: m, out: out, cutAfter: -1,
		frames: s.codec.formats[m].StreamSerializer.Framer.NewFrameWriter(out),
		flush:  w.(http.Flusher).Flush, bookmarks: q.Get("allowWatchBookmarks") == "true" || q.Get("allowWatchBookmarks") == "1",
	}
	s.mu.Lock()
	cut := s.cut
	gone, wait := wt.begin(from, q.Get("sendInitialEvents") == "true")
	rv := s.rv
	if !wait {
		s.watches[wt] = struct{}{}
	}
	s.mu.Unlock()
	if wait {
		s.tooLarge(w, req, from, rv)
		return
	}
	defer func() {
		s.mu.Lock()
		delete(s.watches, wt)
		s.mu.Unlock()
	}()
	contentType := s.codec.formats[m].MediaType
	if m != mediaJSON {
		contentType += ";stream=watch"
	}
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(http.StatusOK)
	wt.flush()
	if gone != nil {
		_ = wt.sendGone(gone) // the client is gone if this fails
		return
	}
	var timeout <-chan time.Time
	if secs, err := strconv.Atoi(q.Get("timeoutSeconds")); err == nil && secs > 0 {
		timer := time.NewTimer(time.Duration(secs) * time.Second)
		defer timer.Stop()
		timeout = timer.C
	}
	if errors.Is(wt.run(req, cut, timeout), errCut) {
		panic(http.ErrAbortHandler) // no proper end of the stream
	}
}

// refuseWatch returns why a watch's parameters are invalid, "" if they are not.
func (s *Server) refuseWatch(req *http.Request) string {
	q := req.URL.Query()
	initial, match := q.Get("sendInitialEvents"), q.Get("resourceVersionMatch")
	switch {
	case initial != "" && s.opts.NoWatchList:
		return "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
	case initial != "" && match != string(metav1.ResourceVersionMatchNotOlderThan):
		return "resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
	case initial == "" && match != "":
		return "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
	case initial == "true" && q.Get("allowWatchBookmarks") != "true":
		return "sendInitialEvents: Forbidden: sendInitialEvents requires allowWatchBookmarks"
	}
	return ""
}

// begin decides what the watch starts with: the present state, for a watch-list
// and for a watch from no or any version, or the changes after from. wait says
// that the server has not reached a watch-list's version. Under s.mu.
func (w *watcher) begin(from uint64, list bool) (gone error, wait bool) {
	s := w.server
	if list && from > s.rv {
		return nil, true
	}
	if list || from == 0 {
		w.initial = w.store.selected(w.match)
		w.listEnd = list
		w.sent = s.rv
		if n, ok := s.cuts[w.store.gvk.Kind]; ok && list {
			w.cutAfter = n
			delete(s.cuts, w.store.gvk.Kind)
		}
		return nil, false
	}
	if from < w.store.oldest {
		return goneError{from, w.store.oldest}, false
	}
	w.asked = s.bookmarks
	w.sent = from // possibly in the future: then nothing comes until it is passed
	w.live = true
	return nil, false
}

var errCut = errors.New("connection broken on purpose")

func (w *watcher) run(req *http.Request, cut <-chan struct{}, timeout <-chan time.Time) error {
	s := w.server
	if err := w.sendInitial(); err != nil {
		return err
	}
	ticker := time.NewTicker(s.opts.BookmarkEvery)
	defer ticker.Stop()
	s.mu.Lock()
	if !w.live {
		w.live, w.asked = true, s.bookmarks
	}
	s.mu.Unlock()
	due := false
	for {
		s.mu.Lock()
		changed, silent, now := s.changed, s.silent, s.rv
		var todo []change
		if !silent {
			if w.sent < w.store.oldest {
				gone := goneError{w.sent, w.store.oldest}
				s.mu.Unlock()
				return w.sendGone(gone)
			}
			todo = w.store.after(w.sent)
			if s.bookmarks != w.asked {
				w.asked, due = s.bookmarks, true
			}
		}
		s.mu.Unlock()
		for _, c := range todo {
			if err := w.sendChange(c); err != nil {
				return err
			}
		}
		if due && !silent && w.bookmarks {
			if err := w.sendBookmark(now, false); err != nil {
				return err
			}
		}
		if !silent {
			due = false
			if err := w.out.Flush(); err != nil {
				return err
			}
			w.flush()
			s.mu.Lock()
			w.sent = max(w.sent, now)
			s.mu.Unlock()
		}
		select {
		case <-changed:
		case <-ticker.C:
			due = true
		case <-cut:
			return errCut
		case <-timeout:
			return nil
		case <-req.Context().Done():
			return req.Context().Err()
		}
	}
}

func (w *watcher) sendInitial() error {
	for i, it := range w.initial {
		if i == w.cutAfter {
			break
		}
		if err := w.send(watch.Added, it); err != nil {
			return err
		}
	}
	w.initial = nil
	if w.listEnd && w.cutAfter < 0 {
		if err := w.sendBookmark(w.sent, true); err != nil {
			return err
		}
	}
	// Not left to the loop, which sends nothing in silence.
	if err := w.out.Flush(); err != nil {
		return err
	}
	w.flush()
	if w.cutAfter >= 0 {
		return errCut
	}
	return nil
}

// sendChange sends what a change means under the watch's selectors.
func (w *watcher) sendChange(c change) error {
	before := c.old != nil && w.match(c.old)
	after := c.now != nil && w.match(c.now)
	switch {
	case before && after:
		return w.send(watch.Modified, c.now)
	case after:
		return w.send(watch.Added, c.now)
	case before:
		return w.send(watch.Deleted, c.old.at(c.rv))
	}
	return nil
}

func (w *watcher) sendBookmark(rv uint64, initialEnd bool) error {
	o, err := w.server.codec.scheme.New(w.store.gvk)
	if err != nil {
		return err
	}
	b := o.(Object)
	b.GetObjectKind().SetGroupVersionKind(w.store.gvk)
	if initialEnd {
		b.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	return w.send(watch.Bookmark, newItem(b, rv))
}

// sendGone reports an unusable start in the stream, where the real server puts
// it.
func (w *watcher) sendGone(gone error) error {
	st := &metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired, Message: gone.Error(),
	}
	raw, err := runtime.Encode(w.server.codec.formats[w.media].Serializer, st)
	if err != nil {
		return err
	}
	if err := w.frame(watch.Error, raw); err != nil {
		return err
	}
	return w.out.Flush()
}

func (w *watcher) send(t watch.EventType, it *item) error {
	raw, err := w.server.codec.bytes(it, w.media)
	if err != nil {
		return err
	}
	return w.frame(t, raw)
}

func (w *watcher) frame(t watch.EventType, raw []byte) error {
	e := &metav1.WatchEvent{Type: string(t), Object: runtime.RawExtension{Raw: raw}}
	return w.server.codec.formats[w.media].StreamSerializer.Serializer.Encode(e, w.frames)
}
