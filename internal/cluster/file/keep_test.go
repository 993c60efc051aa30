package file

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What is bad keeps what it last gave; everything else goes on.
func TestLastGoodVersionStays(t *testing.T) {
	good := documents(web, api, db)
	for _, c := range []struct {
		name, before, after string
		want                []string
		report              [][]string
	}{
		{
			name: "an invalid object", before: good, after: documents(service("web", "10.62.0.300"), service("api", "10.62.0.22"), db),
			want:   []string{"service default/api 10.62.0.22 :80/TCP", dbFact, webFact},
			report: [][]string{{"a.yaml: document 1 (line 1)", "Service default/web", "spec.clusterIPs[0]", `"10.62.0.300"`, effectKept}},
		},
		{
			name: "a field of the wrong type", before: good, after: documents(strings.Replace(web, "80", "eighty", 1), db),
			want:   []string{dbFact, webFact},
			report: [][]string{{"document 1", "Service default/web: spec.ports.port", "string", effectKept}},
		},
		{
			name: "a document that is no YAML", before: good, after: documents(web, "a: [\n", db),
			want:   []string{apiFact, dbFact, webFact},
			report: [][]string{{"document 2 (line 6)", "not YAML: line 6", effectKept}},
		},
		{
			name: "broken, and another document removed", before: good, after: documents(web, "\tx"),
			want:   []string{apiFact, webFact},
			report: [][]string{{"document 2", "not YAML", effectKept}},
		},
		{
			name: "broken, and documents shifted", before: good, after: documents("}", web, service("api", "10.62.0.22")),
			want:   []string{"service default/api 10.62.0.22 :80/TCP", webFact},
			report: [][]string{{"document 1", "not YAML", effectKept}},
		},
		{
			name: "a bad object at another place", before: good, after: documents(db, strings.Replace(web, "80", "0", 1)),
			want:   []string{dbFact, webFact},
			report: [][]string{{"document 2", "Service default/web", "spec.ports[0].port", effectKept}},
		},
		{
			name: "a document that is no object", before: good, after: documents("just text\n", api, db),
			want:   []string{apiFact, dbFact, webFact},
			report: [][]string{{"document 1", "not an object", effectKept}},
		},
		{
			name: "no kind", before: good, after: documents(strings.Replace(web, "kind: Service", "", 1), api, db),
			want:   []string{apiFact, dbFact, webFact},
			report: [][]string{{"document 1", "kind: missing", effectKept}},
		},
		{
			name: "no name", before: good, after: documents(strings.Replace(web, "{name: web}", "{}", 1), api, db),
			want:   []string{apiFact, dbFact, webFact},
			report: [][]string{{"document 1", "Service: metadata.name: missing", effectKept}},
		},
		{
			name: "never good", before: web, after: documents(web, service("api", "x"), "- y"),
			want:   []string{webFact},
			report: [][]string{{"document 2", "Service default/api", effectUnused}, {"document 3", "not an object", effectUnused}},
		},
		{
			name: "a document removed", before: good, after: documents(web, db),
			want: []string{dbFact, webFact},
		},
		{
			name: "another kind in its place", before: good, after: documents("apiVersion: v1\nkind: Pod\n", api, db),
			want: []string{apiFact, dbFact},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.write("a.yaml", c.before)
			w.load()
			w.mustReport()
			w.write("a.yaml", c.after)
			w.load()
			w.mustHave(c.want...)
			w.mustReport(c.report...)
			if have := w.warnings(); len(have) != len(c.report) {
				t.Errorf("warnings %q, want %d", have, len(c.report))
			}
			w.write("b.yaml", service("other", "10.62.0.9"))
			w.load()
			must(t, os.Remove(filepath.Join(w.dir, "b.yaml")))
			must(t, os.Chtimes(filepath.Join(w.dir, "a.yaml"), time.Now(), time.Now()))
			w.load()
			w.mustHave(c.want...)
			if have := w.warnings(); have != nil {
				t.Errorf("the same content is reported again: %q", have)
			}
			w.write("a.yaml", c.after+"# changed\n")
			w.load()
			w.mustHave(c.want...)
			w.mustReport(c.report...)
			w.write("a.yaml", api)
			w.load()
			w.mustHave(apiFact)
			w.mustReport()
		})
	}
}

