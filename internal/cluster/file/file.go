// Package file is a source of facts that reads a directory of Kubernetes
// manifests and follows it: Services, EndpointSlices, classic Endpoints, the own
// Node and ServiceCIDRs, in YAML or JSON, several documents in a file, lists too.
//
// Objects are defaulted and validated as the API server does it, as far as it
// matters for forwarding. Nothing is allocated: a Service has the addresses and
// node ports that its manifest gives it.
//
// What cannot be read costs as little as possible. A bad object, a document that
// does not parse, an unreadable file and a missing directory each keep in force
// what they last gave, and everything else goes on; only what is gone from a
// directory that can be read is removed. That memory ends with the process.
//
// Limits: files are read whole, up to [MaxFileSize]; subdirectories are not
// entered.
package file

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// MaxFileSize is the size in bytes beyond which a file is not read.
const MaxFileSize = 64 << 20

// The times of Options, unless set.
const (
	defaultPoll  = 30 * time.Second
	defaultQuiet = 20 * time.Millisecond
)

const (
	// maxQuiet bounds how long a stream of events can put off reading.
	maxQuiet = 500 * time.Millisecond
	// emptySettle is how long a file must stay empty to count as emptied: a
	// shell's redirection empties a file well before it writes to it.
	emptySettle = 2 * time.Second
	// retryAfter is the pause before a directory that cannot be read is tried
	// again, unless an event comes first.
	retryAfter = time.Second
)

// Options are the settings of a Source; the zero value is usable.
type Options struct {
	// Node is the own node's name; only the Node of this name is handed over.
	Node string
	// Log gets every problem once, and what is ignored; nil: nobody.
	Log *slog.Logger
	// Poll is the time between looks at the directory without any event, the
	// safety net below file notifications. Default 30 s.
	Poll time.Duration
	// Quiet is how long to wait after an event for more of them, so that a file
	// written in pieces is read once. Default 20 ms.
	Quiet time.Duration
	// Now is the clock, by default time.Now.
	Now func() time.Time
}

// Source reads one directory. It delivers into one Sink in its life.
type Source struct {
	dir string
	o   Options

	// Run's or Load's own.
	files     map[string]*manifest
	delivered map[objectKey]*object
	synced    bool
	reported  map[findingKey]struct{}
	ignored   map[typeMeta]struct{} // kinds that were noted
	recheck   time.Time             // when to look at an emptied file again; zero: never

	others atomic.Bool // Nodes of other names are there

	mu       sync.Mutex
	problems []Problem // guarded by mu; replaced, never changed
}

var _ cluster.Source = (*Source)(nil)

// New returns the Source of a directory, which need not exist yet.
func New(dir string, o Options) *Source {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Poll <= 0 {
		o.Poll = defaultPoll
	}
	if o.Quiet <= 0 {
		o.Quiet = defaultQuiet
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Source{
		dir: filepath.Clean(dir), o: o,
		files: map[string]*manifest{}, delivered: map[objectKey]*object{},
		reported: map[findingKey]struct{}{}, ignored: map[typeMeta]struct{}{},
	}
}

// Delivers returns the kinds that a Source delivers, for [cluster.State.Sink].
func Delivers() []cluster.Kind {
	return []cluster.Kind{cluster.Services, cluster.Slices, cluster.Nodes, cluster.ServiceCIDRs}
}

// Load reads the directory once. The error says why the directory cannot be
// listed; what is wrong inside it is in Problems.
func (s *Source) Load(to cluster.Sink) error { return s.pass(to, func(string) {}) }

// Run reads the directory and follows it until ctx ends.
func (s *Source) Run(ctx context.Context, to cluster.Sink) error {
	w := newWatcher(s.dir, s.o.Log)
	defer w.close()
	for {
		w.begin()
		err := s.pass(to, w.target)
		w.end()
		if !w.wait(ctx, s.o.Quiet, s.pause(err, w.blind)) {
			return nil
		}
	}
}

// pause is the time until the next look without an event.
func (s *Source) pause(err error, blind bool) time.Duration {
	d := s.o.Poll
	if err != nil || blind {
		d = min(d, retryAfter)
	}
	if !s.recheck.IsZero() {
		d = min(d, max(0, s.recheck.Sub(s.o.Now())))
	}
	return d
}

// pass reads what changed and delivers the difference. target is told the
// directories outside of dir that hold what links in dir point to.
func (s *Source) pass(to cluster.Sink, target func(dir string)) error {
	if err := s.readDir(target); err != nil {
		s.report([]finding{{Problem: Problem{
			File: s.dir, Reason: err.Error(), Effect: effectDirectory,
		}}}, true)
		return err
	}
	s.others.Store(s.hasOtherNodes())
	inForce, found := s.merge()
	s.report(found, false)
	s.deliver(to, inForce)
	for _, k := range Delivers() {
		if s.synced {
			to.Seen(k)
		} else {
			to.Synced(k)
		}
	}
	s.synced = true
	return nil
}

// OtherNodes reports whether there are Nodes of other names than the own. Then the
// own must be among the manifests too, or its name is wrong. Safe for concurrent
// use.
func (s *Source) OtherNodes() bool { return s.others.Load() }

// Problems returns what is wrong in the directory now, in the order of files and
// documents. Safe for concurrent use.
func (s *Source) Problems() []Problem {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.problems)
}
