package app

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/svcproxy/svcproxy/internal/metrics"
)

// buildVersion returns the release that was set when the program was built, or else
// what the Go toolchain knows about the source.
func (env Env) buildVersion() string { return env.build().Version }

// build says what is running. Commit and date are those of the source, as far as
// the Go toolchain recorded them.
func (env Env) build() metrics.Build {
	b := metrics.Build{Version: env.Version}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	modified := ""
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.time":
			b.Date = s.Value
		case "vcs.modified":
			if s.Value == "true" {
				modified = "+changes"
			}
		}
	}
	switch {
	case b.Version != "":
	case info.Main.Version != "" && info.Main.Version != "(devel)":
		b.Version = info.Main.Version
	case b.Commit != "":
		b.Version = "v0.0.0-" + b.Commit[:min(12, len(b.Commit))] + modified
	default:
		b.Version = "v0.0.0-development"
	}
	return b
}

// printVersion answers --version and --version=raw.
func (env Env) printVersion(how string) error {
	b := env.build()
	if how != "raw" {
		_, err := fmt.Fprintf(env.Stdout, "svcproxy %s\n", b.Version)
		return err
	}
	_, err := fmt.Fprintf(env.Stdout, "svcproxy %s %s %s/%s commit=%q date=%q\n",
		b.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH, b.Commit, b.Date)
	return err
}
