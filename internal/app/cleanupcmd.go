package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/plan"
)

func newCleanup(env Env) *cobra.Command {
	flags := config.NewFlags()
	var kubeProxy bool
	cmd := &cobra.Command{
		Use:   "cleanup [flags]",
		Short: "Remove every trace of the proxy, and of kube-proxy, from the kernel",
		Long: `cleanup removes the rules and other objects of every mode, and kube-proxy's own, and
nothing else. It needs no API server and may be repeated. "svcproxy --cleanup" does
the same. What kube-proxy's ipvs mode leaves besides rules (the device kube-ipvs0,
virtual servers, ipsets) stays until svcproxy has that mode.`,
		Example: `  svcproxy cleanup                 before svcproxy is taken off a node
  svcproxy cleanup --kube-proxy    while svcproxy runs, after kube-proxy was ended`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, warnings, err := flags.Load(env.ReadFile)
			warn(env, warnings)
			if err != nil {
				return err
			}
			return cleanup(cmd.Context(), c, newLog(env.Stderr, c.Log).Logger, kubeProxy)
		},
	}
	registerPlanFlags(cmd, flags)
	cmd.Flags().BoolVar(&kubeProxy, "kube-proxy", false, "only remove what kube-proxy has left, of any mode and age; what svcproxy programs, or has taken over, stays")
	return cmd
}

// cleanup removes what every mode may have left; one that fails does not keep the
// others from it. kubeProxy: only what kube-proxy left.
func cleanup(ctx context.Context, c *config.Config, log *slog.Logger, kubeProxy bool) error {
	var errs []error
	for _, m := range builtModes(c) {
		remove := m.Cleanup
		if kubeProxy {
			remove = m.CleanupKubeProxy
		}
		if remove == nil {
			continue
		}
		if err := remove(ctx, modeEnv(c, log, nil, plan.Families[:])); err != nil {
			errs = append(errs, fmt.Errorf("remove the objects of mode %s: %w", m.Name, err))
		}
	}
	return errors.Join(errs...)
}
