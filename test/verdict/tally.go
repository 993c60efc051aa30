package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// event is one line of "go test -json", see "go doc test2json"; build output has
// an ImportPath instead of a Package.
type event struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Elapsed     float64 // seconds
	Output      string
	FailedBuild string
}

// test is what is known of one test, or of a package where name is "".
type test struct {
	pkg, name string
	action    string // the last of pass, fail, skip; "" while it runs
	parent    bool   // it has subtests
	named     bool   // an event names it; a name with a slash in it has parents that are none
	output    []string
}

// tally collects events and prints a line for each package that ends.
type tally struct {
	out   *bufio.Writer
	tests map[[2]string]*test
	order []*test
	build map[string][]string // compiler output by import path
}

func newTally(out *bufio.Writer) *tally {
	return &tally{out: out, tests: map[[2]string]*test{}, build: map[string][]string{}}
}

// read takes all events. Lines that are none are printed as they are.
func (t *tally) read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil && e.Action != "" {
				t.take(e)
			} else {
				fmt.Fprint(t.out, line)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (t *tally) take(e event) {
	if e.Action == "build-output" {
		t.build[e.ImportPath] = append(t.build[e.ImportPath], e.Output)
		return
	}
	if e.Package == "" {
		return
	}
	x := t.get(e.Package, e.Test)
	x.named = true
	switch e.Action {
	case "output":
		x.output = append(x.output, e.Output)
	case "pass", "fail", "skip":
		x.action = e.Action
		if e.FailedBuild != "" {
			x.output = append(x.output, t.build[e.FailedBuild]...)
		}
		if e.Test == "" {
			t.packageDone(x, time.Duration(e.Elapsed*float64(time.Second)))
		} else if e.Action == "pass" {
			x.output = nil
		}
	}
}

func (t *tally) get(pkg, name string) *test {
	key := [2]string{pkg, name}
	if x := t.tests[key]; x != nil {
		return x
	}
	x := &test{pkg: pkg, name: name}
	t.tests[key] = x
	t.order = append(t.order, x)
	if i := strings.LastIndexByte(name, '/'); i > 0 {
		t.get(pkg, name[:i]).parent = true
	}
	return x
}

func (t *tally) packageDone(p *test, took time.Duration) {
	var passed, failed, skipped int
	for _, x := range t.order {
		if x.pkg != p.pkg || !t.counts(x) {
			continue
		}
		switch x.action {
		case "pass":
			passed++
		case "skip":
			skipped++
		default:
			failed++
		}
	}
	if passed+failed+skipped == 0 {
		return // no tests
	}
	word := "ok"
	if p.action == "fail" {
		word = "FAIL"
	}
	fmt.Fprintf(t.out, "%-4s %s: %d passed, %d failed, %d skipped in %v\n",
		word, p.pkg, passed, failed, skipped, took.Round(100*time.Millisecond))
	t.out.Flush()
}

// counts reports whether x is one of the tests in the final numbers: those
// without subtests, those that failed although no subtest did, and a package
// that failed although no test in it did.
func (t *tally) counts(x *test) bool {
	if !x.named {
		return false
	}
	if x.name != "" && !x.parent {
		return true
	}
	if x.action != "fail" && !(x.action == "" && x.name != "") {
		return false
	}
	for _, y := range t.order {
		if y != x && y.pkg == x.pkg && y.name != "" && below(y.name, x.name) && y.action != "pass" && y.action != "skip" {
			return false
		}
	}
	return true
}

// below reports whether test is a subtest of parent; every test is one of "".
func below(test, parent string) bool {
	return parent == "" || strings.HasPrefix(test, parent+"/")
}

// report prints failures, skips and the verdict, and returns whether it is a pass.
func (t *tally) report(title string, expected skipList) bool {
	var passed, failed, skipped, unexpected int
	var problems []string
	for _, x := range t.order {
		if !t.counts(x) {
			continue
		}
		switch x.action {
		case "pass":
			passed++
		case "skip":
			skipped++
			why := skipReason(x.output)
			if expected.covers(x.pkg, x.name, why) {
				fmt.Fprintf(t.out, "skip %s %s: %s\n", x.pkg, x.name, why)
			} else {
				unexpected++
				fmt.Fprintf(t.out, "SKIP NOT EXPECTED %s %s: %s\n", x.pkg, x.name, why)
			}
		default:
			failed++
			t.printFailure(x)
		}
	}
	if failed > 0 {
		problems = append(problems, fmt.Sprintf("%d failed", failed))
	}
	if unexpected > 0 {
		problems = append(problems, fmt.Sprintf("%d skipped that should run here", unexpected))
	}
	if passed == 0 {
		problems = append(problems, "no test passed")
	}
	if len(problems) == 0 {
		fmt.Fprintf(t.out, "\nPASS: %s\n", title)
	} else {
		fmt.Fprintf(t.out, "\nFAIL: %s: %s\n", title, strings.Join(problems, ", "))
	}
	fmt.Fprintf(t.out, "%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	return len(problems) == 0
}

func (t *tally) printFailure(x *test) {
	name := strings.TrimSpace(x.pkg + " " + x.name)
	if x.action == "" {
		name += " (did not end)"
	}
	fmt.Fprintf(t.out, "\nFAIL %s\n", name)
	for _, line := range x.output {
		fmt.Fprint(t.out, "    ", strings.TrimRight(line, "\n"), "\n")
	}
}

// skipReason is a skipped test's own words, without the frame that go test puts
// around them.
func skipReason(output []string) string {
	lines := slices.DeleteFunc(slices.Clone(output), func(line string) bool {
		line = strings.TrimSpace(line)
		return line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ")
	})
	for i, line := range lines {
		line = strings.TrimSpace(line)
		// "file_test.go:12: reason"
		if file, rest, ok := strings.Cut(line, ": "); ok && strings.Contains(file, ".go:") {
			line = rest
		}
		lines[i] = line
	}
	if len(lines) == 0 {
		return "no reason given"
	}
	return strings.Join(lines, " ")
}
