package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
)

func TestDelivers(t *testing.T) {
	variants(t, func(t *testing.T, v variant) {
		w := newWorld(t, apiserver.Options{}, v)
		w.put(service("web", "10.0.0.1"), service("headless", "None"), service("foreign", "10.0.0.2", proxyNameLabel, ""),
			slice("web-1", "web", "10.1.0.1"), node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), cidr("kubernetes", "10.0.0.0/16"))
		hidden := slice("headless-1", "headless", "10.1.0.2")
		metav1.SetMetaDataLabel(&hidden.ObjectMeta, corev1.IsHeadlessService, "")
		w.put(hidden)
		w.run(w.options())
		w.sink.mustSync(t)
		w.sink.mustHold(t, "d/web")
		w.sink.mustReach(t, "slice, node and CIDR", func() bool {
			return len(w.sink.slices) == 1 && w.sink.slices["d/web-1"] == "web 10.1.0.1" &&
				w.sink.node != nil && w.sink.node.Name == "n1" && slices.Equal(w.sink.cidrs, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")})
		})

		w.put(service("new", "10.0.0.3"), service("web", "10.0.0.9"), slice("web-1", "web", "10.1.0.1", "10.1.0.3"), cidr("more", "10.9.0.0/16"), node("n1", "192.0.2.9"))
		w.sink.mustHold(t, "d/new", "d/web")
		w.sink.mustReach(t, "changes", func() bool {
			return w.sink.services["d/web"] == "[10.0.0.9]" && w.sink.slices["d/web-1"] == "web 10.1.0.1,10.1.0.3" &&
				len(w.sink.cidrs) == 2 && w.sink.node != nil && w.sink.node.Addrs[0].String() == "192.0.2.9"
		})

		// An object that stops matching, or starts to, comes as a deletion or an
		// addition.
		w.put(service("web", "10.0.0.9", proxyNameLabel, "other"), service("foreign", "10.0.0.2"))
		w.sink.mustHold(t, "d/foreign", "d/new")
		w.put(service("new", "None"))
		w.sink.mustHold(t, "d/foreign")

		w.server.Delete("Service", "d", "foreign")
		w.server.Delete("EndpointSlice", "d", "web-1")
		w.server.Delete("Node", "", "n1")
		w.server.Delete("ServiceCIDR", "", "kubernetes")
		w.sink.mustHold(t)
		w.sink.mustReach(t, "deletions", func() bool {
			return len(w.sink.slices) == 0 && w.sink.node == nil && len(w.sink.cidrs) == 1
		})
		checkRequests(t, w, v)
	})
}

// checkRequests checks the selectors and the formats of what was asked.
func checkRequests(t *testing.T, w *world, v variant) {
	t.Helper()
	want := map[string][2]string{
		"Service":       {"!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"},
		"EndpointSlice": {"!service.kubernetes.io/headless", ""},
		"Node":          {"", "metadata.name=n1"},
		"ServiceCIDR":   {"", ""},
	}
	streamed := false
	for _, r := range w.server.Requests() {
		sel, ok := want[r.Kind]
		if !ok {
			t.Errorf("unexpected request %+v", r)
			continue
		}
		if have := [2]string{r.Query.Get("labelSelector"), r.Query.Get("fieldSelector")}; have != sel {
			t.Errorf("%s %s: selectors %q, want %q", r.Verb, r.Kind, have, sel)
		}
		if !strings.HasPrefix(r.Accept, v.contentType) {
			t.Errorf("%s %s: Accept %q, want %s first", r.Verb, r.Kind, r.Accept, v.contentType)
		}
		if v.http2 != (r.Proto == "HTTP/2.0") {
			t.Errorf("%s %s over %s", r.Verb, r.Kind, r.Proto)
		}
		streamed = streamed || r.Query.Get("sendInitialEvents") == "true"
		if r.Verb == "list" && !v.noWatchList {
			t.Errorf("%s was listed although the server streams lists", r.Kind)
		}
	}
	if !streamed {
		t.Error("no list was asked for as a stream")
	}
}

func TestNoNode(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	w.put(node("n2", "192.0.2.2"))
	w.run(w.options())
	w.sink.mustSync(t)
	w.sink.mustReach(t, "absence is reported", func() bool { return w.sink.nodes > 0 && w.sink.node == nil })
}

