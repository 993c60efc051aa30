package app

import (
	"fmt"
	"io"
	"net/netip"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// listedInPlan reports whether the help texts of plan and diff list a flag of the
// proxy; the others are accepted too.
func listedInPlan(flag string) bool {
	switch flag {
	case "config", "manifests", "kubeconfig", "master", "hostname-override", "proxy-mode", "cluster-cidr",
		"nodeport-addresses", "service-proxy-name":
		return true
	}
	return false
}

// planned is a plan and what was remarked about the objects behind it.
type planned struct {
	Plan  *plan.Plan  `json:"plan"`
	Notes []plan.Note `json:"notes,omitempty"`
}

func newPlan(env Env) *cobra.Command {
	flags := config.NewFlags()
	var output string
	var why bool
	var addrs []string
	cmd := &cobra.Command{
		Use:   "plan [flags]",
		Short: "Print what the proxy would do: each address, where it leads, for whom",
		Long: `plan computes and prints what the proxy would make this node do, without touching
the kernel: every Service port with its addresses, where packets from pods, from the
node and from outside go, and its endpoints. It takes all flags of "svcproxy run".`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			write, err := writerFor(output, writePlanned)
			if err != nil {
				return err
			}
			host, err := parseAddrs(addrs)
			if err != nil {
				return err
			}
			c, warnings, err := flags.Load(env.ReadFile)
			warn(env, warnings)
			if err != nil {
				return err
			}
			s, err := survey(cmd.Context(), env, c, surveyOptions{addrs: host, everything: why})
			if err != nil {
				return err
			}
			p := planned{Plan: s.planner.Update().Plan}
			if why {
				p.Notes = s.planner.Why(nil)
			}
			return write(env.Stdout, p)
		},
	}
	registerPlanFlags(cmd, flags)
	cmd.Flags().BoolVar(&why, "why", false, "also say why objects, or parts of them, have no effect")
	cmd.Flags().StringSliceVar(&addrs, "addresses", nil, "plan for a node whose interfaces have these `addresses`, instead of this host's")
	addOutput(cmd, &output)
	return cmd
}

// registerPlanFlags adds the proxy's flags, of which only some appear in the help
// text.
func registerPlanFlags(cmd *cobra.Command, flags *config.Flags) {
	flags.Register(cmd.Flags())
	hideFlags(cmd, func(flag string) bool { return !listedInPlan(flag) })
}

// hideFlags keeps flags out of a help text.
func hideFlags(cmd *cobra.Command, hide func(flag string) bool) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Hidden = hide(f.Name) })
}

func parseAddrs(texts []string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, s := range texts {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("flag --addresses: %q is not an IP address; give some like 192.0.2.11,2001:db8::11", s)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}

// warn prints warnings about the configuration for people at a terminal.
func warn(env Env, warnings []string) {
	for _, w := range warnings {
		fmt.Fprintln(env.Stderr, "svcproxy: warning:", w)
	}
}

func writePlanned(w io.Writer, p planned) error {
	if err := plan.Write(w, p.Plan); err != nil {
		return err
	}
	if p.Notes == nil {
		return nil
	}
	fmt.Fprintln(w)
	if len(p.Notes) == 0 {
		_, err := fmt.Fprintln(w, "Nothing was ignored.")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, n := range p.Notes {
		fmt.Fprintf(t, "%s\t%s\t%s\n", noteObject(n), n.Reason, n.Message)
	}
	return t.Flush()
}

// noteObject names a note's object, as "Service default/web".
func noteObject(n plan.Note) string {
	return n.Kind + " " + strings.TrimPrefix(n.Namespace+"/"+n.Name, "/")
}
