package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("a-right.txtar", "# Right.\n# families: 4 6\nstart\nsync\nflow pod:probe tcp node:80 -> refused\n")
	write("b-wrong.txtar", "# Wrong.\nstart\nsync\nflow pod:probe tcp node:80 -> dropped\n")
	write("c-skip.txtar", "# Skipped.\nskip 'a reason'\n")
	var out bytes.Buffer
	ok, err := run(context.Background(), []string{"--mode", "plan", "--parallel", "1", dir}, &out)
	if err != nil || ok {
		t.Fatalf("ok %t, error %v, want a failure", ok, err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{"ok   a-right/plan/4", "ok   a-right/plan/6", "FAIL b-wrong/plan", "skip c-skip/plan: a reason", "2 passed, 1 failed, 1 skipped"}
	if len(lines) != len(want) {
		t.Fatalf("have %d lines, want %d:\n%s", len(lines), len(want), out.String())
	}
	for i, w := range want {
		if !strings.HasPrefix(lines[i], w) {
			t.Errorf("line %d is %q, want %q...", i+1, lines[i], w)
		}
	}
	if w := "b-wrong.txtar:4: flow pod:probe tcp node:80 -> dropped: "; !strings.Contains(lines[2], w) || !strings.Contains(lines[2], "refused") {
		t.Errorf("the failure is %q, want place, command and what was seen", lines[2])
	}
	out.Reset()
	if ok, err := run(context.Background(), []string{"--mode", "plan", filepath.Join(dir, "a-right.txtar")}, &out); !ok || err != nil {
		t.Errorf("one right file: ok %t, error %v", ok, err)
	}
}

func TestFlags(t *testing.T) {
	for args, want := range map[string]string{
		"":                               "no scenario",
		"--feed pigeon x":                "pigeon",
		"--parallel 0 x":                 "--parallel",
		"--subject proxy --feed files x": "{MANIFESTS}",
		"--mode plan /nowhere/at/all":    "/nowhere/at/all",
	} {
		if _, err := run(context.Background(), strings.Fields(args), &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one that says %q", args, err, want)
		}
	}
}
