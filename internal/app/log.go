package app

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"path"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/svcproxy/svcproxy/internal/config"
)

// logControl is the log of a process and what may change about it while it runs:
// how much is logged.
type logControl struct {
	*slog.Logger
	threshold *atomic.Pointer[threshold]
}

// threshold says which records are logged. Verbosity N of -v and --vmodule, and of
// client-go's V(N), is the level -N: [slog.LevelDebug] shows from -v=4 on.
type threshold struct {
	level    slog.Level
	patterns []pattern
	lowest   slog.Level // of level and all patterns
}

// pattern is one entry of --vmodule.
type pattern struct {
	glob  string // of a file's name without .go; with a slash, of the end of its path
	level slog.Level
}

// newLog returns a log that writes to w.
func newLog(w io.Writer, c config.Log) logControl {
	l := logControl{threshold: &atomic.Pointer[threshold]{}}
	l.setVerbosity(c)
	var h slog.Handler
	options := &slog.HandlerOptions{Level: slog.Level(-1 << 20), ReplaceAttr: readable} // the threshold decides
	if c.JSON {
		h = slog.NewJSONHandler(w, options)
	} else {
		h = slog.NewTextHandler(w, options)
	}
	l.Logger = slog.New(&verbosityHandler{h, l.threshold})
	return l
}

// quiet is for commands whose output is their answer: they log warnings only,
// unless -v asks for more.
func quiet(c config.Log) config.Log {
	c.Verbosity -= int(slog.LevelWarn - slog.LevelInfo)
	return c
}

// setVerbosity takes effect at once.
func (l logControl) setVerbosity(c config.Log) {
	t := &threshold{level: slog.Level(-c.Verbosity)}
	t.lowest = t.level
	for _, m := range c.VModule {
		p := pattern{glob: m.FilePattern, level: slog.Level(-int(m.Verbosity))}
		t.patterns = append(t.patterns, p)
		t.lowest = min(t.lowest, p.level)
	}
	l.threshold.Store(t)
}

// bridgeKlog sends what client-go logs through klog to the log. klog is one per
// process, so this is the program's to call.
func (l logControl) bridgeKlog(verbosity int) error {
	klog.SetSlogLogger(l.Logger)
	return setKlogVerbosity(verbosity)
}

func setKlogVerbosity(verbosity int) error {
	var fs flag.FlagSet
	klog.InitFlags(&fs)
	if err := fs.Set("v", fmt.Sprint(verbosity)); err != nil {
		return fmt.Errorf("set klog's verbosity: %w", err)
	}
	return nil
}

// readable writes levels between the named ones as V(N), and values in JSON as in
// text: what has a text form by that, durations with their unit.
func readable(_ []string, a slog.Attr) slog.Attr {
	switch v := a.Value.Any().(type) {
	case slog.Level:
		if a.Key == slog.LevelKey && v < slog.LevelInfo && v != slog.LevelDebug {
			return slog.String(a.Key, fmt.Sprintf("V(%d)", -v))
		}
	case time.Time: // slog's own form keeps its precision
	case fmt.Stringer:
		if p := reflect.ValueOf(v); p.Kind() != reflect.Pointer || !p.IsNil() {
			return slog.String(a.Key, v.String())
		}
	}
	return a
}

// verbosityHandler drops what is below the threshold.
type verbosityHandler struct {
	slog.Handler
	threshold *atomic.Pointer[threshold]
}

func (h *verbosityHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= h.threshold.Load().lowest
}

func (h *verbosityHandler) Handle(ctx context.Context, r slog.Record) error {
	t := h.threshold.Load()
	if len(t.patterns) > 0 && r.Level < slog.LevelInfo && r.Level < t.of(r.PC) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

func (h *verbosityHandler) WithAttrs(a []slog.Attr) slog.Handler {
	return &verbosityHandler{h.Handler.WithAttrs(a), h.threshold}
}

func (h *verbosityHandler) WithGroup(name string) slog.Handler {
	return &verbosityHandler{h.Handler.WithGroup(name), h.threshold}
}

// of returns the level for the source file that pc is in.
func (t *threshold) of(pc uintptr) slog.Level {
	frame, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	file := strings.TrimSuffix(frame.File, ".go")
	for _, p := range t.patterns {
		name := path.Base(file)
		if n := strings.Count(p.glob, "/"); n > 0 {
			parts := strings.Split(file, "/")
			name = strings.Join(parts[max(0, len(parts)-n-1):], "/")
		}
		if ok, err := path.Match(p.glob, name); ok && err == nil {
			return p.level
		}
	}
	return t.level
}
