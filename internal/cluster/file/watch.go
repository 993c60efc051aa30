package file

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// maxTargets bounds the directories outside of the watched one that are watched
// because links lead there; changes in others are found by polling.
const maxTargets = 64

// identity is a directory, whatever its path is now.
type identity struct{ device, inode uint64 }

// watcher waits for changes of a directory: of what is in it, of what links in it
// point to, and of the directory itself, which may be removed, made again, or be a
// link that is turned elsewhere.
type watcher struct {
	dir, parent string
	log         *slog.Logger
	notify      *fsnotify.Watcher // nil: there is none, poll
	watched     map[identity]string
	failed      map[string]struct{} // paths whose watch failed, noted once

	// Of the current look.
	wanted       map[identity]struct{}
	blind        bool // dir itself is not watched
	parentTarget bool // links lead into parent
}

// newWatcher returns a watcher that does without notifications if the kernel has
// none to give.
func newWatcher(dir string, log *slog.Logger) *watcher {
	w := &watcher{dir: dir, parent: filepath.Dir(dir), log: log, watched: map[identity]string{}, failed: map[string]struct{}{}}
	n, err := fsnotify.NewWatcher()
	if err != nil {
		log.Warn("manifests are polled: no file notification", "dir", dir, "err", err, "remedy", "raise fs.inotify.max_user_instances")
		return w
	}
	w.notify = n
	return w
}

func (w *watcher) close() {
	if w.notify != nil {
		w.notify.Close()
	}
}

// begin sets the watches before a look, so that nothing is missed in between.
func (w *watcher) begin() {
	w.wanted, w.parentTarget = map[identity]struct{}{}, false
	w.add(w.parent)
	w.blind = !w.add(w.dir)
}

// target adds a directory that a link in the watched one leads to.
func (w *watcher) target(dir string) {
	if len(w.wanted) >= maxTargets+2 || !w.add(dir) {
		return
	}
	if a, err := os.Stat(dir); err == nil {
		if b, err := os.Stat(w.parent); err == nil && os.SameFile(a, b) {
			w.parentTarget = true
		}
	}
}

// end drops the watches that the look did not ask for.
func (w *watcher) end() {
	for id, path := range w.watched {
		if _, ok := w.wanted[id]; !ok {
			w.drop(id, path)
		}
	}
}

// drop forgets a watch; the notifier may have done so by itself.
func (w *watcher) drop(id identity, path string) {
	_ = w.notify.Remove(path)
	delete(w.watched, id)
}

// add watches a directory and reports whether it is watched.
func (w *watcher) add(path string) bool {
	if w.notify == nil {
		return false
	}
	info, err := os.Stat(path)
	if err != nil {
		return false // the look reports it
	}
	sys, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() {
		return false
	}
	id := identity{sys.Dev, sys.Ino}
	if p, ok := w.watched[id]; ok {
		if w.isWatched(p) {
			w.wanted[id] = struct{}{}
			return true
		}
		delete(w.watched, id)
	}
	for old, p := range w.watched {
		if p == path { // another directory had this path
			w.drop(old, p)
		}
	}
	if err := w.notify.Add(path); err != nil {
		if _, noted := w.failed[path]; !noted {
			w.failed[path] = struct{}{}
			w.log.Warn("manifests are polled: cannot watch", "dir", path, "err", err, "remedy", "raise fs.inotify.max_user_watches")
		}
		return false
	}
	delete(w.failed, path)
	w.watched[id] = path
	w.wanted[id] = struct{}{}
	return true
}

// isWatched asks the notifier, which forgets a directory that was removed or
// moved.
func (w *watcher) isWatched(path string) bool {
	return slices.Contains(w.notify.WatchList(), path)
}

// wait returns true when it is time for another look: pause has passed, or events
// came and then none for quiet. It returns false when ctx has ended.
func (w *watcher) wait(ctx context.Context, quiet, pause time.Duration) bool {
	var events <-chan fsnotify.Event
	var errs <-chan error
	if w.notify != nil {
		events, errs = w.notify.Events, w.notify.Errors
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	var last <-chan time.Time // set by the first event
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		case <-last:
			return true
		case _, ok := <-errs: // an overflow: anything may have changed
			if !ok {
				errs = nil
				continue
			}
		case e, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			if !w.concerns(e) {
				continue
			}
		}
		if last == nil {
			last = time.After(maxQuiet)
		}
		timer.Reset(quiet)
	}
}

// concerns reports whether an event is about the directory, and not about what
// else is beside it.
func (w *watcher) concerns(e fsnotify.Event) bool {
	name := filepath.Clean(e.Name)
	return filepath.Dir(name) != w.parent || name == w.dir || w.parentTarget
}
