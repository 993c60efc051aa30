package app

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/iptables"
	"github.com/svcproxy/svcproxy/internal/ipvs"
	"github.com/svcproxy/svcproxy/internal/nftables"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/userspace"
)

// builtMode is a mode that is part of this program.
type builtMode struct {
	dataplane.Mode
	// supports returns nil if this host can do the family in the mode, else what is
	// missing, and the remedy.
	supports func(context.Context, plan.Family) error
}

// builtModes are the modes of this build, set up as c says: the one place that knows
// them.
func builtModes(c *config.Config) []builtMode {
	return []builtMode{
		{iptables.Mode(), iptables.Supports},
		{nftables.Mode(), nftables.Supports},
		{ipvs.Mode(ipvsOptions(c)), ipvs.Supports},
		{userspace.Mode(userspaceOptions(c)), userspace.Supports},
	}
}

func ipvsOptions(c *config.Config) ipvs.Options {
	return ipvs.Options{
		Scheduler: c.IPVS.Scheduler, Exclude: c.IPVS.ExcludeCIDRs, StrictARP: c.IPVS.StrictARP,
		TCPTimeout: c.IPVS.TCPTimeout, TCPFinTimeout: c.IPVS.TCPFinTimeout, UDPTimeout: c.IPVS.UDPTimeout,
		DrainTimeout: c.IPVS.DrainTimeout,
	}
}

// families returns the families that this host can do in the mode; why says what
// keeps IPv6 from it, nil if it can.
func (m builtMode) families(ctx context.Context, h host.Host) (out []plan.Family, why error) {
	out = []plan.Family{plan.IPv4}
	if err := h.IPv6(); err != nil {
		return out, err
	}
	if err := m.supports(ctx, plan.IPv6); err != nil {
		return out, err
	}
	return plan.Families[:], nil
}

// modeNamed returns the mode that c asks for, or an error that says what to use instead.
func modeNamed(c *config.Config) (builtMode, error) {
	modes := builtModes(c)
	for _, m := range modes {
		if m.Name == c.Mode {
			return m, nil
		}
	}
	var names []string
	for _, m := range modes {
		names = append(names, m.Name)
	}
	return builtMode{}, fmt.Errorf("mode %s is not in this build yet; choose one that is with --proxy-mode or the field mode: %s",
		c.Mode, strings.Join(names, ", "))
}

// modeReport is what "svcproxy modes" says of one mode.
type modeReport struct {
	Name string `json:"name"`
	// Built: the mode is part of this program.
	Built bool `json:"built"`
	// Supported: it would run here.
	Supported bool `json:"supported"`
	Default   bool `json:"default"`
	// Missing is what stands in its way, and the remedy.
	Missing string `json:"missing,omitempty"`
	// Limits are what some Services cannot have here although it would run.
	Limits []string `json:"limits,omitempty"`
}

func newModes(env Env) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "modes [flags]",
		Short: "Tell which proxy modes this host can do, and what others lack",
		Args:  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			write, err := writerFor(output, writeModes)
			if err != nil {
				return err
			}
			return write(env.Stdout, reportModes(cmd.Context()))
		},
	}
	addOutput(cmd, &output)
	return cmd
}

func reportModes(ctx context.Context) []modeReport {
	built := builtModes(&config.Config{}) // with the defaults of all settings
	var out []modeReport
	for _, name := range config.Modes {
		r := modeReport{Name: name, Default: name == config.IPTables}
		i := slices.IndexFunc(built, func(m builtMode) bool { return m.Name == name })
		switch {
		case i < 0:
			r.Missing = "it is not in this build yet"
		default:
			r.Built = true
			if err := built[i].Supported(ctx); err != nil {
				r.Missing = err.Error()
			} else {
				r.Supported = true
				if built[i].Limits != nil {
					r.Limits = built[i].Limits(ctx)
				}
			}
		}
		out = append(out, r)
	}
	return out
}

func writeModes(w io.Writer, modes []modeReport) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "MODE\tHERE\tWHAT IS MISSING")
	for _, m := range modes {
		here := "no"
		if m.Supported {
			here = "yes"
		}
		name := m.Name
		if m.Default {
			name += " (default)"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", name, here, m.Missing+strings.Join(m.Limits, "; "))
	}
	return t.Flush()
}

// addOutput adds -o, which every command that prints a table has.
func addOutput(cmd *cobra.Command, to *string) {
	cmd.Flags().StringVarP(to, "output", "o", "text", "`form` of the output: text or json")
}

// writerFor returns what writes a value in the form that -o asks for.
func writerFor[T any](output string, text func(io.Writer, T) error) (func(io.Writer, T) error, error) {
	switch output {
	case "text":
		return text, nil
	case "json":
		return func(w io.Writer, v T) error {
			e := json.NewEncoder(w)
			e.SetIndent("", "  ")
			return e.Encode(v)
		}, nil
	}
	return nil, fmt.Errorf("flag --output: %q is no form of output; use text or json", output)
}
