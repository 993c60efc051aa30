package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

var (
	// errSilent: nothing came for longer than Options.Staleness.
	errSilent = errors.New("the API server sends nothing, neither changes nor bookmarks")
	// errWentBack: the server is at an older version than before.
	errWentBack = errors.New("the API server's history went back, as after the restore of a backup")
)

// follower keeps the sink equal to what the server has of one kind. One goroutine
// uses it.
type follower struct {
	*feed
	src *Source
	to  cluster.Sink

	// known holds the objects in the sink and the list that confirmed each last,
	// so that what vanished while nobody watched can be removed.
	known map[cluster.Name]uint32
	list  uint32 // number of the present list
	// version is where a watch continues; "" while no list is complete, or when
	// the server does not know the last one.
	version string
	// plainList: the last attempt to stream a list stalled.
	plainList bool
	// progress: something came since the last pause.
	progress  bool
	retries   int
	confirmed time.Time // when the server last said anything
	// absence is the reason given in the log for a kind that is not there.
	absence string
	// epoch is that of the path over which the sink was last brought up to date.
	epoch uint32
}

// path is the way to the server that all followers of a source share.
type path struct {
	born  time.Time
	seen  atomic.Int64  // when anything last came over it, as time since born
	epoch atomic.Uint32 // how often it was given up
}

// confirm notes that something came.
func (p *path) confirm() { p.seen.Store(int64(time.Since(p.born))) }

// silentFor reports whether nothing came at all for so long.
func (p *path) silentFor(d time.Duration) bool {
	return time.Since(p.born)-time.Duration(p.seen.Load()) >= d
}

func newFollower(s *Source, f *feed, to cluster.Sink) *follower {
	return &follower{feed: f, src: s, to: to, known: map[cluster.Name]uint32{}}
}

