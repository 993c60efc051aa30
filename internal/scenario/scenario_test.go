package scenario

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/scenario/subject"
)

var (
	modeFlag = flag.String("mode", "", "modes to run in, joined by commas (default: all that the program has)")
	feedFlag = flag.String("feed", "files", "how objects reach the program: files or api")

	programFlag = flag.String("program", "", "the program, built (default: build it)")
	widestFlag  = flag.Bool("widest", false, "of a scenario's families run the last only, which is dual if that is among them")
)

// TestMain runs several scenarios on each processor: they wait most of the time.
func TestMain(m *testing.M) {
	flag.Parse()
	if p := flag.Lookup("test.parallel"); p.Value.String() == fmt.Sprint(runtime.GOMAXPROCS(0)) {
		if err := p.Value.Set(fmt.Sprint(3 * runtime.GOMAXPROCS(0))); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

func mustFind(t *testing.T) []*Scenario {
	t.Helper()
	all, err := Find([]string{"../../testdata/scenarios"})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func report(t *testing.T, r Result) {
	t.Helper()
	switch r.Verdict {
	case Skipped:
		t.Skip(r.Detail)
	case Failed:
		t.Errorf("%s\n%s", r.Detail, r.Log)
	}
}

// TestPlan evaluates every scenario's flows on the plan alone.
func TestPlan(t *testing.T) {
	r := &Runner{Subject: subject.Subject{Name: "svcproxy"}}
	for _, c := range Cases(mustFind(t), []string{PlanOnly}) {
		t.Run(strings.ReplaceAll(c.String(), "/", "-"), func(t *testing.T) {
			t.Parallel()
			report(t, r.Run(c))
		})
	}
}

// TestKernel runs every scenario in every mode that the program has.
func TestKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	program, modes := mustBuild(t)
	for _, m := range modes {
		t.Run(m.Name, func(t *testing.T) {
			t.Parallel()
			if !m.Supported {
				t.Skipf("mode %s: %s", m.Name, m.Missing)
			}
			for _, c := range Cases(mustFind(t), []string{m.Name}) {
				if *widestFlag && c.Families != c.Scenario.Families[len(c.Scenario.Families)-1] {
					continue
				}
				name := c.Name
				if f := c.Families.String(); f != "" {
					name += "-" + f
				}
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					fromAPI := *feedFlag == "api" || c.API
					report(t, (&Runner{Subject: subject.Svcproxy(program, fromAPI), FromAPI: fromAPI}).Run(c))
				})
			}
		})
	}
}

// mustBuild builds the program, unless -program names one, and asks it for its modes,
// as far as -mode asks for them.
func mustBuild(t *testing.T) (string, []subject.Mode) {
	t.Helper()
	program := *programFlag
	if program == "" {
		var err error
		if program, err = subject.Build(context.Background(), t.TempDir()); err != nil {
			t.Fatal(err)
		}
	}
	known, err := subject.Modes(context.Background(), program)
	if err != nil {
		t.Fatal(err)
	}
	var asked []string
	if *modeFlag != "" {
		asked = strings.Split(*modeFlag, ",")
	}
	var out []subject.Mode
	for _, m := range known {
		if slices.Contains(asked, m.Name) || asked == nil && m.Built {
			out = append(out, m)
		}
	}
	if len(out) == 0 {
		t.Fatalf("the program has none of the modes asked for; it knows %v", known)
	}
	return program, out
}

