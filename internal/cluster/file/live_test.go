package file

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestFollowsFiles(t *testing.T) {
	w := newWorld(t)
	w.run()
	w.await()
	w.write("a.yaml", web)
	w.await(webFact)
	w.write("a.yaml", documents(web, api))
	w.await(apiFact, webFact)
	w.write("a.yaml", documents(web, "]"))
	w.write("b.yaml", db)
	w.await(apiFact, dbFact, webFact)
	mustWrite(t, filepath.Join(w.dir, ".new"), service("db", "10.62.0.33"))
	must(t, os.Rename(filepath.Join(w.dir, ".new"), filepath.Join(w.dir, "b.yaml")))
	w.await(apiFact, "service default/db 10.62.0.33 :80/TCP", webFact)
	must(t, os.Rename(filepath.Join(w.dir, "b.yaml"), filepath.Join(w.dir, "b.bak")))
	w.await(apiFact, webFact)
	must(t, os.Remove(filepath.Join(w.dir, "a.yaml")))
	w.await()
}

// mount writes files as the kubelet does for a ConfigMap: a directory with a new
// name, and one link that is turned to it.
func mount(t *testing.T, dir, version string, files map[string]string) {
	t.Helper()
	data := filepath.Join(dir, "..2026_"+version)
	must(t, os.Mkdir(data, 0o755))
	for name, text := range files {
		mustWrite(t, filepath.Join(data, name), text)
	}
	old, _ := os.Readlink(filepath.Join(dir, "..data"))
	must(t, os.Symlink(filepath.Base(data), filepath.Join(dir, "..data_tmp")))
	must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	for name := range files {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		if _, kept := files[e.Name()]; !kept && !strings.HasPrefix(e.Name(), "..") {
			must(t, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	if old != "" {
		must(t, os.RemoveAll(filepath.Join(dir, old)))
	}
}

func TestFollowsAConfigMap(t *testing.T) {
	w := newWorld(t)
	mount(t, w.dir, "1", map[string]string{"a.yaml": web, "b.yaml": api})
	w.run()
	w.await(apiFact, webFact)
	mount(t, w.dir, "2", map[string]string{"a.yaml": service("web", "10.62.0.7"), "b.yaml": api})
	w.await(apiFact, "service default/web 10.62.0.7 :80/TCP")
	mount(t, w.dir, "3", map[string]string{"b.yaml": api, "c.yaml": db})
	w.await(apiFact, dbFact)
	mount(t, w.dir, "4", map[string]string{"b.yaml": "{", "c.yaml": web})
	w.await(apiFact, webFact)
}

func TestFollowsADirectoryThatIsMadeAgain(t *testing.T) {
	w := newWorldAt(t, filepath.Join(t.TempDir(), "manifests"))
	w.run()
	must(t, os.Mkdir(w.dir, 0o755))
	w.write("a.yaml", web)
	w.await(webFact)
	must(t, os.RemoveAll(w.dir))
	must(t, os.Mkdir(w.dir, 0o755))
	w.write("a.yaml", api)
	w.await(apiFact)
	w.write("a.yaml", db)
	w.await(dbFact)
	must(t, os.Rename(w.dir, w.dir+".old"))
	must(t, os.Mkdir(w.dir, 0o755))
	w.write("b.yaml", web)
	w.await(webFact)
	w.write("b.yaml", api)
	w.await(apiFact)
}

func TestFollowsADirectoryThatIsALink(t *testing.T) {
	base := t.TempDir()
	for _, version := range []string{"1", "2"} {
		must(t, os.Mkdir(filepath.Join(base, version), 0o755))
	}
	mustWrite(t, filepath.Join(base, "1", "a.yaml"), web)
	mustWrite(t, filepath.Join(base, "2", "a.yaml"), api)
	link := filepath.Join(base, "current")
	must(t, os.Symlink("1", link))
	w := newWorldAt(t, link)
	w.run()
	w.await(webFact)
	must(t, os.Symlink("2", link+".new"))
	must(t, os.Rename(link+".new", link))
	w.await(apiFact)
	w.write("a.yaml", db)
	w.await(dbFact)
	mustWrite(t, filepath.Join(base, "1", "a.yaml"), web)
	w.write("b.yaml", api)
	w.await(apiFact, dbFact)
}

func TestFollowsLinkedFiles(t *testing.T) {
	w := newWorld(t)
	beside, elsewhere := filepath.Join(filepath.Dir(w.dir), "beside.yaml"), filepath.Join(t.TempDir(), "elsewhere.yaml")
	mustWrite(t, beside, web)
	mustWrite(t, elsewhere, api)
	must(t, os.Symlink(beside, filepath.Join(w.dir, "a.yaml")))
	must(t, os.Symlink(elsewhere, filepath.Join(w.dir, "b.yaml")))
	w.run()
	w.await(apiFact, webFact)
	mustWrite(t, elsewhere, service("api", "10.62.0.22"))
	w.await("service default/api 10.62.0.22 :80/TCP", webFact)
	mustWrite(t, beside, service("web", "10.62.0.11"))
	w.await("service default/api 10.62.0.22 :80/TCP", "service default/web 10.62.0.11 :80/TCP")
}

// Without notifications the poll finds everything.
func TestPollsWithoutNotifications(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", web)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	blind := &watcher{dir: w.dir, log: slog.New(slog.DiscardHandler)}
	look := func() {
		t.Helper()
		blind.begin()
		w.load()
		blind.end()
		if !blind.blind {
			t.Error("a watcher without notifications says it sees the directory")
		}
		if !blind.wait(ctx, time.Hour, time.Millisecond) {
			t.Error("the poll does not come")
		}
	}
	look()
	w.mustHave(webFact)
	w.write("a.yaml", api)
	look()
	w.mustHave(apiFact)
	if d := w.source.pause(nil, true); d != retryAfter {
		t.Errorf("the poll comes after %v, want %v", d, retryAfter)
	}
	cancel()
	if blind.wait(ctx, time.Hour, time.Hour) {
		t.Error("a look is due although the context has ended")
	}
}

// A writer that never pauses does not lose its last word.
func TestNothingIsLostUnderLoad(t *testing.T) {
	w := newWorld(t)
	w.run()
	const rounds = 500
	for i := range rounds {
		w.write(fmt.Sprintf("%d.yaml", i%3), service(fmt.Sprintf("s%d", i%3), fmt.Sprintf("10.62.%d.%d", i/200, i%200+1)))
		if i%7 == 0 {
			w.write("broken.yaml", "{")
		}
	}
	w.await("service default/s0 10.62.2.99 :80/TCP", "service default/s1 10.62.2.100 :80/TCP", "service default/s2 10.62.2.98 :80/TCP")
}
