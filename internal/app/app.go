// Package app is the program: its commands, and the wiring of a running proxy by
// hand, top to bottom. There is no registry: the modes are one literal list.
package app

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/sys/host"
)

// Env is everything outside the process that the program uses, the kernel's
// packet path and the network apart.
type Env struct {
	Args           []string // without the program's name
	Stdout, Stderr io.Writer
	Getenv         func(string) string
	Hostname       func() (string, error)
	Executable     func() (string, error) // this program's file
	ReadFile       func(string) ([]byte, error)
	Host           host.Host
	RunDir         string // for what is remembered until the host starts anew; "": nothing
	Version        string // the release, if the build has one
}

// Exit statuses.
const (
	exitOK     = 0
	exitFailed = 1
)

// exitStatus is an error that asks for an exit status of its own and has nothing
// to say that was not said.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// Main runs the program until it is done or ctx ends and returns its exit status.
func Main(ctx context.Context, env Env) int {
	cmd := newRoot(env)
	cmd.SetArgs(env.Args)
	cmd.SetOut(env.Stdout)
	cmd.SetErr(env.Stderr)
	err := cmd.ExecuteContext(ctx)
	if status := exitStatus(0); errors.As(err, &status) {
		return int(status)
	}
	if err != nil {
		fmt.Fprintln(env.Stderr, "svcproxy:", err)
		return exitFailed
	}
	return exitOK
}

// newRoot returns the command that runs the proxy, with the others below it.
func newRoot(env Env) *cobra.Command {
	flags := config.NewFlags()
	root := &cobra.Command{
		Use:   "svcproxy [flags]",
		Short: "Makes Kubernetes Services work on a node",
		Long: `svcproxy makes every address of every Kubernetes Service work on the node that it
runs on. It takes kube-proxy's place: it understands its flags, its configuration
file and its Services, and with --manifests it needs no cluster at all.

Without a command it runs the proxy, as "svcproxy run" does.`,
		Example: `  svcproxy --config /var/lib/kube-proxy/config.conf    in kube-proxy's place
  svcproxy --manifests /etc/svcproxy/services          without a cluster
  svcproxy demo                                        see it work, in namespaces of its own`,
		Args:              noArguments,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
		RunE:              func(cmd *cobra.Command, _ []string) error { return runProxy(cmd.Context(), env, flags) },
	}
	root.SetGlobalNormalizationFunc(config.NormalizeName)
	root.SetUsageTemplate(usageTemplate)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; %q lists the flags", err, cmd.CommandPath()+" --help")
	})
	flags.Register(root.Flags())
	root.AddCommand(
		newRun(env), newPlan(env), newModes(env), newStatus(env), newDiff(env), newCleanup(env), newDemo(env),
	)
	return root
}

func newRun(env Env) *cobra.Command { return newRunWith(env, config.NewFlags()) }

func newRunWith(env Env, flags *config.Flags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "run [flags]",
		Short: "Run the proxy",
		Args:  noArguments,
		RunE:  func(cmd *cobra.Command, _ []string) error { return runProxy(cmd.Context(), env, flags) },
	}
	flags.Register(cmd.Flags())
	return cmd
}

// noArguments rejects arguments that are no flags, as kube-proxy does.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%q is neither a command nor a flag of %q; %q lists both", args[0], cmd.CommandPath(), cmd.CommandPath()+" --help")
	}
	return nil
}

// usageTemplate is cobra's, with flags wrapped to the width of a terminal.
const usageTemplate = `Usage:{{if .Runnable}}
  {{.UseLine}}{{end}}{{if .HasAvailableSubCommands}}
  {{.CommandPath}} [command]{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalFlags.FlagUsagesWrapped 110 | trimTrailingWhitespaces}}{{end}}{{if .HasAvailableSubCommands}}

"{{.CommandPath}} [command] --help" tells more about a command.{{end}}
`
