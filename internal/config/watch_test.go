package config

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startWatch runs a Watcher on path and returns what it reports.
func startWatch(t *testing.T, path string) <-chan string {
	t.Helper()
	last, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	seen, done := make(chan string, 16), make(chan struct{})
	w := Watcher{Path: path, Last: last, Log: slog.New(slog.DiscardHandler)}
	go func() {
		defer close(done)
		w.Run(ctx, func(b []byte) { seen <- string(b) })
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return seen
}

func mustWrite(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// mustLink makes name a link to target, atomically.
func mustLink(t *testing.T, target, name string) {
	t.Helper()
	if err := os.Symlink(target, name+".new"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		t.Fatal(err)
	}
}

// awaitContent waits until the watcher reports want; what it saw half way may come
// first.
func awaitContent(t *testing.T, seen <-chan string, want string) {
	t.Helper()
	for {
		select {
		case have := <-seen:
			if have == want {
				return
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("content %q was not reported", want)
		}
	}
}

func TestWatcher(t *testing.T) {
	tests := []struct {
		name  string
		setUp func(t *testing.T, dir string) (path string)
		do    func(t *testing.T, dir string)
	}{
		{"written in place",
			func(t *testing.T, dir string) string {
				mustWrite(t, dir+"/config", "one")
				return dir + "/config"
			},
			func(t *testing.T, dir string) { mustWrite(t, dir+"/config", "two") }},
		{"replaced by rename",
			func(t *testing.T, dir string) string {
				mustWrite(t, dir+"/config", "one")
				return dir + "/config"
			},
			func(t *testing.T, dir string) {
				mustWrite(t, dir+"/config.new", "two")
				if err := os.Rename(dir+"/config.new", dir+"/config"); err != nil {
					t.Fatal(err)
				}
			}},
		{"ConfigMap: the file is a link into a swapped directory",
			func(t *testing.T, dir string) string {
				mustWrite(t, dir+"/..1/config", "one")
				mustLink(t, "..1", dir+"/..data")
				mustLink(t, "..data/config", dir+"/config")
				return dir + "/config"
			},
			func(t *testing.T, dir string) {
				mustWrite(t, dir+"/..2/config", "two")
				mustLink(t, "..2", dir+"/..data")
			}},
		{"the directory is a swapped link",
			func(t *testing.T, dir string) string {
				mustWrite(t, dir+"/v1/config", "one")
				mustLink(t, dir+"/v1", dir+"/current")
				return dir + "/current/config"
			},
			func(t *testing.T, dir string) {
				mustWrite(t, dir+"/v2/config", "two")
				mustLink(t, dir+"/v2", dir+"/current")
			}},
		{"the directory is deleted and made again",
			func(t *testing.T, dir string) string {
				mustWrite(t, dir+"/etc/config", "one")
				mustLink(t, dir+"/etc", dir+"/link")
				return dir + "/link/config"
			},
			func(t *testing.T, dir string) {
				if err := os.RemoveAll(dir + "/etc"); err != nil {
					t.Fatal(err)
				}
				mustWrite(t, dir+"/etc.new/config", "two")
				mustLink(t, dir+"/etc.new", dir+"/link")
			}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			seen := startWatch(t, tt.setUp(t, dir))
			tt.do(t, dir)
			awaitContent(t, seen, "two")
		})
	}
}

// A second swap leads through directories that did not exist when the watch began.
func TestWatcherFollowsRepeatedSwaps(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/..1/config", "content 1")
	mustLink(t, "..1", dir+"/..data")
	mustLink(t, "..data/config", dir+"/config")
	seen := startWatch(t, dir+"/config")
	for _, n := range []string{"2", "3", "4"} {
		mustWrite(t, dir+"/.."+n+"/config", "content "+n)
		mustLink(t, ".."+n, dir+"/..data")
		awaitContent(t, seen, "content "+n)
	}
	mustWrite(t, dir+"/..4/config", "content 5")
	awaitContent(t, seen, "content 5")
}

func TestWatcherReportsAChangeFromBeforeItRan(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	mustWrite(t, path, "new")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	seen := make(chan string, 1)
	w := Watcher{Path: path, Last: []byte("old"), Log: slog.New(slog.DiscardHandler)}
	go w.Run(ctx, func(b []byte) { seen <- string(b) })
	awaitContent(t, seen, "new")
}

// Without any notification a look now and then finds the change.
func TestWatcherPolls(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir+"/config", "one")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	poll, seen := make(chan time.Time), make(chan string, 16)
	w := Watcher{Path: dir + "/config", Last: []byte("one"), Poll: poll, Log: slog.New(slog.DiscardHandler)}
	go w.run(ctx, nil, func(b []byte) { seen <- string(b) })
	poll <- time.Time{}
	mustWrite(t, dir+"/config", "two")
	poll <- time.Time{}
	awaitContent(t, seen, "two")
}

// A file that is away for a moment is no fault; one that stays unreadable is told once,
// and again when it is back, even with the content of before.
func TestWatcherTellsWhatStaysUnreadable(t *testing.T) {
	dir := t.TempDir()
	path := dir + "/config"
	mustWrite(t, path, "one")
	poll, seen, failed := make(chan time.Time), make(chan string, 16), make(chan error, 16)
	w := Watcher{Path: path, Last: []byte("one"), Poll: poll, Failed: func(err error) { failed <- err }, Log: slog.New(slog.DiscardHandler)}
	go w.run(t.Context(), nil, func(b []byte) { seen <- string(b) })
	look := func() {
		poll <- time.Time{}
		poll <- time.Time{} // the one before may be taken and not be done yet
	}
	for name, make := range map[string]func(){
		"missing":   func() {},
		"directory": func() { mustWrite(t, path+"/config", "") },
		"pipe": func() {
			if err := syscall.Mkfifo(path, 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"too large": func() { mustWrite(t, path, strings.Repeat("#", MaxFileSize+1)) },
	} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		make()
		for told := false; !told; {
			look()
			select {
			case err := <-failed:
				told = err != nil
			case <-seen: // what the file was before
			default:
			}
		}
		look()
		for len(failed) > 0 { // it may have been told as missing before
			if err := <-failed; err == nil {
				t.Errorf("%s: failed without an error", name)
			}
		}
		look()
		look()
		if len(failed) > 0 {
			t.Errorf("%s: told again: %v", name, <-failed)
		}
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		mustWrite(t, path+".new", "one")
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
		look()
		awaitContent(t, seen, "one")
	}
}

func TestReadFile(t *testing.T) {
	path := t.TempDir() + "/config"
	mustWrite(t, path, strings.Repeat("#", MaxFileSize))
	if b, err := ReadFile(path); err != nil || len(b) != MaxFileSize {
		t.Errorf("a file of the largest size: %d bytes, %v", len(b), err)
	}
	mustWrite(t, path, strings.Repeat("#", MaxFileSize+1))
	for _, path := range []string{path, "/dev/zero"} {
		if _, err := ReadFile(path); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "1048576") {
			t.Errorf("%s: have %v", path, err)
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	go func() {
		_, _ = w.WriteString("by a pipe")
		_ = w.Close()
	}()
	if b, err := ReadFile(fmt.Sprintf("/proc/self/fd/%d", r.Fd())); err != nil || string(b) != "by a pipe" {
		t.Errorf("a pipe: %q, %v", b, err)
	}
}