// run lists and then watches for ever. A watch that ends is continued from where
// it ended; only if that is impossible, or if it had fallen silent, is everything
// listed again.
func (f *follower) run(ctx context.Context) {
	for listed := false; ctx.Err() == nil; {
		var w *stream
		var err error
		if !listed {
			if w, err = f.relist(ctx); err == nil {
				listed = true
			} else if apierrors.IsResourceExpired(err) {
				f.version = ""
			}
		}
		if err == nil {
			err = f.follow(ctx, w)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil && f.optional && isAbsent(err) && (len(f.known) == 0 || apierrors.IsNotFound(err)) {
			f.absent(ctx, err)
			listed = false
			continue
		}
		switch {
		case err == nil:
		case isTooLarge(err), errors.Is(err, errWentBack):
			f.version, listed = "", false
		case apierrors.IsResourceExpired(err), apierrors.IsGone(err):
			listed = false
		case errors.Is(err, errSilent):
			listed = false
			f.giveUpPath()
		}
		if f.epoch != f.src.path.epoch.Load() {
			listed = false
		}
		if err != nil {
			f.src.trouble.report(f.kind, err)
		}
		f.pause(ctx, err)
	}
}

// giveUpPath is called when this kind was silent. If the others were too, though
// a bookmark of one of them was due, the connections may lead to a server that is
// gone, or end in a middlebox that keeps them up: new ones may lead elsewhere, and
// what came over the old ones is not to be trusted, so all kinds are listed again.
func (f *follower) giveUpPath() {
	p := f.src.path
	if f.epoch == p.epoch.Load() && p.silentFor(f.src.opts.Staleness/2) {
		p.epoch.Add(1)
		p.confirm() // the new path has its own time
		f.src.client.conns.CloseAll()
	}
}

// pause waits before the next attempt: not at all after a watch that was useful
// and ended in order, else a random part of a time that doubles with every
// attempt that brought nothing, or what the server asks for.
func (f *follower) pause(ctx context.Context, err error) {
	if f.progress {
		f.progress, f.retries = false, 0
		if err == nil {
			return
		}
	}
	limit := min(f.src.opts.RetryMax, f.src.opts.RetryMin<<min(f.retries, 16))
	f.retries++
	d := rand.N(limit)
	if secs, ok := apierrors.SuggestsClientDelay(err); ok {
		d += time.Duration(secs) * time.Second
	}
	wait(ctx, d)
}

// absent treats a kind that the server does not serve, or not to us, as one
// without objects, and asks again before the view counts as stale.
func (f *follower) absent(ctx context.Context, err error) {
	if now := class(err); now != f.absence {
		f.absence = now
		f.src.opts.Log.Warn("the API server does not offer a kind; going on as if there were none", "kind", f.kind.String(), "error", err)
	}
	f.begin()
	f.complete()
	f.progress = false
	limit := f.src.opts.Staleness
	wait(ctx, limit/4+rand.N(limit/4))
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// relist brings the sink up to the server's present state, by a watch that begins
// with it, which is returned for what follows, or by plain lists where the server
// cannot do that.
func (f *follower) relist(ctx context.Context) (*stream, error) {
	if !f.plainList {
		w, err := f.watchList(ctx)
		if err == nil || !isUnsupported(err) {
			f.plainList = errors.Is(err, errSilent)
			return w, err
		}
	}
	f.plainList = false
	if err := f.listPages(ctx); err != nil {
		return nil, err
	}
	f.complete()
	return nil, nil
}

// watchList streams the present state and keeps the watch.
func (f *follower) watchList(ctx context.Context) (*stream, error) {
	f.begin()
	yes := true
	w, err := f.watch(ctx, metav1.ListOptions{
		SendInitialEvents: &yes, ResourceVersion: f.version, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
	})
	if err != nil {
		return nil, err
	}
	for {
		e, ok, err := w.next(ctx)
		if err == nil && !ok {
			err = errors.New("the watch ended before the list was complete")
		}
		done := false
		if err == nil {
			done, err = f.take(e, true)
		}
		if err != nil {
			w.stop()
			return nil, err
		}
		if done {
			f.complete()
			return w, nil
		}
	}
}

// listPages reads the present state in pages. A list that the server may answer
// from its cache comes whole, whatever the limit; see the API concepts of
// Kubernetes, "resourceVersion".
func (f *follower) listPages(ctx context.Context) error {
	f.begin()
	o := metav1.ListOptions{Limit: f.src.opts.PageSize, ResourceVersion: f.version}
	switch {
	case f.version != "":
		o.ResourceVersionMatch, o.Limit = metav1.ResourceVersionMatchNotOlderThan, 0
	case len(f.known) == 0 && !f.src.opts.Everything:
		// At first any state will do, and a cache spares the server's store when
		// all nodes start at once.
		o.ResourceVersion = "0"
	}
	for {
		l, err := f.page(ctx, o)
		if err != nil {
			if o.Continue != "" && apierrors.IsResourceExpired(err) {
				// The pages took too long; the next list comes in one piece.
				o.Continue, o.Limit = "", 0
				f.begin()
				continue
			}
			return err
		}
		if o.Continue = l.GetContinue(); o.Continue == "" {
			f.version = l.GetResourceVersion()
			return nil
		}
		o.ResourceVersion, o.ResourceVersionMatch = "", ""
	}
}

// page reads one page and hands its objects over.
func (f *follower) page(ctx context.Context, o metav1.ListOptions) (metav1.ListInterface, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, f.src.opts.Staleness, errSilent)
	defer cancel()
	o.LabelSelector, o.FieldSelector = f.labels, f.fields
	req := f.client.Get().Resource(f.resource).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0)
	if o.Continue != "" {
		// The server chose the size of pages; waiting between them helps nobody.
		req.Throttle(flowcontrol.NewFakeAlwaysRateLimiter())
	}
	list := f.newList()
	if err := req.Do(ctx).Into(list); err != nil {
		return nil, because(ctx, err)
	}
	f.confirm()
	if err := meta.EachListItem(list, f.put); err != nil {
		return nil, err
	}
	return meta.ListAccessor(list)
}

// follow takes changes from w, or from a new watch, until it ends.
func (f *follower) follow(ctx context.Context, w *stream) error {
	if w == nil {
		var err error
		if w, err = f.watch(ctx, metav1.ListOptions{ResourceVersion: f.version}); err != nil {
			return err
		}
	}
	defer w.stop()
	for {
		e, ok, err := w.next(ctx)
		if err == nil && !ok && time.Since(f.confirmed) > f.src.opts.Staleness {
			// One short watch after another, and nothing in any of them.
			err = errSilent
		}
		if err != nil || !ok {
			return err
		}
		if _, err := f.take(e, false); err != nil {
			return err
		}
	}
}