// TestResume: after a broken connection the watch goes on from the last version,
// which bookmarks move too, without a list.
func TestResume(t *testing.T) {
	variants(t, func(t *testing.T, v variant) {
		w := newWorld(t, apiserver.Options{}, v)
		w.put(service("one", "10.0.0.1"))
		w.run(w.options())
		w.sink.mustSync(t)
		before := len(w.requests("Service", "list"))
		w.put(node("elsewhere", "192.0.2.7")) // moves the version, not the watch of Services
		w.mustWatch()
		seen := 0
		w.sink.mustReach(t, "first view", func() bool { seen = w.sink.seen[cluster.Services]; return true })
		w.server.Bookmark()
		w.sink.mustReach(t, "the bookmark counts as seen", func() bool { return w.sink.seen[cluster.Services] > seen })
		version := fmt.Sprint(w.server.ResourceVersion())
		w.stop()
		w.put(service("two", "10.0.0.2"))
		w.server.Delete("Service", "d", "one")
		w.restart()
		w.sink.mustHold(t, "d/two")
		watches := w.requests("Service", "watch")
		last := watches[len(watches)-1]
		if last.Query.Get("resourceVersion") != version || last.Query.Has("sendInitialEvents") {
			t.Errorf("resumed with %v, want resourceVersion %s", last.Query, version)
		}
		if have := len(w.requests("Service", "list")); have != before {
			t.Errorf("%d lists after the interruption", have-before)
		}
	})
}

// TestVanished: what disappeared while the history could not be followed is
// removed.
func TestVanished(t *testing.T) {
	variants(t, func(t *testing.T, v variant) {
		w := newWorld(t, apiserver.Options{}, v)
		w.put(service("one", "10.0.0.1"), service("two", "10.0.0.2"), slice("one-1", "one", "10.1.0.1"), node("n1", "192.0.2.1"), cidr("c", "10.0.0.0/16"))
		w.run(w.options())
		w.sink.mustSync(t)
		w.stop()
		w.server.Delete("Service", "d", "one")
		w.server.Delete("EndpointSlice", "d", "one-1")
		w.server.Delete("Node", "", "n1")
		w.server.Delete("ServiceCIDR", "", "c")
		w.put(service("three", "10.0.0.3"))
		w.server.Compact()
		w.restart()
		w.sink.mustHold(t, "d/three", "d/two")
		w.sink.mustReach(t, "nothing left", func() bool { return len(w.sink.slices) == 0 && w.sink.node == nil && len(w.sink.cidrs) == 0 })
		w.sink.mustReach(t, "deletions", func() bool { return slices.Equal(w.sink.deleted, []string{"d/one"}) })
	})
}

// answer makes an intercept that refuses watches or lists of a kind of path.
func answer(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure",
		Code: int32(code), Reason: reason, Message: string(reason),
	})
}

// TestGoneAsStatus: some servers refuse an old version before the stream begins.
func TestGoneAsStatus(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	w.put(service("one", "10.0.0.1"))
	w.run(w.options())
	w.sink.mustSync(t)
	w.server.Intercept(func(rw http.ResponseWriter, r *http.Request) bool {
		resumed := r.URL.Query().Get("watch") != "" && !r.URL.Query().Has("sendInitialEvents")
		if resumed {
			answer(rw, http.StatusGone, metav1.StatusReasonExpired)
		}
		return resumed
	})
	w.server.Disconnect()
	w.put(service("two", "10.0.0.2"))
	w.sink.mustHold(t, "d/one", "d/two")
	w.sink.mustReach(t, "listed again", func() bool { return w.sink.synced[cluster.Services] > 1 })
}

// TestSilence is case R-57: the connection stays open, nothing comes.
func TestSilence(t *testing.T) {
	variants(t, func(t *testing.T, v variant) {
		w := newWorld(t, apiserver.Options{}, v)
		w.put(service("one", "10.0.0.1"))
		o := w.options()
		o.Staleness = 300 * time.Millisecond
		w.run(o)
		w.sink.mustSync(t)
		w.server.Silence(true)
		w.put(service("two", "10.0.0.2"))
		w.sink.mustHold(t, "d/one", "d/two")
		w.server.Delete("Service", "d", "one")
		w.sink.mustHold(t, "d/two")
		w.sink.mustReach(t, "another list", func() bool { return w.sink.synced[cluster.Services] >= 3 })
		if w.log.count("sends nothing") == 0 {
			t.Error("the silence is not logged")
		}
	})
}

