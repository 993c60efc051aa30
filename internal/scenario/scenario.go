// Package scenario runs scenario files: scripts of Kubernetes objects and network
// flows against a Service proxy, in a small world of network namespaces or on the
// plan alone. The language is that of testscript with commands of its own;
// docs/scenarios.md describes it.
//
// A scenario says what happens to packets, never how a mode does it, so the same
// file runs in every mode, in each address family, with the objects delivered as
// files or over the Kubernetes API, and against other proxies too.
package scenario

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/txtar"

	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// Scenario is one scenario file.
type Scenario struct {
	Name     string           // file name without extension
	Path     string           // as given
	Families []world.Families // at least one
	// API: the script is about the API server, so the objects must come from it.
	API     bool
	archive *txtar.Archive
}

// Parse reads a scenario file.
func Parse(path string) (*Scenario, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read scenario: %w", err)
	}
	s := &Scenario{
		Name:    strings.TrimSuffix(filepath.Base(path), filepath.Ext(path)),
		Path:    path,
		archive: txtar.Parse(b),
	}
	commands := 0
	for line := range strings.Lines(string(s.archive.Comment)) {
		line = strings.TrimSpace(line)
		if line != "" && line[0] != '#' {
			commands++
		}
		s.API = s.API || line == "# feed: api"
		list, ok := strings.CutPrefix(line, "# families:")
		if !ok {
			continue
		}
		for _, w := range strings.Fields(list) {
			i := slices.Index([]string{"4", "6", "dual"}, w)
			if i < 0 {
				return nil, fmt.Errorf("%s: family set %q: want 4, 6 or dual", path, w)
			}
			s.Families = append(s.Families, world.Only4+world.Families(i))
		}
	}
	if commands == 0 {
		return nil, fmt.Errorf("%s: there is no command in it", path)
	}
	if len(s.Families) == 0 {
		s.Families = []world.Families{world.AsWritten}
	}
	return s, nil
}

// Find parses the scenario files among paths; a folder stands for all *.txtar in
// it and below.
func Find(paths []string) ([]*Scenario, error) {
	var out []*Scenario
	for _, p := range paths {
		var files []string
		err := filepath.WalkDir(p, func(file string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && (file == p || filepath.Ext(file) == ".txtar") {
				files = append(files, file)
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("find scenarios: %w", err)
		}
		if len(files) == 0 {
			return nil, fmt.Errorf("find scenarios: no *.txtar in %s", p)
		}
		for _, f := range files {
			s, err := Parse(f)
			if err != nil {
				return nil, err
			}
			out = append(out, s)
		}
	}
	return out, nil
}

// commandLine splits a line of a script into its conditions and negation, the
// command and the rest.
var commandLine = regexp.MustCompile(`^(\s*(?:\[[^\]\s]+\]\s*)*[!?]?\s*)([A-Za-z][\w-]*)(.*)$`)

// stopProxy is what the command stop is called in the script that testscript
// sees, because its own stop means something else.
const stopProxy = "stop-proxy"

// script returns the scenario as testscript is to see it for one run: on the
// plan alone, commands that need a kernel are taken out, line by line.
func (s *Scenario) script(f world.Families, planOnly bool) *txtar.Archive {
	var b strings.Builder
	for line := range strings.Lines(string(s.archive.Comment)) {
		m := commandLine.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil || strings.HasPrefix(strings.TrimSpace(line), "#") {
			b.WriteString(line)
			continue
		}
		before, cmd, rest := m[1], m[2], m[3]
		if planOnly && slices.Contains(kernelCommands, cmd) {
			before = "# " + before
		}
		switch {
		case cmd == "stop":
			cmd = stopProxy
		case cmd == "exec" && planOnly:
			cmd = tryExec
		}
		if f == world.Only6 {
			mapped, err := world.MapText(rest)
			if err != nil { // of no matter where a condition is false
				cmd, mapped = unmapped, fmt.Sprintf(" '%s: %v'", cmd, err)
			}
			rest = mapped
		}
		b.WriteString(before + cmd + rest + "\n")
	}
	return &txtar.Archive{Comment: []byte(b.String()), Files: s.archive.Files}
}

// tryExec is what exec is called on the plan alone: the program may need what others
// would have made that do not run there, so that its failure says nothing.
const tryExec = "try-exec"

// unmapped stands for a command with a range that has no IPv6 counterpart; it fails with
// its argument.
const unmapped = "unmapped"

// kernelCommands have no meaning on the plan alone, nor has what testscript says of
// programs that did not run.
var kernelCommands = []string{"stop", "hold", "held", "load", "in", "ipvs", "stray", "conntrack", "event", "metric", "log", "api",
	"stdout", "stderr", "stdin", "cmp", "cmpenv", "exists", "grep"}
