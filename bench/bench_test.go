package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/svcproxy/svcproxy/internal/lab"
)

func TestParseCPU(t *testing.T) {
	// 14 utime, 15 stime, 16 cutime, 17 cstime; the name holds a parenthesis.
	stat := "42 (iptables) x) S 1 42 42 0 -1 4194560 100 200 0 0 150 50 30 20 20 0 7 0 1000 1 2"
	have, err := parseCPU(stat)
	if err != nil || have != 2.5 {
		t.Errorf("%v s, %v, want 2.5", have, err)
	}
	for _, bad := range []string{"", "42 (x", "42 (x) S 1 2 3", "42 (x) S 1 42 42 0 -1 4194560 100 200 0 0 a 50 30 20 20"} {
		if _, err := parseCPU(bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
	own, err := cpuOf(os.Getpid())
	if err != nil || own < 0 {
		t.Errorf("own CPU %v, %v", own, err)
	}
}

func TestParseMemory(t *testing.T) {
	rss, peak := parseMemory("Name:\tx\nVmHWM:\t    4096 kB\nVmRSS:\t    2048 kB\n")
	if rss != 2 || peak != 4 {
		t.Errorf("%v and %v MiB, want 2 and 4", rss, peak)
	}
	rss, peak, err := memoryOf(os.Getpid())
	if err != nil || rss <= 0 || peak < rss {
		t.Errorf("own memory %v, %v, %v", rss, peak, err)
	}
}

func TestQuantileAndMedian(t *testing.T) {
	d := []float64{5, 1, 4, 2, 3, 10, 9, 8, 7, 6}
	if v := quantile(d, 0.99); v != 10 {
		t.Errorf("p99 %v", v)
	}
	if v := quantile(d, 0); v != 1 {
		t.Errorf("p0 %v", v)
	}
	if d[0] != 5 {
		t.Error("the input was sorted")
	}
	var results []result
	for _, v := range []float64{4, 1, 3, 2} {
		results = append(results, result{Name: "x", Services: 16, RSS: v})
	}
	results = append(results, result{Name: "y", Services: 16, RSS: 100}, result{Name: "x", Services: 17, RSS: 100})
	rss := func(r result) float64 { return r.RSS }
	if v := median(results, "x", 16, rss); v != 2.5 {
		t.Errorf("median of four %v", v)
	}
	if v := median(results[:3], "x", 16, rss); v != 3 {
		t.Errorf("median of three %v", v)
	}
}

func TestTable(t *testing.T) {
	p := &plan{subjects: []subject{{name: "own"}, {name: "other"}}, rounds: 1, services: []int{100}, endpoints: 10, mode: "iptables", iptables: "legacy"}
	have := p.table([]result{
		{Name: "own", Services: 100, FullSync: 1.5, ConnectRate: 9000},
		{Name: "other", Services: 100, FullSync: 3, ConnectRate: 4500.4},
	})
	lines := strings.Split(have, "\n")
	want := []string{
		"iptables mode (iptables-legacy), 10 endpoints each, medians of 1 rounds",
		"",
		"| Services | measure | own | other | own / other |",
		"|---|---|---|---|---|",
		"| 100 | full sync, s | 1.50 | 3.00 | 0.50 |",
	}
	if diff := cmp.Diff(want, lines[:len(want)]); diff != "" {
		t.Errorf("table (-want +have):\n%s", diff)
	}
	for _, want := range []string{"| 100 | connections per s (more is better) | 9000 | 4500 | 2.00 |\n", "| 100 | failed connections | 0 | 0 | |\n"} {
		if !strings.Contains(have, want) {
			t.Errorf("no line %q in\n%s", want, have)
		}
	}
}

func TestArguments(t *testing.T) {
	ok := []string{"compare", "--subject", "a=/bin/true {CONFIG}", "--services", "16,1000"}
	p, err := parse(context.Background(), ok[1:], &bytes.Buffer{})
	if err != nil || len(p.services) != 2 || p.services[1] != 1000 || p.subjects[0].args[1] != "{CONFIG}" || p.rounds != 3 {
		t.Errorf("%+v, %v", p, err)
	}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "compare"},
		{[]string{"race"}, "compare"},
		{[]string{"compare", "--services", "3"}, `--services "3"`},
		{[]string{"compare", "--rounds", "0"}, "--rounds"},
		{[]string{"compare", "--subject", "a=/no/such/program"}, "program a"},
		{[]string{"compare", "--subject", "a= "}, "NAME=COMMAND"},
		{[]string{"compare", "more"}, `"more"`},
	} {
		err := run(context.Background(), tc.args, &bytes.Buffer{}, &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: error %v, want one with %s", tc.args, err, tc.want)
		}
	}
}

