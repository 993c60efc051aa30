package app

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/klog/v2"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/plan"
)

func TestVerbosity(t *testing.T) {
	vmodule := []logsapi.VModuleItem{{FilePattern: "log_*", Verbosity: 6}}
	tests := []struct {
		name  string
		log   config.Log
		level slog.Level
		want  bool
	}{
		{"info is normal", config.Log{}, slog.LevelInfo, true},
		{"debug is not", config.Log{}, slog.LevelDebug, false},
		{"-v=4 shows debug", config.Log{Verbosity: 4}, slog.LevelDebug, true},
		{"-v=4 hides V(5)", config.Log{Verbosity: 4}, -5, false},
		{"--vmodule shows this file's V(6)", config.Log{VModule: vmodule}, -6, true},
		{"--vmodule hides this file's V(7)", config.Log{VModule: vmodule}, -7, false},
		{"--vmodule of another file", config.Log{VModule: []logsapi.VModuleItem{{FilePattern: "x", Verbosity: 9}}}, -6, false},
		{"--vmodule by path", config.Log{VModule: []logsapi.VModuleItem{{FilePattern: "app/log_test", Verbosity: 9}}}, -6, true},
		{"--vmodule can hide", config.Log{Verbosity: 5, VModule: []logsapi.VModuleItem{{FilePattern: "log_test", Verbosity: 0}}}, -4, false},
		{"warnings always show", config.Log{VModule: vmodule}, slog.LevelWarn, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			l := newLog(&out, tt.log)
			l.Log(t.Context(), tt.level, "message")
			if have := out.Len() > 0; have != tt.want {
				t.Errorf("logged %t, want %t: %s", have, tt.want, out.String())
			}
		})
	}
}

func TestVerbosityChangesInPlace(t *testing.T) {
	var out bytes.Buffer
	l := newLog(&out, config.Log{})
	child := l.With("a", 1).WithGroup("g")
	child.Debug("hidden")
	l.setVerbosity(config.Log{Verbosity: 4})
	child.Debug("shown")
	if have := out.String(); strings.Contains(have, "hidden") || !strings.Contains(have, "shown") {
		t.Errorf("have %q", have)
	}
}

func TestJSONLog(t *testing.T) {
	var out bytes.Buffer
	newLog(&out, config.Log{JSON: true, Verbosity: 5}).Log(t.Context(), -5, "message", "n", 1,
		"family", plan.IPv4, "took", 1500*time.Millisecond, "names", []string{"a"}, "nobody", (*bytes.Buffer)(nil))
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatal(err)
	}
	if line["family"] != "IPv4" || line["took"] != "1.5s" || fmt.Sprint(line["names"]) != "[a]" {
		t.Errorf("values do not read as in text: %v", line)
	}
	if line["msg"] != "message" || line["level"] != "V(5)" || line["n"] != 1.0 {
		t.Errorf("have %v", line)
	}
}

// What client-go says through klog arrives in the log, by the same verbosity.
func TestKlogBridge(t *testing.T) {
	var out bytes.Buffer
	l := newLog(&out, config.Log{Verbosity: 2})
	if err := l.bridgeKlog(2); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(klog.ClearLogger)
	klog.V(2).InfoS("shown", "k", "v")
	klog.V(3).InfoS("hidden")
	klog.ErrorS(nil, "failed")
	klog.Flush()
	have := out.String()
	if !strings.Contains(have, "msg=shown k=v") || strings.Contains(have, "hidden") || !strings.Contains(have, "msg=failed") {
		t.Errorf("have %q", have)
	}
}
