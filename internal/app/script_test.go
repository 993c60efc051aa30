package app

import (
	"context"
	"flag"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/svcproxy/svcproxy/internal/sys/host"
)

var update = flag.Bool("update", false, "write the golden files of testdata anew")

// TestMain lets scripts, and tests that need a process, run this package as the
// program svcproxy.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"svcproxy": program})
}

func program() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	status := Main(ctx, Env{
		Args: os.Args[1:], Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv,
		Hostname:   func() (string, error) { return "Alder", nil },
		Executable: os.Executable, ReadFile: os.ReadFile, Host: host.Kernel{}, Version: "v1.2.3",
	})
	stop()
	os.Exit(status)
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata", UpdateScripts: *update, RequireExplicitExec: true, RequireUniqueNames: true,
	})
}
