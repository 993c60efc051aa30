// Package health answers whether the node's Service proxy works: /healthz, /livez
// and /readyz for load balancers and kubelets, the health-check node ports of
// Services, and the metrics address with what belongs to it. Paths, codes, headers
// and bodies are kube-proxy's; what we add to a body is under "detail".
//
// It serves plain HTTP without authentication, as kube-proxy does, and knows
// nothing of how Services are programmed.
package health

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Config is what Health asks for its answers. Only Families is required.
type Config struct {
	Families []plan.Family
	// SyncPeriod: a change that waits for twice as long makes the proxy unhealthy;
	// 0: 30 s.
	SyncPeriod time.Duration
	// Eligible reports whether the node should receive traffic at all, and if
	// not, why: it is being deleted, or unknown. nil: it should.
	Eligible func() (ok bool, why string)
	// Ready reports whether the whole plan was in the kernel once, and what is
	// still awaited. nil: from the first Updated on that follows a Queued.
	Ready func() (ok bool, missing []string)
	// Age is the time since the facts were last confirmed; older than AgeLimit is
	// remarked in the detail. It does not make the proxy unhealthy: without an API
	// server all nodes would leave the load balancers at once, and the old view is
	// the best there is.
	Age      func() time.Duration
	AgeLimit time.Duration

	Stats Stats             // nil: nothing is counted
	Notes func([]plan.Note) // remarks on Services; nil: nobody reads them
	Log   *slog.Logger
	// Listen opens the sockets of Services' health-check ports; nil: net.Listen.
	Listen ListenFunc
}

// Stats receives figures by the metric's name, as the dataplane's Stats does.
type Stats interface {
	Add(metric string, v float64, labels ...string)
	Set(metric string, v float64, labels ...string)
}

type noStats struct{}

func (noStats) Add(string, float64, ...string) {}
func (noStats) Set(string, float64, ...string) {}

// Health collects what is known and answers from it. Its methods are safe for
// concurrent use; the dataplane's loop calls Queued, Updated and SetPorts.
type Health struct {
	cfg   Config // immutable after New
	ports *ports

	mu      sync.Mutex // guards all below
	limit   time.Duration
	queued  time.Time // of the oldest change that is not in the kernel; zero: none
	updated time.Time // zero: never
	synced  bool
}

// New returns a Health that listens nowhere.
func New(cfg Config) *Health {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Eligible == nil {
		cfg.Eligible = func() (bool, string) { return true, "" }
	}
	if cfg.Stats == nil {
		cfg.Stats = noStats{}
	}
	if cfg.Notes == nil {
		cfg.Notes = func([]plan.Note) {}
	}
	if cfg.Listen == nil {
		cfg.Listen = listen
	}
	h := &Health{cfg: cfg}
	h.SetSyncPeriod(cfg.SyncPeriod)
	h.ports = newPorts(h)
	return h
}

// SetSyncPeriod changes how long a change may wait, to twice d; 0: 30 s.
func (h *Health) SetSyncPeriod(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.limit = 2 * cmp.Or(max(d, 0), 30*time.Second)
}

// Queued says that a change waits for the kernel since at. An older one stays.
func (h *Health) Queued(at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.queued.IsZero() || at.Before(h.queued) {
		h.queued = at
	}
}

// Updated says that everything known at the time is in the kernel.
func (h *Health) Updated(at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.synced = h.synced || !h.queued.IsZero()
	h.updated = at
	if !h.queued.After(at) {
		h.queued = time.Time{}
	}
}

// SetPorts replaces the health-check ports of all Services. Opening and closing
// them happens in Run.
func (h *Health) SetPorts(p map[plan.HealthID]plan.HealthPort, node *plan.Node) { h.ports.set(p, node) }

// Run serves the health-check ports of Services until ctx ends.
func (h *Health) Run(ctx context.Context) { h.ports.run(ctx) }

// Healthy reports whether the kernel follows the facts: no change waits longer
// than twice the sync period. Before the first Updated nothing is judged.
func (h *Health) Healthy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.healthy(time.Now())
}

