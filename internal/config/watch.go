package config

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long a file must be left alone before it is read: writers that do
// not replace a file atomically leave it half written for a moment.
const settle = 50 * time.Millisecond

// Watcher tells when the content of a file changes, whichever way: written in
// place, replaced by rename, or by the swap of a symbolic link anywhere on its
// path, as kubelet does it with mounted ConfigMaps.
type Watcher struct {
	Path string
	// Last is the content that is known already.
	Last []byte
	// Poll looks at the file now and then even if nothing was notified; nil never
	// does.
	Poll <-chan time.Time
	// Failed is told why the file cannot be read, if it still cannot when Poll looks
	// again: for a moment it may be away while it is replaced. nil: nobody is.
	Failed func(error)
	Log    *slog.Logger
}

// Run calls changed with the new content after every change, until ctx ends. A
// file that cannot be read is no change: the old content stays known, and changed is
// called with whatever there is once it can be read again, if Failed was. Where the
// kernel offers no notifications, because their number per user is used up, only
// Poll looks.
func (w Watcher) Run(ctx context.Context, changed func(content []byte)) {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		w.Log.Warn("the configuration file is only looked at now and then: no notifications of changes", "file", w.Path, "err", err)
		notify = nil
	} else {
		defer func() { _ = notify.Close() }()
	}
	w.run(ctx, notify, changed)
}

// run is Run over notify, which may be nil.
func (w Watcher) run(ctx context.Context, notify *fsnotify.Watcher, changed func(content []byte)) {
	var events <-chan fsnotify.Event
	var failures <-chan error
	if notify != nil {
		events, failures = notify.Events, notify.Errors
	}
	w.follow(notify)
	quiet := time.NewTimer(0) // a change since Last was read counts too
	defer quiet.Stop()
	polled, unread, told := false, false, ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-events:
			quiet.Reset(settle)
		case err := <-failures:
			w.Log.Warn("watch configuration file", "file", w.Path, "err", err)
			quiet.Reset(settle)
		case <-w.Poll:
			polled = true
			quiet.Reset(0)
		case <-quiet.C:
			w.follow(notify)
			content, err := readFile(w.Path, true)
			if err != nil {
				w.Log.Debug("configuration file cannot be read now", "file", w.Path, "err", err)
				if polled && unread && told != err.Error() && w.Failed != nil {
					told = err.Error()
					w.Failed(err)
				}
			} else if told != "" || !bytes.Equal(content, w.Last) {
				w.Last, told = content, ""
				changed(content)
			}
			polled, unread = false, err != nil
		}
	}
}

// follow makes notify watch the directories that decide what Path names. It is
// repeated after each event, because a swapped link leads through others.
func (w Watcher) follow(notify *fsnotify.Watcher) {
	if notify == nil {
		return
	}
	want := directories(w.Path)
	have := notify.WatchList()
	for _, d := range have {
		if !slices.Contains(want, d) {
			_ = notify.Remove(d) // it may be gone
		}
	}
	for _, d := range want {
		// A directory that was deleted and made again has the same name and needs
		// a new watch, so Add is called for known ones too.
		if err := notify.Add(d); err != nil {
			w.Log.Debug("directory cannot be watched now", "directory", d, "err", err)
		}
	}
}

// directories returns the directory of path and, for each symbolic link on the
// way, the directory that the link is in.
func directories(path string) []string {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil
	}
	var out []string
	at, rest := "/", strings.Split(path, "/")
	for links := 0; len(rest) > 0 && links < 40; {
		name := rest[0]
		rest = rest[1:]
		if name == "" || name == "." {
			continue
		}
		next := filepath.Join(at, name)
		target, err := os.Readlink(next)
		if err != nil { // no link, or nothing there
			if len(rest) == 0 {
				out = append(out, at)
			}
			at = next
			continue
		}
		links++
		out = append(out, at)
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
