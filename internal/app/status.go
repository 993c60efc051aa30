package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/svcproxy/svcproxy/internal/choice"
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/probe"
	"github.com/svcproxy/svcproxy/internal/takeover"
)

// status is what a running proxy says of itself at /status.
type status struct {
	Version string       `json:"version"`
	Node    string       `json:"node"`
	Started time.Time    `json:"started"`
	Config  configStatus `json:"config"`
	// Sources are where the facts come from.
	Sources   []string         `json:"sources"`
	Services  int              `json:"services"`
	Endpoints int              `json:"endpoints"`
	Loop      dataplane.Status `json:"loop"`
	// Choice is how the mode was chosen, where the configuration leaves a choice.
	Choice *choice.Result `json:"choice,omitempty"`
	// Takeover is how this mode stands to others on the node.
	Takeover takeover.Status `json:"takeover,omitzero"`
	// HealthChecks is how the endpoints stand that are probed.
	HealthChecks probe.Status `json:"healthChecks,omitzero"`
	// Problems are faults of the host, of manifests and of the configuration that
	// last until somebody mends them.
	Problems []string `json:"problems,omitempty"`
}

// configStatus is how the configuration stands.
type configStatus struct {
	File   string    `json:"file,omitempty"`
	Loaded time.Time `json:"loaded"` // what is in force
	// Error: the file is invalid now; what was loaded before stays in force.
	Error string `json:"error,omitempty"`
	// Restart lists fields of the file that take effect after a restart only.
	Restart []string `json:"restart,omitempty"`
}

func newStatus(env Env) *cobra.Command {
	flags := config.NewFlags()
	var output, address string
	cmd := &cobra.Command{
		Use:   "status [flags]",
		Short: "Ask the running proxy how it is",
		Long: `status asks the proxy that runs on this host, at its metrics address. Give the
--config that it runs with, or the address, if that is not 127.0.0.1:10249.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			write, err := writerFor(output, writeStatus)
			if err != nil {
				return err
			}
			s, err := askStatus(cmd.Context(), env, flags, address)
			if err != nil {
				return err
			}
			return write(env.Stdout, s)
		},
	}
	flags.Register(cmd.Flags())
	hideFlags(cmd, func(flag string) bool { return flag != "config" })
	cmd.Flags().StringVar(&address, "address", "", "`IP:port` of the proxy's metrics server")
	addOutput(cmd, &output)
	return cmd
}

// askStatus fetches the status from address, or from where the configuration puts
// it.
func askStatus(ctx context.Context, env Env, flags *config.Flags, address string) (status, error) {
	var s status
	if address == "" {
		c, _, err := flags.Load(env.ReadFile)
		if err != nil {
			return s, err
		}
		if !c.Metrics.IsValid() {
			return s, errors.New("the proxy's metrics server is switched off by --metrics-port=0, and it is what answers")
		}
		address = reachable(c.Metrics)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	url := "http://" + address + "/status"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return s, fmt.Errorf("flag --address: %w", err)
	}
	r, err := http.DefaultClient.Do(request)
	if err != nil {
		return s, fmt.Errorf("ask the proxy: %w; is it running, with this metrics address?", err)
	}
	defer func() { _ = r.Body.Close() }()
	if r.StatusCode != http.StatusOK {
		return s, fmt.Errorf("ask the proxy: %s answered %s; is it svcproxy?", url, r.Status)
	}
	if err := json.NewDecoder(r.Body).Decode(&s); err != nil {
		return s, fmt.Errorf("read the answer of %s: %w", url, err)
	}
	return s, nil
}

// reachable is an address to reach a server that listens on a, perhaps on all
// addresses.
func reachable(a netip.AddrPort) string {
	if !a.Addr().IsUnspecified() {
		return a.String()
	}
	host := "127.0.0.1"
	if a.Addr().Is6() {
		host = "::1"
	}
	return net.JoinHostPort(host, fmt.Sprint(a.Port()))
}

func writeStatus(w io.Writer, s status) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	line := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	line("node", "%s", s.Node)
	line("version", "%s, started %s", s.Version, s.Started.Format(time.RFC3339))
	line("mode", "%s, %s", s.Loop.Mode, strings.Join(s.Loop.Families, " and "))
	if s.Choice != nil {
		line("", "%s", s.Choice)
	}
	line("sources", "%s; last confirmed %s ago", strings.Join(s.Sources, ", "), s.Loop.FactsAge.Round(time.Second))
	line("holds", "%d Services, %d endpoints; %d Service ports planned", s.Services, s.Endpoints, s.Loop.ServicePorts)
	switch {
	case len(s.Loop.Waiting) > 0:
		line("kernel", "not programmed yet, waiting for: %s", strings.Join(s.Loop.Waiting, "; "))
	case !s.Loop.Synced:
		line("kernel", "not programmed yet")
	case !s.Loop.PendingSince.IsZero():
		line("kernel", "behind since %s", s.Loop.PendingSince.Format(time.RFC3339))
	default:
		line("kernel", "up to date since %s", s.Loop.LastSuccess.Format(time.RFC3339))
	}
	if s.Loop.LastError != "" {
		line("last error", "%s (%d in a row)", s.Loop.LastError, s.Loop.Failures)
	}
	if len(s.Takeover.InForce) > 0 {
		line("other modes", "still in force: %s", strings.Join(s.Takeover.InForce, ", "))
	}
	if s.Takeover.Draining != "" {
		line("other modes", "%s", s.Takeover.Draining)
	}
	for _, q := range s.Loop.Quarantined {
		line("quarantined", "%s %s %s since %s: %s", q.Service, q.Protocol, q.Family, q.Since.Format(time.RFC3339), q.Error)
	}
	if s.Loop.Interference > 0 {
		line("interference", "repaired %d so far, last: %s", s.Loop.Interference, s.Loop.LastInterference)
	}
	if s.HealthChecks.Targets > 0 {
		line("health checks", "%d places probed, %d endpoints fail; the last probe was %s late", s.HealthChecks.Targets, len(s.HealthChecks.Failing)+s.HealthChecks.Untold, s.HealthChecks.Late.Round(time.Millisecond))
	}
	for _, f := range s.HealthChecks.Failing {
		line("", "%s of %s fails since %s: %s", f.Endpoint, f.Service, f.Since.Format(time.RFC3339), f.Reason)
	}
	for i, k := range s.Loop.Kernel {
		line(map[bool]string{true: "kernel settings"}[i == 0], "%s", k)
	}
	if s.Config.File != "" {
		line("configuration", "%s, loaded %s", s.Config.File, s.Config.Loaded.Format(time.RFC3339))
	}
	if s.Config.Error != "" {
		line("", "REJECTED, what was loaded stays in force: %s", s.Config.Error)
	}
	if len(s.Config.Restart) > 0 {
		line("", "waiting for a restart: %s", strings.Join(s.Config.Restart, ", "))
	}
	for _, p := range s.Problems {
		line("problem", "%s", p)
	}
	return t.Flush()
}
