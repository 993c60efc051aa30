package subject

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Build compiles the project's program into dir and returns its path. It works in
// any folder of the module; elsewhere the svcproxy in PATH is taken.
func Build(ctx context.Context, dir string) (string, error) {
	root, err := moduleRoot()
	if err != nil {
		path, lookErr := exec.LookPath("svcproxy")
		if lookErr != nil {
			return "", fmt.Errorf("%w, and there is no svcproxy in PATH", err)
		}
		return path, nil
	}
	path := filepath.Join(dir, "svcproxy")
	c := exec.CommandContext(ctx, "go", "build", "-o", path, "./cmd/svcproxy")
	c.Dir = root
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build svcproxy: %w: %s", err, bytes.TrimSpace(out))
	}
	return path, nil
}

const modulePath = "github.com/svcproxy/svcproxy"

// moduleRoot finds the folder of the project's go.mod at or above the current one.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if first, _, _ := strings.Cut(string(b), "\n"); err == nil && first == "module "+modulePath {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", errors.New("no folder of the module " + modulePath + " here or above")
		}
		dir = up
	}
}

// Mode is what the program says of one of its modes.
type Mode struct {
	Name      string `json:"name"`
	Built     bool   `json:"built"`
	Supported bool   `json:"supported"`
	Missing   string `json:"missing"`
}

// Modes asks the program which modes it has and what they lack here.
func Modes(ctx context.Context, program string) ([]Mode, error) {
	out, err := exec.CommandContext(ctx, program, "modes", "-o", "json").Output()
	if err != nil {
		return nil, fmt.Errorf("ask %s for its modes: %w", program, err)
	}
	var all []Mode
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, fmt.Errorf("read the modes of %s: %w", program, err)
	}
	return all, nil
}
