package health

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/pprof"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Diagnostics is what the metrics address serves. Functions may be nil; their
// paths then answer 404.
type Diagnostics struct {
	Program string // in the texts of /flagz and /statusz
	Version string
	Mode    string
	Started time.Time
	Metrics http.Handler
	// Config returns the configuration in force as kube-proxy's v1alpha1 object.
	Config func() (any, error)
	// Status returns the process's state, see the status command.
	Status func() any
	// Flags returns the command line's flags with their values.
	Flags func() map[string]string
	// SetVerbosity changes the log level, as -v does.
	SetVerbosity func(string) error
	Profiling    bool // serve pprof and the change of verbosity
}

// configName is the key of the configuration in /configz.
const configName = "kubeproxy.config.k8s.io"

// Handler serves all paths.
func (d Diagnostics) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { text(w, d.Mode) })
	checks := &indicators{}
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		checks.pings.Add(1)
		ping(w, r)
	})
	mux.HandleFunc("/healthz/ping", func(w http.ResponseWriter, _ *http.Request) { text(w, "ok") })
	if d.Metrics != nil {
		mux.Handle("/metrics", d.Metrics)
		mux.Handle("/metrics/slis", checks)
	}
	if d.Config != nil {
		mux.HandleFunc("/configz", d.configz)
	}
	if d.Status != nil {
		mux.HandleFunc("/status", func(w http.ResponseWriter, _ *http.Request) { indented(w, d.Status()) })
	}
	if d.Flags != nil {
		mux.HandleFunc("/flagz", d.flagz)
	}
	mux.HandleFunc("/statusz", d.statusz)
	if d.Profiling {
		d.profiling(mux)
	}
	return mux
}

func (d Diagnostics) profiling(mux *http.ServeMux) {
	mux.HandleFunc("/debug/pprof", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/debug/pprof/", http.StatusMovedPermanently)
	})
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	if d.SetVerbosity != nil {
		mux.HandleFunc("/debug/flags", func(w http.ResponseWriter, _ *http.Request) {
			text(w, "/debug/flags/v (PUT a number to change the log level)\n")
		})
		mux.HandleFunc("PUT /debug/flags/v", d.setVerbosity)
	}
}

func (d Diagnostics) setVerbosity(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(io.LimitReader(r.Body, 64))
	if err != nil {
		http.Error(w, "read the log level: "+err.Error(), http.StatusBadRequest)
		return
	}
	v := strings.TrimSpace(string(b))
	if err := d.SetVerbosity(v); err != nil {
		http.Error(w, fmt.Sprintf("set the log level to %q: %v", v, err), http.StatusBadRequest)
		return
	}
	text(w, fmt.Sprintf("successfully set klog.logging.verbosity to %s", v))
}

func (d Diagnostics) configz(w http.ResponseWriter, _ *http.Request) {
	c, err := d.Config()
	if err != nil {
		http.Error(w, "read the configuration in force: "+err.Error(), http.StatusInternalServerError)
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{configName: c})
}

func (d Diagnostics) flagz(w http.ResponseWriter, _ *http.Request) {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s flagz\n%s\n", d.Program, forPeople)
	flags := d.Flags()
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		fmt.Fprintf(&b, "%s=%s\n", name, flags[name])
	}
	text(w, b.String())
}

func (d Diagnostics) statusz(w http.ResponseWriter, _ *http.Request) {
	text(w, fmt.Sprintf("\n%s statusz\n%s\nStarted: %s\nUp: %s\nGo version: %s\nBinary version: %s\nMode: %s\n", d.Program, forPeople,
		d.Started.Format(time.RFC1123), time.Since(d.Started).Round(time.Second), runtime.Version(), d.Version, d.Mode))
}

const forPeople = "Warning: this page is for people; its format may change. Programs read /metrics and /status.\n"

// ping says that the process answers, no more; the health address knows the rest.
func ping(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Has("verbose") {
		text(w, "[+]ping ok\nhealthz check passed\n")
		return
	}
	text(w, "ok")
}

// indicators are the service level indicators of /metrics/slis: how the checks of
// /healthz on the metrics address went. There is one check, and it cannot fail.
type indicators struct{ pings atomic.Int64 }

func (i *indicators) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodDelete {
		i.pings.Store(0)
		text(w, "metrics reset\n")
		return
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	n := i.pings.Load()
	if n == 0 {
		return // not checked yet
	}
	fmt.Fprintf(w, `# HELP kubernetes_healthcheck Result of the last health check, 1 for success.
# TYPE kubernetes_healthcheck gauge
kubernetes_healthcheck{name="ping",type="healthz"} 1
# HELP kubernetes_healthchecks_total Health checks by result.
# TYPE kubernetes_healthchecks_total counter
kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} %d
`, n)
}

func text(w http.ResponseWriter, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = io.WriteString(w, s)
}

// indented sends v as JSON that people can read too.
func indented(w http.ResponseWriter, v any) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, "encode the status: "+err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(append(b, '\n'))
}