// TestShortWatches: something between us and the server ends every watch before
// a bookmark is due, and the server has lost its history.
func TestShortWatches(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	w.server.SetResourceVersion(5000)
	w.put(service("one", "10.0.0.1"))
	o := w.options()
	o.Staleness = 300 * time.Millisecond
	w.run(o)
	w.sink.mustSync(t)
	w.server.SetResourceVersion(100)
	w.put(service("two", "10.0.0.2"))
	mustBecome(t, "the new Service, between the ends of watches", func() bool {
		w.server.Disconnect()
		w.sink.mu.Lock()
		defer w.sink.mu.Unlock()
		return len(w.sink.services) == 2
	})
}

// TestNoAnswer: a request that is never answered is given up as well.
func TestNoAnswer(t *testing.T) {
	variants(t, func(t *testing.T, v variant) {
		w := newWorld(t, apiserver.Options{}, v)
		w.put(service("one", "10.0.0.1"))
		w.server.Delay(time.Hour)
		o := w.options()
		o.Staleness = 100 * time.Millisecond
		w.run(o)
		mustBecome(t, "the silence is logged", func() bool { return w.log.count("sends nothing") > 0 })
		w.server.Delay(0)
		w.sink.mustSync(t)
		w.sink.mustHold(t, "d/one")
	})
}

// mustBecome polls a condition that nothing announces.
func mustBecome(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(30 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("not reached: " + what)
		}
	}
}

// TestCutInList: a list that breaks off does not count, neither as complete nor
// as a reason to remove anything.
func TestCutInList(t *testing.T) {
	variants(t, func(t *testing.T, v variant) {
		w := newWorld(t, apiserver.Options{}, v)
		var names []string
		for i := range 9 {
			name := fmt.Sprint("s", i)
			w.put(service(name, fmt.Sprint("10.0.0.", i+1)))
			names = append(names, "d/"+name)
		}
		w.server.CutNext("Service", 4)
		w.run(w.options())
		w.sink.mustHold(t, names...)
		w.sink.mustSync(t)
		if w.sink.early != 9 {
			t.Errorf("synced with %d of 9 Services", w.sink.early)
		}
		// Once more, when objects are there that the torn list does not hold.
		synced := 0
		w.sink.mustReach(t, "number of lists", func() bool { synced = w.sink.synced[cluster.Services]; return true })
		w.server.CutNext("Service", 2)
		w.stop()
		w.server.Delete("Service", "d", "s0")
		w.server.Compact()
		w.restart()
		w.sink.mustReach(t, "listed again", func() bool { return w.sink.synced[cluster.Services] > synced })
		w.sink.mustHold(t, names[1:]...)
		w.sink.mustReach(t, "deletions", func() bool { return slices.Equal(w.sink.deleted, []string{"d/s0"}) })
	})
}

// TestRestoredBackup: the server's history goes back. A watch from the future
// would be silent for ever.
func TestRestoredBackup(t *testing.T) {
	variants(t, func(t *testing.T, v variant) {
		w := newWorld(t, apiserver.Options{}, v)
		w.server.SetResourceVersion(5000)
		w.put(service("one", "10.0.0.1"))
		w.run(w.options())
		w.sink.mustSync(t)
		w.stop()
		w.server.SetResourceVersion(100)
		w.server.Delete("Service", "d", "one")
		w.put(service("two", "10.0.0.2"))
		w.restart()
		w.mustWatch()
		w.server.Bookmark()
		w.sink.mustHold(t, "d/two")
		w.put(service("three", "10.0.0.3"))
		w.sink.mustHold(t, "d/three", "d/two")
	})
}

// TestRestoredBackupInSilence is the same without bookmarks: the staleness limit
// finds it.
func TestRestoredBackupInSilence(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	w.server.SetResourceVersion(5000)
	w.put(service("one", "10.0.0.1"))
	o := w.options()
	o.Staleness = 300 * time.Millisecond
	w.run(o)
	w.sink.mustSync(t)
	w.stop()
	w.server.SetResourceVersion(100)
	w.server.Delete("Service", "d", "one")
	w.put(service("two", "10.0.0.2"))
	w.restart()
	w.sink.mustHold(t, "d/two")
}

