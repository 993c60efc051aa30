package app

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// Exit statuses of diff, as diff(1) has them.
const (
	exitDifferent = 1
	exitTrouble   = 2
)

func newDiff(env Env) *cobra.Command {
	flags := config.NewFlags()
	var output string
	cmd := &cobra.Command{
		Use:   "diff [flags]",
		Short: "Compare what the kernel does with what the proxy would make it do",
		Long: `diff computes the plan and compares it with the kernel, without writing: "+" is before
what the kernel lacks, "-" before what it has too much. It takes all flags of
"svcproxy run". The exit status is 0 if there is no difference, 1 if there is one and 2
if they could not be compared.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			lines, err := diff(cmd.Context(), env, flags)
			var write func(io.Writer, []string) error
			if err == nil {
				write, err = writerFor(output, writeLines)
			}
			if err == nil {
				err = write(env.Stdout, lines)
			}
			if err != nil {
				fmt.Fprintln(env.Stderr, "svcproxy:", err)
				return exitStatus(exitTrouble)
			}
			if len(lines) > 0 {
				return exitStatus(exitDifferent)
			}
			return nil
		},
	}
	registerPlanFlags(cmd, flags)
	addOutput(cmd, &output)
	return cmd
}

func diff(ctx context.Context, env Env, flags *config.Flags) ([]string, error) {
	c, warnings, err := flags.Load(env.ReadFile)
	warn(env, warnings)
	if err != nil {
		return nil, err
	}
	choice, err := chooseMode(ctx, env, c, nil)
	if err != nil {
		return nil, err
	}
	c, mode := choice.config, choice.mode
	log := newLog(env.Stderr, quiet(c.Log))
	families, _ := mode.families(ctx, env.Host)
	backend, err := mode.New(modeEnv(c, log.Logger, nil, families))
	if err != nil {
		return nil, fmt.Errorf("set up mode %s: %w", mode.Name, err)
	}
	d, ok := backend.(dataplane.Differ)
	if !ok {
		return nil, fmt.Errorf("mode %s cannot compare a plan with the kernel", mode.Name)
	}
	s, err := survey(ctx, env, c, surveyOptions{families: families})
	if err != nil {
		return nil, err
	}
	lines, err := d.Diff(ctx, s.planner.Update().Plan)
	if err != nil {
		return nil, fmt.Errorf("compare the plan with the kernel: %w", err)
	}
	return lines, nil
}

func writeLines(w io.Writer, lines []string) error {
	for _, l := range lines {
		if _, err := fmt.Fprintln(w, l); err != nil {
			return err
		}
	}
	return nil
}

// modeEnv is what a mode gets from a configuration.
func modeEnv(c *config.Config, log *slog.Logger, stats dataplane.Stats, families []plan.Family) dataplane.Env {
	if stats == nil {
		stats = noStats{}
	}
	return dataplane.Env{
		Log: log, Stats: stats, Families: families,
		MasqueradeBit: c.MasqueradeBit, BeLiberal: c.Conntrack.TCPBeLiberal,
	}
}

// noStats takes the figures of commands that end at once.
type noStats struct{}

func (noStats) Add(string, float64, ...string)     {}
func (noStats) Set(string, float64, ...string)     {}
func (noStats) Observe(string, float64, ...string) {}
