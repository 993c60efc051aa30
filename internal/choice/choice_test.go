package choice

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// host is one on which some modes lack something.
type host struct {
	lacks map[string]string
	tried []string
}

func (h *host) try(_ context.Context, mode string) error {
	h.tried = append(h.tried, mode)
	if why, ok := h.lacks[mode]; ok {
		return errors.New(why)
	}
	return nil
}

func (h *host) chooser(file string) Chooser {
	return Chooser{Try: h.try, File: file, Now: func() time.Time { return time.Unix(1e9, 0) }, Warn: func(error) {}}
}

func TestChoose(t *testing.T) {
	h := &host{lacks: map[string]string{"a": "no module a"}}
	r, err := h.chooser("").Choose(t.Context(), []string{"a", "b", "c"})
	if err != nil || r.Mode != "b" || r.Remembered || strings.Join(h.tried, " ") != "a b" {
		t.Errorf("have %+v, %v after trying %v", r, err, h.tried)
	}
	if want := "mode b was chosen of a, b, c; a cannot work here: no module a"; r.String() != want {
		t.Errorf("want %q, have %q", want, r)
	}
	h.lacks = map[string]string{"a": "no a", "b": "no b"}
	if _, err := h.chooser("").Choose(t.Context(), []string{"a", "b"}); err == nil || !strings.Contains(err.Error(), "a: no a; b: no b") {
		t.Errorf("have %v", err)
	}
}

// A choice stands until the preference changes or the file goes.
func TestChoiceIsRemembered(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run", "mode")
	h := &host{lacks: map[string]string{"a": "busy for a moment"}}
	mustChoose := func(want string, remembered bool, preference ...string) {
		t.Helper()
		r, err := h.chooser(file).Choose(t.Context(), preference)
		if err != nil || r.Mode != want || r.Remembered != remembered {
			t.Errorf("want %s, remembered %v; have %+v, %v", want, remembered, r, err)
		}
	}
	mustChoose("b", false, "a", "b")
	h.lacks = nil // a could now, but is not taken
	mustChoose("b", true, "a", "b")
	mustChoose("a", false, "a", "b", "c")
	h.lacks = map[string]string{"a": "its module went"}
	_, err := h.chooser(file).Choose(t.Context(), []string{"a", "b", "c"})
	if err == nil || !strings.Contains(err.Error(), "its module went") || !strings.Contains(err.Error(), file) {
		t.Errorf("the choice changed by itself: %v", err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	mustChoose("b", false, "a", "b", "c")
	if err := os.WriteFile(file, []byte("not JSON"), 0o644); err != nil {
		t.Fatal(err)
	}
	mustChoose("b", false, "a", "b", "c")
}

func TestChoiceThatCannotBeRemembered(t *testing.T) {
	var told error
	c := (&host{}).chooser(filepath.Join(t.TempDir(), "mode"))
	c.Warn = func(err error) { told = err }
	if err := os.Mkdir(c.File+".new", 0o755); err != nil {
		t.Fatal(err)
	}
	r, err := c.Choose(t.Context(), []string{"a"})
	if err != nil || r.Mode != "a" {
		t.Errorf("have %+v, %v", r, err)
	}
	if told == nil {
		t.Error("nobody was told")
	}
}