// TestLogsOnce: a lasting refusal is one line, another one is another, and the
// end of it is told.
func TestLogsOnce(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	refuse := func(code int, reason metav1.StatusReason) {
		w.server.Intercept(func(rw http.ResponseWriter, _ *http.Request) bool {
			answer(rw, code, reason)
			return true
		})
		before := len(w.requests("Service", "watch"))
		mustBecome(t, "many attempts", func() bool { return len(w.requests("Service", "watch")) > before+5 })
	}
	w.server.Intercept(func(rw http.ResponseWriter, _ *http.Request) bool {
		answer(rw, http.StatusUnauthorized, metav1.StatusReasonUnauthorized)
		return true
	})
	w.run(w.options())
	refuse(http.StatusUnauthorized, metav1.StatusReasonUnauthorized)
	if n := w.log.count("level=WARN", "Unauthorized"); n != 1 {
		t.Errorf("%d lines for one refusal, want 1: %v", n, w.log.lines)
	}
	refuse(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable)
	refuse(http.StatusUnauthorized, metav1.StatusReasonUnauthorized)
	// Four kinds change over one after the other, so a line or two more may be
	// needed than there are reasons.
	if n := w.log.count("level=WARN"); n < 3 || n > 6 {
		t.Errorf("%d warnings for three changes: %v", n, w.log.lines)
	}
	if w.log.count("answers again") != 0 {
		t.Errorf("recovered too early: %v", w.log.lines)
	}
	w.server.Intercept(nil)
	w.sink.mustSync(t)
	mustBecome(t, "the recovery is logged", func() bool { return w.log.count("level=INFO", "answers again") == 1 })
}

// TestAbsentAPI: ServiceCIDRs do not exist on old servers and are hidden from old
// roles; there are none then, and they are asked for again.
func TestAbsentAPI(t *testing.T) {
	for _, tc := range []struct {
		code   int
		reason metav1.StatusReason
	}{{http.StatusNotFound, metav1.StatusReasonNotFound}, {http.StatusForbidden, metav1.StatusReasonForbidden}} {
		t.Run(string(tc.reason), func(t *testing.T) {
			w := newWorld(t, apiserver.Options{}, variant{})
			w.put(service("one", "10.0.0.1"), cidr("c", "10.0.0.0/16"))
			w.server.Intercept(func(rw http.ResponseWriter, r *http.Request) bool {
				absent := strings.HasSuffix(r.URL.Path, "/servicecidrs")
				if absent {
					answer(rw, tc.code, tc.reason)
				}
				return absent
			})
			o := w.options()
			o.Staleness = 400 * time.Millisecond
			w.run(o)
			w.sink.mustSync(t)
			w.sink.mustReach(t, "confirmed again and again", func() bool { return w.sink.seen[cluster.ServiceCIDRs] > 2 })
			w.sink.mustReach(t, "no CIDRs", func() bool { return len(w.sink.cidrs) == 0 })
			if n := w.log.count("does not offer", "ServiceCIDR"); n != 1 {
				t.Errorf("%d lines about it, want 1: %v", n, w.log.lines)
			}
			w.server.Intercept(nil)
			w.sink.mustReach(t, "the CIDR, once it can be read", func() bool { return len(w.sink.cidrs) == 1 })
		})
	}
}

func TestServiceProxyName(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	w.put(service("plain", "10.0.0.1"), service("mine", "10.0.0.2", proxyNameLabel, "edge"), service("other", "10.0.0.3", proxyNameLabel, "x"))
	o := w.options()
	o.ServiceProxyName = "edge"
	w.run(o)
	w.sink.mustSync(t)
	w.sink.mustHold(t, "d/mine")
}

