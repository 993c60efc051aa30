package health

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// figures is a Stats in memory.
type figures struct {
	mu sync.Mutex // guards m
	m  map[string]float64
}

func (f *figures) Add(metric string, v float64, labels ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.m == nil {
		f.m = map[string]float64{}
	}
	f.m[strings.Join(append([]string{metric}, labels...), " ")] += v
}

func (f *figures) Set(metric string, v float64, labels ...string) {
	f.Add(metric, v-f.get(strings.Join(append([]string{metric}, labels...), " ")), labels...)
}

func (f *figures) get(key string) float64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.m[key]
}

func get(h http.Handler, method, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
	return w
}

// decoded is the body of an answer as kube-proxy's readers see it.
func decoded(t *testing.T, w *httptest.ResponseRecorder) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &m); err != nil {
		t.Fatalf("%v in %s", err, w.Body)
	}
	return m
}

// expectation is what the health address shall answer.
type expectation struct {
	healthz, livez int
	healthy        bool
}

func expect(t *testing.T, h *Health, want expectation) {
	t.Helper()
	for path, code := range map[string]int{"/healthz": want.healthz, "/livez": want.livez} {
		w := get(h.Handler(), "GET", path)
		if b := decoded(t, w); w.Code != code || b["healthy"] != want.healthy {
			t.Errorf("%s answers %d healthy %v, want %d %v", path, w.Code, b["healthy"], code, want.healthy)
		}
	}
}

func TestHealth(t *testing.T) {
	good, stuck := expectation{200, 200, true}, expectation{503, 503, false}
	synctest.Test(t, func(t *testing.T) {
		stats := &figures{}
		h := New(Config{Families: plan.Families[:], SyncPeriod: 30 * time.Second, Stats: stats})
		expect(t, h, good) // nothing is judged before the first update
		h.Updated(time.Now())
		expect(t, h, good)
		h.Queued(time.Now())
		<-time.After(59 * time.Second)
		expect(t, h, good)
		h.Queued(time.Now()) // a later change does not hide the older one
		<-time.After(time.Second)
		expect(t, h, stuck)
		if h.Healthy() {
			t.Error("Healthy says yes")
		}
		h.Updated(time.Now())
		expect(t, h, good)
		h.SetSyncPeriod(time.Second)
		h.Queued(time.Now())
		<-time.After(2 * time.Second)
		expect(t, h, stuck)
		for key, want := range map[string]float64{
			"proxy_healthz_total 200": 4, "proxy_healthz_total 503": 2, "proxy_livez_total 200": 4, "proxy_livez_total 503": 2,
		} {
			if have := stats.get(key); have != want {
				t.Errorf("%s is %v, want %v", key, have, want)
			}
		}
	})
}

// Before the kernel was ever written, changes that wait too long count as well.
func TestFirstSyncThatNeverSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Config{Families: plan.Families[:]})
		h.Updated(time.Now()) // the loop starts
		h.Queued(time.Now())
		<-time.After(time.Minute)
		expect(t, h, expectation{503, 503, false})
	})
}

func TestNodeEligibility(t *testing.T) {
	eligible, why := true, ""
	h := New(Config{Families: []plan.Family{plan.IPv4}, Eligible: func() (bool, string) { return eligible, why }})
	h.Updated(time.Now())
	expect(t, h, expectation{200, 200, true})
	eligible, why = false, `there is no Node named "alder"`
	expect(t, h, expectation{503, 200, true})

	w := get(h.Handler(), "GET", "/healthz")
	b := decoded(t, w)
	if b["nodeEligible"] != false || !strings.Contains(w.Body.String(), "no Node named") {
		t.Errorf("have %s", w.Body)
	}
	if b := decoded(t, get(h.Handler(), "GET", "/livez")); slices.Contains(slices.Collect(maps.Keys(b)), "nodeEligible") {
		t.Errorf("/livez speaks of the node: %v", b)
	}
}

func TestHealthBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Config{Families: plan.Families[:]})
		start := time.Now()
		if b := decoded(t, get(h.Handler(), "GET", "/healthz")); b["status"] != nil {
			t.Errorf("status before the first update: %v", b["status"])
		}
		h.Updated(start)
		<-time.After(10 * time.Second)
		now := time.Now().Format(time.RFC3339)
		w := get(h.Handler(), "POST", "/healthz")
		b := decoded(t, w)
		want := map[string]any{"lastUpdated": start.Format(time.RFC3339), "healthy": true}
		for _, f := range []string{"IPv4", "IPv6"} {
			if have := b["status"].(map[string]any)[f].(map[string]any); !maps.Equal(have, want) {
				t.Errorf("status of %s is %v, want %v", f, have, want)
			}
		}
		if b["lastUpdated"] != now || b["currentTime"] != now || b["nodeEligible"] != true {
			t.Errorf("have %s", w.Body)
		}
		if ct, opt := w.Header().Get("Content-Type"), w.Header().Get("X-Content-Type-Options"); ct != "application/json" || opt != "nosniff" {
			t.Errorf("headers %q %q", ct, opt)
		}
		h.Queued(time.Now())
		<-time.After(time.Minute)
		if b := decoded(t, get(h.Handler(), "GET", "/livez")); b["lastUpdated"] != start.Format(time.RFC3339) {
			t.Errorf("lastUpdated of a bad answer is %v, want that of the last sync", b["lastUpdated"])
		}
	})
}

func TestOldViewIsSaidAndDoesNotHurt(t *testing.T) {
	h := New(Config{
		Families: []plan.Family{plan.IPv4},
		Age:      func() time.Duration { return 200 * time.Second }, AgeLimit: 150 * time.Second,
	})
	w := get(h.Handler(), "GET", "/healthz")
	if w.Code != 200 || !strings.Contains(w.Body.String(), "view is old") || !strings.Contains(w.Body.String(), `"viewAgeSeconds":200`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestReady(t *testing.T) {
	h := New(Config{Families: []plan.Family{plan.IPv4}})
	h.Updated(time.Now())
	if w := get(h.Handler(), "GET", "/readyz"); w.Code != 503 {
		t.Errorf("ready before the first sync: %s", w.Body)
	}
	h.Queued(time.Now())
	h.Updated(time.Now())
	if w := get(h.Handler(), "GET", "/readyz"); w.Code != 200 {
		t.Errorf("not ready after the first sync: %s", w.Body)
	}
	missing := []string{"api Service"}
	h = New(Config{Families: []plan.Family{plan.IPv4}, Ready: func() (bool, []string) { return len(missing) == 0, missing }})
	if w := get(h.Handler(), "GET", "/readyz"); w.Code != 503 || w.Body.String() != `{"ready":false,"missing":["api Service"]}` {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	missing = nil
	if w := get(h.Handler(), "GET", "/readyz"); w.Code != 200 || w.Body.String() != `{"ready":true}` {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestOtherPathsDoNotExist(t *testing.T) {
	h := New(Config{Families: []plan.Family{plan.IPv4}}).Handler()
	for _, path := range []string{"/", "/healthz/", "/healthz/ping", "/metrics", "/livez/x"} {
		if w := get(h, "GET", path); w.Code != 404 {
			t.Errorf("%s answers %d", path, w.Code)
		}
	}
}