func TestLastGoodItemOfAListStays(t *testing.T) {
	w := newWorld(t)
	list := func(items string) { w.write("a.yaml", "apiVersion: v1\nkind: ServiceList\nitems:\n"+items) }
	item := func(name, addr string) string {
		return "- {metadata: {name: " + name + "}, spec: {clusterIP: " + addr + ", ports: [{port: 80}]}}\n"
	}
	list(item("web", "10.62.0.1") + item("api", "10.62.0.2") + item("db", "10.62.0.3"))
	w.load()
	w.mustHave(apiFact, dbFact, webFact)
	list(item("web", "x") + item("api", "10.62.0.22"))
	w.load()
	w.mustHave("service default/api 10.62.0.22 :80/TCP", webFact)
	w.mustReport([]string{"document 1", "Service default/web: items[0].spec.clusterIPs[0]", effectKept})
	list("- 5\n" + item("db", "10.62.0.3"))
	w.load()
	w.mustHave("service default/api 10.62.0.22 :80/TCP", dbFact, webFact)
	w.mustReport([]string{"document 1", "items[0]: not an object", effectKept})
	w.write("a.yaml", "apiVersion: v1\nkind: ServiceList\nitems: {}\n")
	w.load()
	w.mustHave("service default/api 10.62.0.22 :80/TCP", dbFact, webFact)
	w.mustReport([]string{"document 1", "items", effectKept})
	list("")
	w.load()
	w.mustHave()
}

// What a broken document left behind does not come before a newer version, nor does
// it pile up.
func TestLeftoversYield(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", documents(web, api))
	w.load()
	w.write("a.yaml", documents("{\n", service("web", "10.62.0.11")))
	w.load()
	w.mustHave("service default/web 10.62.0.11 :80/TCP")
	w.write("a.yaml", documents("{ #\n", service("web", "x")))
	w.load()
	w.mustHave("service default/web 10.62.0.11 :80/TCP")
	for i := range 10 {
		w.write("a.yaml", documents("{\n", service("web", "10.62.0.12"), strings.Repeat("#", i)+"\n- x"))
		w.load()
		w.mustHave("service default/web 10.62.0.12 :80/TCP")
	}
	list := "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.62.0.1, ports: [{port: 80}]}}\n"
	for i := range 10 {
		w.write("a.yaml", list+"- null"+strings.Repeat("#", i)+"\n")
		w.load()
		w.mustHave(webFact)
	}
	for _, d := range w.source.files[filepath.Join(w.dir, "a.yaml")].documents {
		if n := len(d.objects) + len(d.leftover); n > 1 {
			t.Errorf("document %d holds %d objects", d.number, n)
		}
	}
}

func TestBrokenJSON(t *testing.T) {
	w := newWorld(t)
	object := func(name, addr string) string {
		return `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "` + name + `"}, "spec": {"clusterIP": "` + addr + `", "ports": [{"port": 80}]}}` + "\n"
	}
	w.write("a.json", object("web", "10.62.0.1")+"\n\n"+object("api", "10.62.0.2"))
	w.load()
	w.mustHave(apiFact, webFact)
	w.write("a.json", object("web", "10.62.0.11")+"\n\n"+object("api", "10.62.0.2")[:50])
	w.load()
	w.mustHave(apiFact, "service default/web 10.62.0.11 :80/TCP")
	w.mustReport([]string{"a.json: document 2 (line 4)", "not JSON", effectKept})
	w.write("a.json", object("web", "10.62.0.1"))
	w.load()
	w.mustHave(webFact)
	w.mustReport()
}

func TestUnknownFieldIsAWarning(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", strings.Replace(web, "clusterIP", "externalTraficPolicy: Local, clusterIP", 1))
	w.load()
	w.mustHave(webFact)
	w.mustReport([]string{"document 1", "Service default/web: spec.externalTraficPolicy", "no such field", effectField})
	w.write("a.yaml", web+"spec: {}\n")
	w.load()
	w.mustHave(webFact)
	w.mustReport([]string{"document 1", "not YAML", `key "spec" already set`, effectKept})
}

func TestFirstOfTwoIsInForce(t *testing.T) {
	w := newWorld(t)
	w.write("b.yaml", documents(api, service("web", "10.62.0.9"), service("web", "10.62.0.10"), slice("s", "web", "10.61.1.2")))
	w.load()
	w.mustHave(apiFact, "service default/web 10.62.0.9 :80/TCP", "slice default/s of web 10.61.1.2")
	w.mustReport([]string{"b.yaml: document 3", "Service default/web", "given twice", "b.yaml, document 2, is in force"})
	w.write("a.yaml", documents(web, slice("s", "web", "10.61.1.1")))
	w.load()
	w.mustHave(apiFact, webFact, "slice default/s of web 10.61.1.1")
	w.mustReport([]string{"b.yaml: document 2", "a.yaml, document 1, is in force"}, []string{"b.yaml: document 3", "a.yaml, document 1"},
		[]string{"b.yaml: document 4", "EndpointSlice default/s", "a.yaml, document 2"})
	must(t, os.Remove(filepath.Join(w.dir, "a.yaml")))
	w.load()
	w.mustHave(apiFact, "service default/web 10.62.0.9 :80/TCP", "slice default/s of web 10.61.1.2")
	w.mustReport([]string{"b.yaml: document 3"})
}