func TestLoadEverything(t *testing.T) {
	w := newWorld(t, apiserver.Options{Missing: []string{"ServiceCIDR"}}, variant{})
	w.put(service("plain", "10.0.0.1"), service("other", "10.0.0.3", proxyNameLabel, "x"), service("headless", "None"), node("n1", "192.0.2.1"), node("n2", "192.0.2.2"))
	for i := range 7 {
		w.put(slice(fmt.Sprint("sl", i), "plain", "10.1.0.1"))
	}
	o := w.options()
	o.Everything, o.PageSize = true, 3
	src := NewSource(w.client, o)
	if err := src.Load(context.Background(), w.sink); err != nil {
		t.Fatal(err)
	}
	w.sink.mustHold(t, "d/headless", "d/other", "d/plain")
	if len(w.sink.slices) != 7 || w.sink.node == nil || w.sink.node.Name != "n1" || len(w.sink.synced) != 4 {
		t.Errorf("slices %v, node %v, synced %v", w.sink.slices, w.sink.node, w.sink.synced)
	}
	if n := len(w.requests("EndpointSlice", "list")); n != 3 {
		t.Errorf("7 slices in pages of 3 took %d requests", n)
	}
	if n := len(w.requests("Service", "watch")); n != 0 {
		t.Errorf("%d watches", n)
	}

	w.server.Intercept(func(rw http.ResponseWriter, r *http.Request) bool {
		answer(rw, http.StatusForbidden, metav1.StatusReasonForbidden)
		return true
	})
	err := src.Load(context.Background(), newSink())
	if err == nil || !strings.Contains(err.Error(), "list services at http://"+w.addr) {
		t.Errorf("error %v", err)
	}
}

// TestPagesExpire: pages that take longer than the server remembers are replaced
// by one whole list.
func TestPagesExpire(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{contentType: runtime.ContentTypeJSON})
	for i := range 8 {
		w.put(slice(fmt.Sprint("sl", i), "plain", "10.1.0.1"))
	}
	w.server.Intercept(func(_ http.ResponseWriter, r *http.Request) bool {
		if r.URL.Query().Has("continue") {
			w.server.Delete("EndpointSlice", "d", "sl0")
			w.server.Compact()
		}
		return false
	})
	o := w.options()
	o.Everything, o.PageSize = true, 3
	if err := NewSource(w.client, o).Load(context.Background(), w.sink); err != nil {
		t.Fatal(err)
	}
	if len(w.sink.slices) != 7 {
		t.Errorf("slices %v, want sl1 to sl7", w.sink.slices)
	}
}

// TestServerSlowsDown: a server that is overloaded is left alone for as long as
// it says, and then served.
func TestServerSlowsDown(t *testing.T) {
	w := newWorld(t, apiserver.Options{}, variant{})
	w.put(service("one", "10.0.0.1"))
	refused := make(chan struct{}, 1000)
	w.server.Intercept(func(rw http.ResponseWriter, r *http.Request) bool {
		if len(refused) >= 4 {
			return false
		}
		refused <- struct{}{}
		rw.Header().Set("Retry-After", "1")
		answer(rw, http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests)
		return true
	})
	w.run(w.options())
	w.sink.mustSync(t)
	w.sink.mustHold(t, "d/one")
}

// TestStateMatches: through a real State, random changes with interruptions of
// every sort end in what the server has.
func TestStateMatches(t *testing.T) {
	variants(t, func(t *testing.T, v variant) {
		w := newWorld(t, apiserver.Options{History: 40}, v)
		w.run(w.options())
		w.sink.mustSync(t)
		for i := range 300 {
			name := fmt.Sprint("s", i*7%23)
			switch i % 5 {
			case 0:
				w.server.Delete("Service", "d", name)
			case 1:
				w.put(service(name, "10.0.0.1", proxyNameLabel, "x"))
			default:
				w.put(service(name, fmt.Sprint("10.0.", i%200, ".1")), slice(name, name, fmt.Sprint("10.1.0.", i%200+1)))
			}
			switch i % 61 {
			case 13:
				w.server.Disconnect()
			case 27:
				w.server.Compact()
			case 44:
				w.stop()
				w.restart()
			case 59:
				w.server.CutNext("Service", i%4)
				w.server.Disconnect()
				w.server.Compact()
			}
		}
		want := map[string]string{}
		for i := range 23 {
			o, ok := w.server.Get("Service", "d", fmt.Sprint("s", i)).(*corev1.Service)
			if ok && o.Labels[proxyNameLabel] == "" {
				want["d/"+o.Name] = "[" + o.Spec.ClusterIP + "]"
			}
		}
		w.sink.mustReach(t, fmt.Sprint("services ", want), func() bool { return fmt.Sprint(w.sink.services) == fmt.Sprint(want) })
	})
}