func (h *Health) healthy(now time.Time) bool {
	return h.updated.IsZero() || h.queued.IsZero() || now.Sub(h.queued) < h.limit
}

// Handler serves /healthz, /livez and /readyz and nothing else.
func (h *Health) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { h.answer(w, true) })
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { h.answer(w, false) })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) { h.ready(w) })
	return mux
}

// body is the answer of /healthz and /livez.
type body struct {
	LastUpdated  time.Time             `json:"lastUpdated"`
	CurrentTime  time.Time             `json:"currentTime"`
	NodeEligible *bool                 `json:"nodeEligible,omitempty"` // only of /healthz
	Healthy      bool                  `json:"healthy"`
	Status       map[string]familyBody `json:"status,omitempty"`
	Detail       *detail               `json:"detail,omitempty"`
}

type familyBody struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// detail is what kube-proxy does not say.
type detail struct {
	// Reasons are why the answer is not 200, or what to worry about otherwise.
	Reasons []string `json:"reasons,omitempty"`
	// ViewAgeSeconds is the time since the facts were last confirmed.
	ViewAgeSeconds float64 `json:"viewAgeSeconds"`
}

func (h *Health) answer(w http.ResponseWriter, withNode bool) {
	b, code := h.body(time.Now(), withNode)
	metric := "proxy_livez_total"
	if withNode {
		metric = "proxy_healthz_total"
	}
	h.cfg.Stats.Add(metric, 1, strconv.Itoa(code))
	writeJSON(w, code, b)
}

func (h *Health) body(now time.Time, withNode bool) (body, int) {
	h.mu.Lock()
	updated, queued, limit := h.updated, h.queued, h.limit
	healthy := h.healthy(now)
	h.mu.Unlock()

	b := body{LastUpdated: updated, CurrentTime: now, Healthy: healthy, Detail: h.detail()}
	if !updated.IsZero() {
		b.Status = map[string]familyBody{}
		for _, f := range h.cfg.Families {
			b.Status[f.String()] = familyBody{updated, healthy}
		}
	}
	code := http.StatusOK
	if !healthy {
		code = http.StatusServiceUnavailable
		b.Detail.Reasons = append(b.Detail.Reasons, fmt.Sprintf("a change waits for the kernel since %s, longer than %s: see /status on the metrics address or the log for the error",
			queued.Format(time.RFC3339), limit))
	}
	if withNode {
		ok, why := h.cfg.Eligible()
		b.NodeEligible = &ok
		if !ok {
			code = http.StatusServiceUnavailable
			b.Detail.Reasons = append(b.Detail.Reasons, why)
		}
	}
	if code == http.StatusOK {
		b.LastUpdated = now
	}
	return b, code
}

func (h *Health) detail() *detail {
	d := &detail{}
	if h.cfg.Age == nil {
		return d
	}
	age := h.cfg.Age()
	d.ViewAgeSeconds = age.Seconds()
	if h.cfg.AgeLimit > 0 && age > h.cfg.AgeLimit {
		d.Reasons = append(d.Reasons, fmt.Sprintf("view is old: the facts about the cluster were last confirmed %s ago, the limit is %s; "+
			"Services are forwarded as they were then", age.Round(time.Second), h.cfg.AgeLimit))
	}
	return d
}

// ready answers /readyz: whether this process has programmed everything once.
func (h *Health) ready(w http.ResponseWriter) {
	var ok bool
	var missing []string
	if h.cfg.Ready != nil {
		ok, missing = h.cfg.Ready()
	} else {
		h.mu.Lock()
		ok = h.synced
		h.mu.Unlock()
	}
	code := http.StatusOK
	if !ok {
		code = http.StatusServiceUnavailable
	}
	writeJSON(w, code, struct {
		Ready   bool     `json:"ready"`
		Missing []string `json:"missing,omitempty"`
	}{ok, missing})
}

// writeJSON sends v in one line.
func writeJSON(w http.ResponseWriter, code int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, "encode the answer: "+err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write(b) // a client that left is no error of ours
}
