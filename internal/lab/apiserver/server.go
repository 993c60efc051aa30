// Package apiserver is a stand-in for the parts of the Kubernetes API that a
// Service proxy uses: list (whole or in pages), watch and watch-list of Services,
// EndpointSlices, Nodes, ServiceCIDRs and Namespaces with label and field
// selectors, in JSON and protobuf; events are taken in and kept for inspection.
//
// It exists for tests and benchmarks: everything is in memory, objects are put in
// by Go calls and filled with the API's defaults but not validated, there is no
// authentication, and only events can be written over HTTP. On request it
// misbehaves the way real servers and networks do: it falls silent, breaks
// connections, forgets its history, restarts.
package apiserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"sync"
	"time"
)

// Options are the properties of a server that do not change. The zero value is a
// server of today.
type Options struct {
	// NoWatchList: requests with sendInitialEvents are refused, as by servers
	// before Kubernetes 1.32.
	NoWatchList bool
	// Missing are kinds, such as "ServiceCIDR", that the server does not know.
	Missing []string
	// BookmarkEvery is the time between bookmarks on a watch that allows them;
	// 0: one minute, as the real server does.
	BookmarkEvery time.Duration
	// History is the number of changes per kind that a watch can resume over;
	// 0: 100,000.
	History int
}

// Server is one API server. Its objects and its history survive Stop and Start.
// Safe for concurrent use.
type Server struct {
	opts  Options
	codec *codec

	mu        sync.Mutex // guards all below
	rv        uint64
	stores    map[string]*store // by resource, "services"
	changed   chan struct{}     // closed and replaced when anything below or in stores changes
	silent    bool
	bookmarks uint64        // how often Bookmark was called
	cut       chan struct{} // closed and replaced by Disconnect
	delay     time.Duration
	intercept func(http.ResponseWriter, *http.Request) bool
	cuts      map[string]int // by kind: objects after which the next listing breaks off
	snapshots map[string]*snapshot
	pages     uint64
	watches   map[*watcher]struct{}
	requests  []Request
	events    []*Event
	http      *http.Server
	served    chan struct{} // closed when http has ended
	active    int           // requests being answered
	quiet     chan struct{} // closed and replaced when active becomes 0
}

// Request is one request that the server has received.
type Request struct {
	Method string
	Verb   string // list, watch, get, create, patch; "" for others
	Kind   string // Service, …; "" for others
	Path   string
	Query  url.Values
	Accept string
	Proto  string // HTTP/1.1 or HTTP/2.0
}

// maxRequests bounds the log of requests.
const maxRequests = 20000

// New returns a server without objects that does not listen yet.
func New(o Options) *Server {
	if o.BookmarkEvery == 0 {
		o.BookmarkEvery = time.Minute
	}
	if o.History == 0 {
		o.History = 100_000
	}
	s := &Server{
		opts: o, codec: newCodec(), rv: 1,
		stores: map[string]*store{}, changed: make(chan struct{}), cut: make(chan struct{}), quiet: make(chan struct{}),
		cuts: map[string]int{}, snapshots: map[string]*snapshot{}, watches: map[*watcher]struct{}{},
	}
	for _, r := range resources {
		if !slices.Contains(o.Missing, r.gvk.Kind) {
			s.stores[r.name] = newStore(r)
		}
	}
	return s
}

// Start serves on l, plain HTTP, until Stop. The listener may have been made in
// any network namespace.
func (s *Server) Start(l net.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	srv := &http.Server{Handler: http.HandlerFunc(s.serve), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	served := make(chan struct{})
	s.http, s.served = srv, served
	go func() {
		defer close(served)
		// Serve always ends with an error; after Close it says nothing new, and a
		// broken listener shows as refused connections.
		_ = srv.Serve(l)
	}()
}

// Stop closes the listener and every connection and waits until all requests have
// ended. Start serves the same objects again.
func (s *Server) Stop() error {
	s.mu.Lock()
	srv, served := s.http, s.served
	s.http = nil
	s.mu.Unlock()
	if srv == nil {
		return nil
	}
	err := srv.Close()
	<-served
	s.mu.Lock()
	for s.active > 0 {
		quiet := s.quiet
		s.mu.Unlock()
		<-quiet
		s.mu.Lock()
	}
	s.mu.Unlock()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// enter counts a request; the function that it returns ends it.
func (s *Server) enter() (leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.active--; s.active == 0 {
			close(s.quiet)
			s.quiet = make(chan struct{})
		}
	}
}

// Silence keeps watches open but sends nothing on them any more; a new watch-list
// still gets its initial state. Silence(false) sends what was held back.
func (s *Server) Silence(on bool) {
	s.update(func() { s.silent = on })
}

// Disconnect breaks every open watch without an end of stream.
func (s *Server) Disconnect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.cut)
	s.cut = make(chan struct{})
}

// CutNext breaks the next list or watch-list of a kind off: a list in the middle
// of its body, a watch-list after so many objects.
func (s *Server) CutNext(kind string, objects int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cuts[kind] = objects
}

// Delay lets every request wait for d before it is answered.
func (s *Server) Delay(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delay = d
}

// Intercept calls f before each request; f returns true if it has answered. nil
// takes it out again.
func (s *Server) Intercept(f func(http.ResponseWriter, *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.intercept = f
}

// Bookmark sends a bookmark on every watch that allows them.
func (s *Server) Bookmark() {
	s.update(func() { s.bookmarks++ })
}

// Compact forgets the history: a watch cannot resume from before now, and a list
// cannot be continued. A real server is like that after a restart.
func (s *Server) Compact() {
	s.update(s.compact)
}

func (s *Server) compact() {
	for _, st := range s.stores {
		st.history = nil
		st.oldest = s.rv
	}
	s.snapshots = map[string]*snapshot{}
}

// SetResourceVersion moves the counter and forgets the history. A lower value is
// what clients of a restored backup see.
func (s *Server) SetResourceVersion(rv uint64) {
	s.update(func() {
		s.rv = rv
		s.compact()
	})
}

// ResourceVersion returns the version of the newest change.
func (s *Server) ResourceVersion() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rv
}

// Requests returns the requests received so far, oldest first.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Watch describes one open watch.
type Watch struct {
	Kind string
	// Sent is the resource version up to which everything was written to the
	// connection.
	Sent uint64
	// Live: the initial state is complete.
	Live bool
}

// Watches returns the open watches in no order.
func (s *Server) Watches() []Watch {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Watch, 0, len(s.watches))
	for w := range s.watches {
		out = append(out, Watch{Kind: w.store.gvk.Kind, Sent: w.sent, Live: w.live})
	}
	return out
}

// update changes what watches look at and wakes them.
func (s *Server) update(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.wake()
}

func (s *Server) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// WriteKubeconfig writes a kubeconfig file for the server at addr, host and port.
func WriteKubeconfig(path, addr string) error {
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: lab
  cluster:
    server: http://%s
contexts:
- name: lab
  context:
    cluster: lab
    user: lab
current-context: lab
users:
- name: lab
  user: {}
`, addr)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}

// pause waits for d unless the request ends first.
func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