// mustScenario writes a scenario of its own for a test of the runner.
func mustScenario(t *testing.T, text string) *Scenario {
	t.Helper()
	path := filepath.Join(t.TempDir(), "test.txtar")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := Parse(path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const web = `
-- web.yaml --
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {type: NodePort, clusterIP: 10.62.0.20, ports: [{name: http, port: 80, targetPort: 8080, nodePort: 31080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.61.1.5], nodeName: alder, conditions: {ready: true}}
- {addresses: [10.61.2.7], nodeName: birch, conditions: {ready: true}}
`

// TestWrongExpectationsFail holds the runner to account: what is not so must not
// pass, on the plan as in the kernel.
func TestWrongExpectationsFail(t *testing.T) {
	setup := "pod web-1 10.61.1.5 tcp:8080\nremote web-2 10.61.2.7 tcp:8080\nclient laptop 198.51.100.7\nstart\napply web.yaml\nsync\n"
	tests := []struct{ line, want string }{
		{"flow pod:probe tcp 10.62.0.20:80 -> web-1", "web-2"},
		{"flow pod:probe tcp 10.62.0.20:80 -> web-1|web-2|laptop", "web-"},
		{"flow pod:probe tcp 10.62.0.20:80 -> refused", "want refused"},
		{"flow pod:probe tcp 10.62.0.20:80 -> dropped", "want dropped"},
		{"flow pod:probe tcp 10.62.0.20:80 -> web-1|web-2 src=node", "src=node"},
		{"flow laptop tcp node:31080 -> web-1|web-2 src=client", "src=client"},
		{"flow sticky pod:probe tcp 10.62.0.20:80 -> web-1|web-2", "same server|one server"},
		{"flow n=200 pod:probe tcp 10.62.0.20:80 -> web-1|web-2 share=web-1:0.9,web-2:0.1~0.2", "0.900"},
		{"flow laptop tcp node:31081 -> web-1|web-2", "refused"},
		{"! flow pod:probe tcp 10.62.0.20:80 -> web-1|web-2", "must fail"},
		{"! flow nobody tcp 10.62.0.20:80 -> web-1", `no host "nobody"`},
		{"flow pod:probe tcp 10.62.0.20 -> web-1", "ADDR:PORT"},
		{"flwo pod:probe tcp 10.62.0.20:80 -> web-1", "unknown command"},
		{"flow colour=red pod:probe tcp 10.62.0.20:80 -> web-1", `"colour=red"`},
		{"flow sticky=yes pod:probe tcp 10.62.0.20:80 -> web-1", `"sticky=yes"`},
		{"[mode:iptable] flow pod:probe tcp 10.62.0.20:80 -> web-1", "mode:iptable"},
		{"pod other 10.61.1.9 tcp:0", "tcp:0"},
		{"node zone", `"zone"`},
		{"restart mode=fast", `"fast"`},
		{"unlisten web-1 tcp:81", "does not listen"},
	}
	inKernel := []struct{ line, want string }{
		{"hold keep pod:probe tcp 10.62.0.20:81", "refused"},
		{"hold keep pod:probe tcp 10.62.0.20:80 every=0s", "every=0s"},
		{"held keep -> web-1", `"keep"`},
		{"load requests errors=0", `"requests"`},
		{"load requests laptop tcp node:31080 rate=0", "rate=0"},
		{"node name=elm", "runs"},
		{"node addr=192.0.2.21", "addr add"},
		{"stop now", "-kill"},
		{"conntrack tcp dst=10.62.0.20:80 count=many", "count=many"},
		{"metric up ~ 1", `"~"`},
		{"log '['", "missing closing"},
		{"api silence", "[feed:api]"},
	}
	runners := map[string]*Runner{PlanOnly: {Subject: subject.Subject{Name: "svcproxy"}}}
	if os.Geteuid() == 0 {
		program, modes := mustBuild(t)
		runners[modes[0].Name] = &Runner{Subject: subject.Svcproxy(program, false)}
	}
	for mode, r := range runners {
		lines := tests
		if mode != PlanOnly {
			lines = slices.Concat(tests, inKernel)
		}
		for _, tt := range lines {
			t.Run(mode+" "+tt.line, func(t *testing.T) {
				t.Parallel()
				s := mustScenario(t, setup+tt.line+"\n"+web)
				res := r.Run(Case{Scenario: s, Mode: mode})
				hit := slices.ContainsFunc(strings.Split(tt.want, "|"), func(w string) bool { return strings.Contains(res.Detail, w) })
				if res.Verdict != Failed || !hit {
					t.Errorf("%s: %s, want a failure that says %q", res.Verdict, res.Detail, tt.want)
				}
				if res.Verdict == Failed && !strings.HasPrefix(res.Detail, "test.txtar:7: ") {
					t.Errorf("detail %q does not begin with file and line", res.Detail)
				}
			})
		}
	}
}

func TestScript(t *testing.T) {
	s := mustScenario(t, `# families: 6
pod web 10.61.1.5 tcp:80
[mode:x] ! flow web tcp 10.62.0.20:80 -> dropped
stop -kill
[!mode:x] in node ip addr
stdout 10.61.1.0/24
-- a --
10.61.1.5
`)
	tests := []struct {
		plan bool
		want string
	}{
		{false, `# families: 6
pod web 2001:db8:61:1::5 tcp:80
[mode:x] ! flow web tcp [2001:db8:62::20]:80 -> dropped
stop-proxy -kill
[!mode:x] in node ip addr
stdout 2001:db8:61:1::/64
`},
		{true, `# families: 6
pod web 2001:db8:61:1::5 tcp:80
[mode:x] ! flow web tcp [2001:db8:62::20]:80 -> dropped
# stop-proxy -kill
# [!mode:x] in node ip addr
# stdout 2001:db8:61:1::/64
`},
	}
	for _, tt := range tests {
		if have := string(s.script(s.Families[0], tt.plan).Comment); have != tt.want {
			t.Errorf("plan %t: have\n%swant\n%s", tt.plan, have, tt.want)
		}
	}
}

// TestOrderOfCommands: those that need the network make it, whichever comes first.
func TestOrderOfCommands(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	program, modes := mustBuild(t)
	for _, script := range []string{
		"restart\nsync\n", "api stop\nstart\napi start\nsync\n", "addr add 192.0.2.21\nrestart -kill\nsync\n",
		"in node true\nnode addr=192.0.2.21\nstart\nsync\n", "cut birch\njoin birch\nstart\nsync\n", "sync\n",
	} {
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			r := &Runner{Subject: subject.Svcproxy(program, true), FromAPI: true}
			res := r.Run(Case{Scenario: mustScenario(t, script), Mode: modes[0].Name})
			if want := script == "sync\n"; (res.Verdict != Passed) != want || strings.Contains(res.Detail, "panic") {
				t.Errorf("%s: %s", res.Verdict, res.Detail)
			}
		})
	}
}

