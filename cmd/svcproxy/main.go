// Command svcproxy makes Kubernetes Services work on a node.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/svcproxy/svcproxy/internal/app"
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/sys/host"
)

// version is the release, set by -ldflags "-X main.version=v1.2.3".
var version string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	status := app.Main(ctx, app.Env{
		Args:       os.Args[1:],
		Stdout:     os.Stdout,
		Stderr:     os.Stderr,
		Getenv:     os.Getenv,
		Hostname:   os.Hostname,
		Executable: os.Executable,
		ReadFile:   config.ReadFile,
		Host:       host.Kernel{},
		RunDir:     "/run/svcproxy",
		Version:    version,
	})
	stop()
	os.Exit(status)
}
