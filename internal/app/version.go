package app

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// buildVersion returns the release that was set when the program was built, or else
// what the Go toolchain knows about the source.
func (env Env) buildVersion() string {
	if env.Version != "" {
		return env.Version
	}
	b, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if b.Main.Version != "" && b.Main.Version != "(devel)" {
		return b.Main.Version
	}
	revision, modified := "", ""
	for _, s := range b.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = "+changes"
		}
	}
	if revision == "" {
		return "v0.0.0-development"
	}
	return "v0.0.0-" + revision + modified
}

// printVersion answers --version and --version=raw.
func (env Env) printVersion(how string) error {
	var err error
	if how == "raw" {
		_, err = fmt.Fprintf(env.Stdout, "svcproxy %s %s %s/%s\n", env.buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	} else {
		_, err = fmt.Fprintf(env.Stdout, "svcproxy %s\n", env.buildVersion())
	}
	return err
}