func TestEndpointsThatShrinkLoseTheirSlices(t *testing.T) {
	w := newWorld(t)
	head := "apiVersion: v1\nkind: Endpoints\nmetadata: {name: web}\n"
	w.write("a.yaml", head+`subsets: [{addresses: [{ip: 10.0.0.1}, {ip: "2001:db8::1"}], ports: [{port: 1}]}, {addresses: [{ip: 10.0.0.2}], ports: [{port: 2}]}]`)
	w.load()
	w.mustHave("slice default/web/IPv4/0 of web 10.0.0.1", "slice default/web/IPv4/1 of web 10.0.0.2", "slice default/web/IPv6/0 of web 2001:db8::1")
	w.write("a.yaml", head+`subsets: [{addresses: [{ip: 10.0.0.1}], ports: [{port: 1}]}]`)
	w.load()
	w.mustHave("slice default/web/IPv4/0 of web 10.0.0.1")
	w.write("a.yaml", head)
	w.load()
	w.mustHave()
}

func TestUnreadableFiles(t *testing.T) {
	w := newWorld(t)
	outside := filepath.Join(t.TempDir(), "outside.yaml")
	mustWrite(t, outside, web)
	must(t, os.Symlink(outside, filepath.Join(w.dir, "a.yaml")))
	must(t, syscall.Mkfifo(filepath.Join(w.dir, "b.yaml"), 0o644))
	w.write("c.yaml", api)
	w.load()
	w.mustHave(apiFact, webFact)
	w.mustReport([]string{"b.yaml: not a regular file", effectUnused})
	must(t, os.Remove(outside))
	must(t, os.Truncate(filepath.Join(w.dir, "c.yaml"), MaxFileSize+1))
	w.load()
	w.mustHave(apiFact, webFact)
	w.mustReport([]string{"a.yaml: stat: no such file", effectKept}, []string{"b.yaml"}, []string{"c.yaml", "limit", effectKept})
	w.load()
	if have := w.warnings(); len(have) != 3 {
		t.Errorf("%d warnings, want each problem once: %q", len(have), have)
	}
	mustWrite(t, outside, db)
	w.write("c.yaml", api)
	must(t, os.Remove(filepath.Join(w.dir, "b.yaml")))
	w.load()
	w.mustHave(apiFact, dbFact)
	w.mustReport()
}

func TestEmptiedFile(t *testing.T) {
	w := newWorld(t)
	w.write("a.yaml", web)
	w.load()
	w.write("a.yaml", "")
	w.load()
	w.mustHave(webFact)
	if d := w.source.pause(nil, false); d != emptySettle {
		t.Errorf("the next look is in %v, want %v", d, emptySettle)
	}
	w.advance(emptySettle - time.Millisecond)
	w.load()
	w.mustHave(webFact)
	w.write("a.yaml", api)
	w.load()
	w.mustHave(apiFact)
	w.write("a.yaml", "")
	w.load()
	w.mustHave(apiFact)
	w.advance(emptySettle)
	w.load()
	w.mustHave()
	if d := w.source.pause(nil, false); d != time.Hour {
		t.Errorf("the next look is in %v, want the poll's %v", d, time.Hour)
	}
}

// A file that did not change since well before it was read is not read again; one
// that changed at about that time is.
func TestUnchangedFilesAreNotReadAgain(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(w.dir, "a.yaml")
	at := w.clock().Add(-time.Hour)
	w.write("a.yaml", web)
	must(t, os.Chtimes(path, at, at))
	w.load()
	overwrite := func(text string, at time.Time) {
		t.Helper()
		must(t, os.WriteFile(path, []byte(text), 0o644))
		must(t, os.Chtimes(path, at, at))
		w.load()
	}
	same := strings.Replace(web, "10.62.0.1", "10.62.0.7", 1)
	overwrite(same, at)
	w.mustHave(webFact)
	at = w.clock()
	overwrite(same, at)
	w.mustHave("service default/web 10.62.0.7 :80/TCP")
	overwrite(web, at)
	w.mustHave(webFact)
}