// TestUnmappedFailsWhereItRuns: a range without a counterpart is a fault of the line, not
// of the file, and none where a condition leaves the line out.
func TestUnmappedFailsWhereItRuns(t *testing.T) {
	r := &Runner{Subject: subject.Subject{Name: "svcproxy"}}
	text := "# families: 6\n[family:4] node podcidr=192.0.2.0/28\nnode podcidr=192.0.2.0/28\n"
	s := mustScenario(t, text)
	res := r.Run(Case{Scenario: s, Mode: PlanOnly, Families: s.Families[0]})
	if want := "test.txtar:3: "; res.Verdict != Failed || !strings.HasPrefix(res.Detail, want) || !strings.Contains(res.Detail, "192.0.2.0/28") {
		t.Errorf("%s: %s, want a failure that says %q and the range", res.Verdict, res.Detail, want)
	}
}

func TestParseHeader(t *testing.T) {
	s := mustScenario(t, "# families: 4 dual\n# feed: api\nstart\n")
	if len(s.Families) != 2 || !s.API {
		t.Errorf("families %v, API %t; want 4 and dual, over the API", s.Families, s.API)
	}
	path := filepath.Join(t.TempDir(), "bad.txtar")
	for text, want := range map[string]string{"# families: 5\nstart\n": `"5"`, "# Nothing.\n\n-- a.yaml --\nstart\n": "no command"} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one that says %s", err, want)
		}
	}
}

// TestScenariosBeginWithASentence keeps the files readable: the first line says what
// is shown.
func TestScenariosBeginWithASentence(t *testing.T) {
	for _, s := range mustFind(t) {
		first, _, _ := strings.Cut(string(s.archive.Comment), "\n")
		if !strings.HasPrefix(first, "# ") || !strings.HasSuffix(strings.TrimRight(first, ")"), ".") {
			t.Errorf("%s begins with %q, want a comment that is a sentence", s.Path, first)
		}
	}
}
