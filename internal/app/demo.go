package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/demo"
	"github.com/svcproxy/svcproxy/internal/plan"
)

func newDemo(env Env) *cobra.Command {
	var mode, manifests string
	cmd := &cobra.Command{
		Use:   "demo [flags]",
		Short: "Build a small network, serve an example in it and send real requests",
		Long: `demo builds a node, its pods, other nodes' pods, a client and an outside host out
of network namespaces, runs the proxy on the node, sends real requests to every
Service, says who answered and what the kernel holds, and takes everything down
again. Nothing outside its namespaces is touched. It needs root.

The node is called node-1 and has the addresses 172.16.65.181, 172.17.0.1, 10.244.0.0
and 10.244.0.1; pods are recognised by the ranges 10.244.0.0/16 and fd00:244::/48.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return runDemo(cmd.Context(), env, mode, manifests) },
	}
	cmd.Flags().StringVar(&mode, "mode", config.IPTables, "proxy `mode`")
	cmd.Flags().StringVar(&manifests, "manifests", "", "`directory` of Services and EndpointSlices to serve instead of the example")
	return cmd
}

func runDemo(ctx context.Context, env Env, mode, manifests string) error {
	if _, err := modeNamed(&config.Config{Mode: mode}); err != nil {
		return err
	}
	if err := demo.Supported(); err != nil {
		return err
	}
	if manifests == "" {
		dir, err := writeReference()
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		manifests = dir
	}
	d := demo.Demo{Mode: mode, Args: demoFlags(mode, manifests), Out: env.Stdout}
	var err error
	if d.Program, err = env.Executable(); err != nil {
		return fmt.Errorf("find this program's file: %w", err)
	}
	if d.Plan, err = demoPlan(ctx, env, d.Args); err != nil {
		return err
	}
	if len(d.Plan.Services) == 0 {
		return fmt.Errorf("no Service in %s can be served; \"svcproxy plan --why --manifests %s\" says why", manifests, manifests)
	}
	passed, err := d.Run(ctx)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(env.Stdout, "DEMO: interrupted")
		return exitStatus(exitFailed)
	case err != nil:
		fmt.Fprintln(env.Stdout, "DEMO: FAIL")
		return err
	case !passed:
		fmt.Fprintln(env.Stdout, "DEMO: FAIL")
		return exitStatus(exitFailed)
	}
	fmt.Fprintln(env.Stdout, "DEMO: PASS")
	return nil
}

// writeReference puts the reference example into a directory of its own.
func writeReference() (string, error) {
	dir, err := os.MkdirTemp("", "svcproxy-demo-")
	if err != nil {
		return "", fmt.Errorf("make a directory for the example: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "reference.yaml"), demo.Reference(), 0o644); err != nil {
		return "", fmt.Errorf("write the example: %w", errors.Join(err, os.RemoveAll(dir)))
	}
	return dir, nil
}

// demoFlags are the proxy's, for the node of the demo. Settings that belong to the
// whole host are left alone.
func demoFlags(mode, manifests string) []string {
	return []string{
		"--manifests=" + manifests, "--proxy-mode=" + mode, "--hostname-override=" + demo.NodeName,
		"--cluster-cidr=" + demo.PodRanges(), "--iptables-min-sync-period=0", "--ipvs-min-sync-period=0",
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
		"--oom-score-adj=0",
	}
}

// demoPlan computes what a proxy with these flags should do on the demo's node.
func demoPlan(ctx context.Context, env Env, flags []string) (*plan.Plan, error) {
	c, _, err := loadConfig(env, flags)
	if err != nil {
		return nil, err
	}
	s, err := survey(ctx, env, c, surveyOptions{node: demo.NodeName, addrs: demo.NodeAddrs(), families: plan.Families[:]})
	if err != nil {
		return nil, err
	}
	return s.planner.Update().Plan, nil
}