// mustWorld makes the network, or skips where nobody can.
func mustWorld(t *testing.T) *world {
	t.Helper()
	if err := lab.Supported(); err != nil {
		t.Skipf("needs root: %v", err)
	}
	w, err := newWorld()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// TestSyntheticCluster: the probes are spread over the cluster in the order in
// which a proxy lists it, and changes change it.
func TestSyntheticCluster(t *testing.T) {
	w := mustWorld(t)
	c := &synthetic{server: w.server, size: 100, endpoints: 3}
	if err := c.fill(); err != nil {
		t.Fatal(err)
	}
	for k, name := range map[int]string{0: "svc-000000-probe", 15: "svc-000090-probe"} {
		if c.probeName(k) != name || w.server.Get("Service", namespace, name) == nil || w.server.Get("EndpointSlice", namespace, name+"-x7k2p") == nil {
			t.Errorf("probe %d is not %s", k, name)
		}
	}
	if w.server.Get("Node", "", nodeName) == nil || w.server.Get("Service", namespace, "svc-000099") == nil {
		t.Error("node or last Service is missing")
	}
	for i, want := range []string{"b", "a", "b"} {
		if name, err := c.moveProbe(3); err != nil || name != want {
			t.Errorf("move %d leads to %s, %v, want %s", i+1, name, err, want)
		}
	}
	before := w.server.ResourceVersion()
	if err := c.replace(5); err != nil || w.server.ResourceVersion() != before+5 {
		t.Errorf("5 changes moved the version by %d, %v", w.server.ResourceVersion()-before, err)
	}
}

// TestWorld runs a program that is no proxy: the probe is not answered, and the
// error says what the program said.
func TestWorld(t *testing.T) {
	w := mustWorld(t)
	script := filepath.Join(t.TempDir(), "program")
	text := "#!/bin/sh\necho config $1 at $2\necho iptables $(readlink -f \"$(command -v iptables)\")\ngrep -q 'mode: iptables' $1 || exit 3\nexec sleep 1000\n"
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	pr, err := w.start(subject{"idle", []string{script, "{CONFIG}", "{NODE}"}}, &plan{mode: "iptables", iptables: "legacy"})
	if err != nil {
		t.Fatal(err)
	}
	defer pr.stop()
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	err = w.await(ctx, pr, probeAddr(0), "a", patience)
	if err == nil || !strings.Contains(err.Error(), "was not answered") || !strings.Contains(err.Error(), "at node1") || !strings.Contains(err.Error(), "xtables-legacy-multi") {
		t.Errorf("error %v", err)
	}
}

// TestConnections: what is measured reaches the pods.
func TestConnections(t *testing.T) {
	w := mustWorld(t)
	// A Service's part is played by the pod, on the Service's port.
	l, err := w.lab.Host("a").Listen(podA + ":80")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("a\n"))
			_ = c.Close()
		}
	}()
	times, failed, err := w.timeConnects(context.Background(), podA, 2*batch)
	if err != nil || len(times) != 2*batch || failed != 0 {
		t.Errorf("%d connects, %d failures, %v", len(times), failed, err)
	}
	rate, failed, err := w.countConnects(context.Background(), podA, 2, 100*time.Millisecond)
	if err != nil || rate == 0 || failed != 0 {
		t.Errorf("%v connections per second, %d failures, %v", rate, failed, err)
	}
	if _, failed, err = w.timeConnects(context.Background(), podB, batch); err != nil || failed != batch {
		t.Errorf("a closed port: %d failures, %v", failed, err)
	}
}