// take carries one event of a watch into the sink. Objects of the initial state
// come in no order of versions, so only the bookmark at its end counts as a place
// to continue from.
func (f *follower) take(e watch.Event, initial bool) (listEnd bool, err error) {
	if e.Type == watch.Error {
		return false, apierrors.FromObject(e.Object)
	}
	m, err := meta.Accessor(e.Object)
	if err != nil {
		return false, wrongType(e.Object)
	}
	f.confirm()
	switch e.Type {
	case watch.Added, watch.Modified:
		err = f.put(e.Object)
	case watch.Deleted:
		n := cluster.Name{Namespace: m.GetNamespace(), Name: m.GetName()}
		delete(f.known, n)
		f.remove(n)
	case watch.Bookmark:
		listEnd = initial && m.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
		if !initial && isOlder(m.GetResourceVersion(), f.version) {
			return false, errWentBack
		}
	default:
		err = fmt.Errorf("the server sent an event of type %q", e.Type)
	}
	if err == nil && (!initial || listEnd) {
		f.version = m.GetResourceVersion()
	}
	return listEnd, err
}

// begin starts a new list.
func (f *follower) begin() {
	f.list++
	f.epoch = f.src.path.epoch.Load()
}

// put hands an object over.
func (f *follower) put(o runtime.Object) error {
	n, err := f.set(o)
	if err == nil {
		f.known[n] = f.list
	}
	return err
}

// complete ends a list: what it did not hold is removed.
func (f *follower) complete() {
	for n, list := range f.known {
		if list != f.list {
			delete(f.known, n)
			f.remove(n)
		}
	}
	if f.listed != nil {
		f.listed()
	}
	f.to.Synced(f.kind)
	f.confirm()
}

// confirm notes that the server answers.
func (f *follower) confirm() {
	f.to.Seen(f.kind)
	f.confirmed = time.Now()
	f.src.path.confirm()
	if !f.progress {
		f.progress = true
		f.src.trouble.report(f.kind, nil)
	}
}

// stream is an open watch that is given up when it falls silent.
type stream struct {
	watch.Interface
	ctx     context.Context
	cancel  context.CancelCauseFunc
	silence *time.Timer
	limit   time.Duration
}

func (f *follower) watch(ctx context.Context, o metav1.ListOptions) (*stream, error) {
	// As for informers: not all watches of a cluster end at once.
	timeout := int64(300 + rand.IntN(300))
	o.Watch, o.AllowWatchBookmarks, o.TimeoutSeconds = true, true, &timeout
	o.LabelSelector, o.FieldSelector = f.labels, f.fields
	w := &stream{limit: f.src.opts.Staleness}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.silence = time.AfterFunc(w.limit, func() { w.cancel(errSilent) })
	var err error
	w.Interface, err = f.client.Get().Resource(f.resource).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0).Watch(w.ctx)
	if err != nil {
		err = because(w.ctx, err)
		w.stop()
		return nil, err
	}
	return w, nil
}

// next returns the next event; ok is false at the end of the stream.
func (w *stream) next(ctx context.Context) (e watch.Event, ok bool, err error) {
	w.silence.Reset(w.limit)
	defer w.silence.Stop() // the time that the sink takes is not the server's
	select {
	case e, ok = <-w.ResultChan():
		if errors.Is(context.Cause(w.ctx), errSilent) {
			return e, false, errSilent
		}
		return e, ok, nil
	case <-w.ctx.Done():
		return e, false, context.Cause(w.ctx)
	case <-ctx.Done():
		return e, false, ctx.Err()
	}
}

func (w *stream) stop() {
	w.silence.Stop()
	w.cancel(context.Canceled)
	if w.Interface != nil {
		w.Stop()
	}
}

// because names the reason for which ctx ended in place of err, if it did.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// isUnsupported reports whether the server cannot stream lists.
func isUnsupported(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsMethodNotSupported(err)
}

// isAbsent reports whether the kind does not exist for us.
func isAbsent(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) }

// isTooLarge reports whether the server has not reached the version asked for.
func isTooLarge(err error) bool {
	return apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
}

// isOlder compares resource versions as numbers; anything else is not older.
func isOlder(a, b string) bool {
	x, err := strconv.ParseUint(a, 10, 64)
	y, err2 := strconv.ParseUint(b, 10, 64)
	return err == nil && err2 == nil && x < y
}
