package takeover

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Rival is a kube-proxy on this node.
type Rival struct {
	PID  int    // 0: not known
	Mode string // "": not known
}

func (r *Rival) String() string {
	switch {
	case r.PID != 0 && r.Mode != "":
		return fmt.Sprintf("process %d in mode %s", r.PID, r.Mode)
	case r.PID != 0:
		return fmt.Sprintf("process %d", r.PID)
	}
	return fmt.Sprintf("it answers on %s, in mode %s", metricsAddress, r.Mode)
}

// metricsAddress is where a kube-proxy says its mode, unless it is told otherwise.
const metricsAddress = "127.0.0.1:10249"

// Finder looks for a kube-proxy in this network namespace: among the processes that
// this one can see, and at kube-proxy's metrics address, which also finds one that is
// part of another program (k3s) or hidden in a container. The zero value is ready.
type Finder struct {
	Proc   string        // instead of /proc
	Client *http.Client  // nil: a plain one
	Limit  time.Duration // for an answer; 0: 1 s
}

// Find returns what it found, nil for nothing.
func (f Finder) Find(ctx context.Context) *Rival {
	pid, mode := f.process(), f.answer(ctx)
	if pid == 0 && mode == "" {
		return nil
	}
	return &Rival{PID: pid, Mode: mode}
}

// process returns the id of a process called kube-proxy in this network namespace.
func (f Finder) process() int {
	proc := f.Proc
	if proc == "" {
		proc = "/proc"
	}
	own, err := os.Readlink(filepath.Join(proc, "self/ns/net"))
	if err != nil {
		return 0
	}
	all, err := os.ReadDir(proc)
	if err != nil {
		return 0
	}
	for _, e := range all {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		name, err := os.ReadFile(filepath.Join(proc, e.Name(), "comm"))
		if err != nil || strings.TrimSpace(string(name)) != "kube-proxy" {
			continue
		}
		if ns, err := os.Readlink(filepath.Join(proc, e.Name(), "ns/net")); err == nil && ns == own {
			return pid
		}
	}
	return 0
}

// Unfit says why a clean-up now would not last, or would take what is in use, and what to
// do; "" if nothing does. kubeProxy: it is of what kube-proxy left alone; kept: a
// kube-proxy that runs is meant to.
func (f Finder) Unfit(ctx context.Context, kubeProxy, kept bool) string {
	if rival := f.Find(ctx); rival != nil && !kept {
		return fmt.Sprintf("a kube-proxy runs on this node (%s) and writes its rules again: end it first", rival)
	}
	if mode := f.svcproxy(ctx); mode != "" && !kubeProxy {
		return fmt.Sprintf("a svcproxy runs on this node (it answers on %s, in mode %s) and writes its rules again: end it first", metricsAddress, mode)
	}
	return ""
}

// svcproxy returns the mode of a svcproxy at the metrics address, "" for none.
func (f Finder) svcproxy(ctx context.Context) string {
	if code, _ := f.get(ctx, "/status"); code != http.StatusOK {
		return ""
	}
	code, mode := f.get(ctx, "/proxyMode")
	if code != http.StatusOK {
		return ""
	}
	return strings.TrimSpace(mode)
}

// answer returns the mode that a kube-proxy at the metrics address says it is in.
// svcproxy has a page that kube-proxy has not, so that it does not find itself.
func (f Finder) answer(ctx context.Context) string {
	if code, _ := f.get(ctx, "/status"); code != http.StatusNotFound {
		return ""
	}
	code, body := f.get(ctx, "/proxyMode")
	mode := strings.TrimSpace(body)
	if code != http.StatusOK {
		return ""
	}
	switch mode {
	case "userspace", "iptables", "ipvs", "nftables":
		return mode
	}
	return ""
}

// Programmed reports whether the kube-proxy at the metrics address has brought its rules
// into the kernel since it started: those of each family for which it was asked to.
func (f Finder) Programmed(ctx context.Context) bool {
	code, body := f.read(ctx, "/metrics", 16<<20)
	if code != http.StatusOK {
		return false
	}
	queued, done := map[string]bool{}, map[string]bool{} // by labels
	for line := range strings.Lines(body) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if at, err := strconv.ParseFloat(value, 64); err != nil || at <= 0 {
			continue
		}
		if labels, ok := strings.CutPrefix(name, "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"); ok {
			queued[labels] = true
		}
		if labels, ok := strings.CutPrefix(name, "kubeproxy_sync_proxy_rules_last_timestamp_seconds"); ok {
			done[labels] = true
		}
	}
	for labels := range queued {
		if !done[labels] {
			return false
		}
	}
	return len(done) > 0
}

// get returns the status and the beginning of the body; 0 if nobody answers.
func (f Finder) get(ctx context.Context, path string) (code int, body string) {
	return f.read(ctx, path, 64)
}

// read is get with more of the body.
func (f Finder) read(ctx context.Context, path string, most int64) (code int, body string) {
	limit := f.Limit
	if limit == 0 {
		limit = time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+metricsAddress+path, nil)
	if err != nil {
		return 0, ""
	}
	client := f.Client
	if client == nil {
		client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	}
	res, err := client.Do(req)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(res.Body, most))
	if err != nil {
		return 0, ""
	}
	return res.StatusCode, string(text)
}
