// Package choice settles on one of several modes, in an order of preference, by
// trying each on this host, once: the result is remembered until the host starts
// anew, so that a trial which fails for a moment never makes a node change its mode.
// What the trials are is the caller's.
package choice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Result is a choice, and how it came about.
type Result struct {
	Mode string `json:"mode"`
	// Preference is what it was chosen from.
	Preference []string  `json:"preference"`
	Chosen     time.Time `json:"chosen"`
	// Rejected are the modes before it in the order.
	Rejected []Rejection `json:"rejected,omitempty"`
	// Remembered: this process did not choose, it took what an earlier one had chosen.
	Remembered bool `json:"remembered"`
}

// Rejection is a mode that cannot work here.
type Rejection struct {
	Mode string `json:"mode"`
	Why  string `json:"why"`
}

// String says it in a sentence.
func (r Result) String() string {
	text := fmt.Sprintf("mode %s was chosen of %s", r.Mode, strings.Join(r.Preference, ", "))
	if r.Remembered {
		text += " on " + r.Chosen.Format(time.RFC3339)
	}
	for _, x := range r.Rejected {
		text += fmt.Sprintf("; %s cannot work here: %s", x.Mode, x.Why)
	}
	return text
}

// Chooser chooses.
type Chooser struct {
	// Try returns nil if the mode can work on this host, else what it lacks and the
	// remedy.
	Try func(ctx context.Context, mode string) error
	// File keeps the choice; it should be in a folder that the host empties when it
	// starts, such as /run. "": nothing is remembered.
	File string
	Now  func() time.Time
	// Warn is told what keeps the choice from being remembered; nil: File is only read.
	Warn func(error)
}

// Choose returns the first of preference that works, or the one that was remembered
// for the same preference. It is an error if none works, or if that one no longer does:
// changing it is for people to decide.
func (c Chooser) Choose(ctx context.Context, preference []string) (Result, error) {
	r, err := c.recall(preference)
	switch {
	case err != nil:
		return r, err
	case r.Remembered:
		if err := c.Try(ctx, r.Mode); err != nil {
			return r, fmt.Errorf("mode %s, chosen on %s and remembered in %s, cannot work any more: %w; mend that, or remove the file to choose anew",
				r.Mode, r.Chosen.Format(time.RFC3339), c.File, err)
		}
		return r, nil
	}
	for _, mode := range preference {
		if err := c.Try(ctx, mode); err != nil {
			if ctx.Err() != nil {
				return r, ctx.Err()
			}
			r.Rejected = append(r.Rejected, Rejection{mode, err.Error()})
			continue
		}
		r.Mode, r.Chosen, r.Preference = mode, c.Now().UTC().Truncate(time.Second), preference
		if c.Warn != nil {
			if err := c.remember(r); err != nil {
				c.Warn(err)
			}
		}
		return r, nil
	}
	var why []string
	for _, x := range r.Rejected {
		why = append(why, x.Mode+": "+x.Why)
	}
	return r, fmt.Errorf("none of the modes %s can work on this host: %s", strings.Join(preference, ", "), strings.Join(why, "; "))
}

// recall returns what was chosen from the same preference before; nothing of a file
// that says something else, or that cannot be understood.
func (c Chooser) recall(preference []string) (Result, error) {
	if c.File == "" {
		return Result{}, nil
	}
	text, err := os.ReadFile(c.File)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Result{}, nil
	case err != nil:
		return Result{}, fmt.Errorf("read which mode was chosen before: %w", err)
	}
	var r Result
	if json.Unmarshal(text, &r) != nil || !slices.Equal(r.Preference, preference) || !slices.Contains(preference, r.Mode) {
		return Result{}, nil
	}
	r.Remembered = true
	return r, nil
}

// remember writes the file, in one step.
func (c Chooser) remember(r Result) error {
	if c.File == "" {
		return nil
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("remember the mode: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(c.File), 0o755); err != nil {
		return fmt.Errorf("remember the mode: %w", err)
	}
	if err := os.WriteFile(c.File+".new", append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("remember the mode: %w", err)
	}
	if err := os.Rename(c.File+".new", c.File); err != nil {
		return fmt.Errorf("remember the mode: %w", err)
	}
	return nil
}
