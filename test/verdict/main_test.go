package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// line is one event as go test -json prints it.
func line(action, pkg, test, output string) string {
	b := `{"Action":"` + action + `","Package":"` + pkg + `"`
	if test != "" {
		b += `,"Test":"` + test + `"`
	}
	if output != "" {
		b += `,"Output":"` + output + `\n"`
	}
	return b + "}\n"
}

func TestVerdict(t *testing.T) {
	const pkg = "example.org/m/internal/x"
	skips := "# on purpose\ninternal/x TestSCTP/*/v6 kernel has no SCTP\n"
	for _, tc := range []struct {
		name   string
		events string
		status int
		last   string   // the last line
		want   []string // parts of the output
	}{
		{
			name: "leaves count, parents do not",
			events: line("pass", pkg, "TestA/one", "") + line("pass", pkg, "TestA/two", "") +
				line("pass", pkg, "TestA", "") + line("pass", pkg, "TestB", "") + line("pass", pkg, "", ""),
			last: "3 passed, 0 failed, 0 skipped",
			want: []string{"ok   example.org/m/internal/x: 3 passed", "PASS: tests"},
		},
		{
			name:   "a slash in a name makes no parent",
			events: line("pass", pkg, "TestA/application/json", "") + line("pass", pkg, "TestA", "") + line("pass", pkg, "", ""),
			last:   "1 passed, 0 failed, 0 skipped",
		},
		{
			name: "a failure comes with its output",
			events: line("output", pkg, "TestA", "    a_test.go:3: want 1, have 2") +
				line("fail", pkg, "TestA", "") + line("pass", pkg, "TestB", "") + line("fail", pkg, "", ""),
			status: 1,
			last:   "1 passed, 1 failed, 0 skipped",
			want:   []string{"FAIL example.org/m/internal/x TestA", "want 1, have 2", "FAIL: tests: 1 failed"},
		},
		{
			name: "a parent that fails by itself counts",
			events: line("pass", pkg, "TestA/one", "") + line("fail", pkg, "TestA", "") +
				line("fail", pkg, "", ""),
			status: 1,
			last:   "1 passed, 1 failed, 0 skipped",
		},
		{
			name: "a build failure counts as one",
			events: `{"ImportPath":"` + pkg + `","Action":"build-output","Output":"x.go:1: syntax error\n"}` + "\n" +
				line("pass", "other", "TestO", "") + line("pass", "other", "", "") +
				`{"Action":"fail","Package":"` + pkg + `","FailedBuild":"` + pkg + `"}` + "\n",
			status: 1,
			last:   "1 passed, 1 failed, 0 skipped",
			want:   []string{"syntax error"},
		},
		{
			name: "a test that never ended failed",
			events: line("run", pkg, "TestA", "") + line("output", pkg, "TestA", "panic: oh") +
				line("fail", pkg, "", ""),
			status: 1,
			last:   "0 passed, 1 failed, 0 skipped",
			want:   []string{"TestA (did not end)", "panic: oh"},
		},
		{
			name: "an expected skip passes",
			events: line("output", pkg, "TestSCTP/a/v6", "    s_test.go:9: this kernel has no SCTP sockets") +
				line("skip", pkg, "TestSCTP/a/v6", "") + line("pass", pkg, "TestSCTP/a", "") +
				line("pass", pkg, "TestSCTP", "") + line("pass", pkg, "TestB", "") + line("pass", pkg, "", ""),
			last: "1 passed, 0 failed, 1 skipped",
			want: []string{"skip example.org/m/internal/x TestSCTP/a/v6: this kernel has no SCTP sockets"},
		},
		{
			name: "the same test skipped for another reason fails",
			events: line("output", pkg, "TestSCTP/a/v6", "    s_test.go:9: needs root") +
				line("skip", pkg, "TestSCTP/a/v6", "") + line("pass", pkg, "TestSCTP/a", "") +
				line("pass", pkg, "TestSCTP", "") + line("pass", pkg, "TestB", "") + line("pass", pkg, "", ""),
			status: 1,
			last:   "1 passed, 0 failed, 1 skipped",
			want:   []string{"SKIP NOT EXPECTED", "1 skipped that should run here"},
		},
		{
			name:   "nothing at all is no pass",
			events: "go: no such package\n",
			status: 1,
			last:   "0 passed, 0 failed, 0 skipped",
			want:   []string{"go: no such package", "no test passed"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			list := filepath.Join(t.TempDir(), "skips")
			if err := os.WriteFile(list, []byte(skips), 0o600); err != nil {
				t.Fatal(err)
			}
			var out, errOut strings.Builder
			status := run([]string{"-expected-skips", list}, strings.NewReader(tc.events), &out, &errOut)
			if status != tc.status {
				t.Errorf("exit status: want %d, have %d", tc.status, status)
			}
			text := strings.TrimSpace(out.String())
			if last := text[strings.LastIndexByte(text, '\n')+1:]; last != tc.last {
				t.Errorf("last line: want %q, have %q", tc.last, last)
			}
			for _, w := range tc.want {
				if !strings.Contains(text, w) {
					t.Errorf("no %q in\n%s", w, text)
				}
			}
			if errOut.Len() > 0 {
				t.Errorf("on standard error: %s", errOut.String())
			}
		})
	}
}

func TestSkipListNamesTheBadLine(t *testing.T) {
	_, err := readSkipList(strings.NewReader("# fine\ninternal/x TestA\n"))
	if err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("want an error that names line 2, have %v", err)
	}
}
