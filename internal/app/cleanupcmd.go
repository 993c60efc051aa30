package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/takeover"
)

// kubeProxyPatience is how long a kube-proxy may take to program everything.
const kubeProxyPatience = 5 * time.Minute

// awaitKubeProxy returns once a kube-proxy on this node has programmed every Service, so
// that what is removed then is not missed.
func awaitKubeProxy(ctx context.Context, f takeover.Finder) error {
	ctx, cancel := context.WithTimeout(ctx, kubeProxyPatience)
	defer cancel()
	for !f.Programmed(ctx) {
		select {
		case <-ctx.Done():
			return errors.New("flag --keep-kube-proxy: no kube-proxy on this node says at 127.0.0.1:10249 that it has programmed its rules: start it, or leave the flag out to remove everything")
		case <-time.After(200 * time.Millisecond):
		}
	}
	return nil
}

// cleaning says whose objects to remove: by default everybody's.
type cleaning struct {
	kubeProxy bool   // only what kube-proxy left
	keep      string // not what a kube-proxy in this mode uses
}

func newCleanup(env Env) *cobra.Command {
	flags := config.NewFlags()
	var which cleaning
	cmd := &cobra.Command{
		Use:   "cleanup [flags]",
		Short: "Remove every trace of the proxy, and of kube-proxy, from the kernel",
		Long: `cleanup removes the rules and other objects of every mode, and kube-proxy's own, and
nothing else. It needs no API server and may be repeated. "svcproxy --cleanup" does
the same. Of kube-proxy that is chains of any age, its nftables tables, the device
kube-ipvs0 with its virtual servers, and ipsets.`,
		Example: `  svcproxy cleanup                 before svcproxy is taken off a node
  svcproxy cleanup --kube-proxy    while svcproxy runs, after kube-proxy was ended
  svcproxy cleanup --keep-kube-proxy=iptables    when kube-proxy is back, in iptables mode`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, warnings, err := flags.Load(env.ReadFile)
			warn(env, warnings)
			if err != nil {
				return err
			}
			return cleanup(cmd.Context(), c, newLog(env.Stderr, c.Log).Logger, which)
		},
	}
	registerPlanFlags(cmd, flags)
	cmd.Flags().StringVar(&which.keep, "keep-kube-proxy", "", "wait until a kube-proxy in this `mode` has programmed every Service, and spare what it uses")
	cmd.Flags().BoolVar(&which.kubeProxy, "kube-proxy", false, "only remove what kube-proxy has left, of any mode and age; what svcproxy programs, or has taken over, stays")
	cmd.MarkFlagsMutuallyExclusive("keep-kube-proxy", "kube-proxy")
	return cmd
}

// cleanup removes what every mode may have left; one that fails does not keep the
// others from it.
func cleanup(ctx context.Context, c *config.Config, log *slog.Logger, which cleaning) error {
	if which.keep != "" && !slices.Contains(config.Modes[:], which.keep) {
		return fmt.Errorf("flag --keep-kube-proxy: %q is not a mode; use %s", which.keep, strings.Join(config.Modes[:], ", "))
	}
	if which.keep != "" {
		if err := awaitKubeProxy(ctx, takeover.Finder{}); err != nil {
			return err
		}
	}
	unfit := takeover.Finder{}.Unfit(ctx, which.kubeProxy, which.keep != "")
	if unfit != "" && which.kubeProxy {
		return fmt.Errorf("flag --kube-proxy: nothing was removed: %s", unfit)
	}
	var errs []error
	for _, m := range builtModes(c) {
		remove := m.Cleanup
		switch {
		case which.kubeProxy:
			remove = m.CleanupKubeProxy
		case which.keep == m.Name, which.keep == config.IPVS && m.Name == config.IPTables: // it writes these rules too
			remove = m.CleanupOwn
		}
		if remove == nil {
			continue
		}
		if err := remove(ctx, modeEnv(c, log, nil, plan.Families[:])); err != nil {
			errs = append(errs, fmt.Errorf("remove the objects of mode %s: %w", m.Name, err))
		}
	}
	if i := slices.IndexFunc(errs, func(err error) bool { return errors.Is(err, fs.ErrPermission) }); i >= 0 {
		return fmt.Errorf("clean up: CAP_NET_ADMIN is missing; run as root: %w", errs[i])
	}
	if unfit != "" {
		errs = append(errs, errors.New("what is removed comes back: "+unfit+", then clean up again"))
	}
	return errors.Join(errs...)
}
