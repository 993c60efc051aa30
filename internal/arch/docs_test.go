package arch

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDeviationsAreShown holds docs/deviations.md to its promise: what its last
// column names is there.
func TestDeviationsAreShown(t *testing.T) {
	text, err := os.ReadFile(root + "/docs/deviations.md")
	if err != nil {
		t.Fatal(err)
	}
	tests := testFunctions(t)
	quoted := regexp.MustCompile("`([^`]+)`")
	rows := 0
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 7 || strings.HasPrefix(cells[1], "---") || strings.TrimSpace(cells[5]) == "shown by" {
			continue
		}
		rows++
		names := quoted.FindAllStringSubmatch(cells[5], -1)
		if len(names) == 0 {
			t.Errorf("nothing shows the row about %s", strings.TrimSpace(cells[1]))
		}
		for _, n := range names {
			if tests[n[1]] || exists(root+"/testdata/scenarios/"+n[1]+".txtar") || exists(root+"/testdata/plan/"+n[1]+".txtar") {
				continue
			}
			t.Errorf("there is no scenario, plan case or test %q, which is to show the row about %s", n[1], strings.TrimSpace(cells[1]))
		}
	}
	if rows == 0 {
		t.Error("docs/deviations.md has no rows")
	}
}

// testFunctions are the names of all test functions of the project.
func testFunctions(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	declaration := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range declaration.FindAllSubmatch(text, -1) {
			found[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestLinksLeadSomewhere checks the links between the project's pages, and the
// files that the map names.
func TestLinksLeadSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	for _, page := range markdown(t) {
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllSubmatch(text, -1) {
			if target := filepath.Join(root, filepath.Dir(page), string(m[1])); !exists(target) {
				t.Errorf("%s links to %s, which is not there", page, m[1])
			}
		}
	}
}

// TestMapIsComplete wants a line in docs/ARCHITECTURE.md for every package, and
// no line for one that is not there.
func TestMapIsComplete(t *testing.T) {
	text, err := os.ReadFile(root + "/docs/ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	entry := regexp.MustCompile("(?m)^\\| ((?:`[^`]+`(?:, )?)+) \\| [^|]+ \\| [^|]* ?\\|$")
	for _, m := range entry.FindAllSubmatch(text, -1) {
		for _, p := range strings.Split(string(m[1]), ", ") {
			if p = strings.Trim(p, "`"); strings.Contains(p, "/") || exists(filepath.Join(root, p)) {
				paths = append(paths, p)
			}
		}
	}
	for _, p := range paths {
		if dir := strings.TrimSuffix(p, "/*"); !exists(filepath.Join(root, dir)) {
			t.Errorf("docs/ARCHITECTURE.md names %s, which is not there", p)
		}
	}
	for _, p := range mustList(t, "./...") {
		found := false
		for _, pattern := range paths {
			found = found || matches(strings.Replace(pattern, "/*", "/...", 1), p.ImportPath)
		}
		if !found {
			t.Errorf("docs/ARCHITECTURE.md has no line for %s", short(p.ImportPath))
		}
	}
}

// markdown returns the pages that are in the repository, or all if it is none.
func markdown(t *testing.T) []string {
	t.Helper()
	cmd := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		pages, err := filepath.Glob(root + "/docs/*.md")
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range pages {
			if pages[i], err = filepath.Rel(root, p); err != nil {
				t.Fatal(err)
			}
		}
		return append(pages, "README.md", "CONTRIBUTING.md")
	}
	var pages []string
	for _, p := range bytes.Split(bytes.TrimRight(out, "\x00"), []byte{0}) {
		pages = append(pages, string(p))
	}
	return pages
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
