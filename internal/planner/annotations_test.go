package planner_test

import (
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

func TestAnnotations(t *testing.T) {
	for _, c := range []struct {
		name, value string
		want        string // of the Policy
		warnings    int
	}{
		{"ipvs-scheduler", "wlc", "scheduler=wlc", 0},
		{"ipvs-scheduler", " wlc ", "scheduler=wlc", 0},
		{"ipvs-scheduler", "WLC", "", 1},
		{"ipvs-scheduler", "", "", 1},
		{"ipvs-scheduler-flags", "source-port", "source-port", 0},
		{"ipvs-scheduler-flags", "fallback, source-port", "source-port fallback", 0},
		{"ipvs-scheduler-flags", "", "", 1},
		{"drain-timeout", "1h30m", "drain-timeout=1h30m0s", 0},
		{"drain-timeout", "24h0m1s", "", 1},
		{"drain-timeout", "-5s", "", 1},
		{"vanished-endpoint-timeout", "1s", "vanished-endpoint-timeout=1s", 0},
		{"vanished-endpoint-timeout", "999ms", "", 1},
		{"client-address", "hide", "client-address=hide", 0},
		{"client-address", "by-route", "", 1},
		{"proxy-protocol", "v1", "proxy-protocol=v1", 0},
		{"proxy-protocol", "2", "", 1},
		{"health-check", "off", "", 0},
		{"health-check", "off,port=1", "", 1},
		{"health-check", "tcp", "health-check=tcp,interval=5s,timeout=1s,rise=2,fall=3", 0},
		{"health-check", "tcp, rise=1", "health-check=tcp,interval=5s,timeout=1s,rise=1,fall=3", 0},
		{"health-check", "tcp,interval=500ms", "health-check=tcp,interval=500ms,timeout=500ms,rise=2,fall=3", 0},
		{"health-check", "tcp,interval=500ms,timeout=1s", "", 1},
		{"health-check", "http", "health-check=http,path=/,interval=5s,timeout=1s,rise=2,fall=3", 0},
		{"health-check", "http,path=/a?b=c,code=503,port=1", "health-check=http,path=/a?b=c,code=503,port=1,interval=5s,timeout=1s,rise=2,fall=3", 0},
		{"health-check", "http,path=healthz", "", 1},
		{"health-check", "http,path=/a b", "", 1},
		{"health-check", "http,path=/\r\nHost:", "", 1},
		{"health-check", "http,path=/" + strings.Repeat("a", 256), "", 1},
		{"health-check", "http,code=100", "", 1},
		{"health-check", "tcp,code=200", "", 1},
		{"health-check", "tcp,port=0", "", 1},
		{"health-check", "tcp,port=65536", "", 1},
		{"health-check", "tcp,rise=0", "", 1},
		{"health-check", "tcp,fall=101", "", 1},
		{"health-check", "tcp,fall=1,fall=2", "", 1},
		{"health-check", "tcp,fall", "", 1},
		{"health-check", "tcp,", "", 1},
		{"health-check", "tcp,interval=99ms", "", 1},
		{"health-check", "tcp,interval=61m", "", 1},
		{"health-check", "ping", "", 1},
		{"scheduler", "rr", "", 1},
	} {
		have, warnings := planner.Chosen(map[string]string{"svcproxy.io/" + c.name: c.value})
		if have.String() != c.want || warnings != c.warnings {
			t.Errorf("%s %q: %q with %d warnings, want %q with %d", c.name, c.value, have, warnings, c.want, c.warnings)
		}
	}
}

func TestParseWeights(t *testing.T) {
	for s, groups := range map[string]int{
		"node=10,zone=5,other=1":                    3,
		"node/birch=3, zone/z2=0 ,node=65535":       3,
		"node/a.b.example=1,zone/region-1a.local=2": 2,

		"": 0, "node": 0, "node=": 0, "node=-1": 0, "node=65536": 0, "node=1.5": 0, "node=1,node=2": 0, "node/=1": 0,
		"zone/=1": 0, "other/x=1": 0, "nodes=1": 0, "node=1,": 0, "node=0x1": 0, "node=1_0": 0,
	} {
		n, ok := planner.ParseWeights(s)
		if ok != (groups > 0) || n != groups {
			t.Errorf("%q: %d groups, ok %v, want %d", s, n, ok, groups)
		}
	}
}

// FuzzAnnotations: no value does more than choose within the limits, and what is
// wrong is told.
func FuzzAnnotations(f *testing.F) {
	for _, s := range []string{
		"mh", "source-port,fallback", "node=10,zone=5,other=1,node/birch=3", "http,path=/healthz,code=200,port=8080,interval=5s,timeout=1s,rise=2,fall=3",
		"off", "90s", "keep", "v2", "", ",", "=", "tcp,=", "node/=\x00",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		planner.ParseWeights(s)
		for _, name := range []string{
			"ipvs-scheduler", "ipvs-scheduler-flags", "weights", "health-check", "drain-timeout",
			"vanished-endpoint-timeout", "client-address", "proxy-protocol", s,
		} {
			p, warnings := planner.Chosen(map[string]string{"svcproxy.io/" + name: s})
			switch name {
			case "weights": // not in the Policy
			case "health-check":
				if off := strings.TrimSpace(s) == "off"; (p == plan.Policy{}) != (off || warnings == 1) {
					t.Errorf("%s %q: %q with %d warnings", name, s, p, warnings)
				}
				checkHealthCheck(t, p.Check)
			default:
				if (p == plan.Policy{}) != (warnings == 1) {
					t.Errorf("%s %q: %q with %d warnings", name, s, p, warnings)
				}
			}
			for _, d := range []time.Duration{p.DrainTimeout, p.VanishedTimeout} {
				if d != 0 && (d < time.Second || d > 24*time.Hour) {
					t.Errorf("%s %q: a timeout of %s", name, s, d)
				}
			}
		}
	})
}

// checkHealthCheck checks that h is off or makes sense, and that its text reads as h.
func checkHealthCheck(t *testing.T, h plan.HealthCheck) {
	t.Helper()
	again, err := plan.ParseHealthCheck(h.String())
	if err != nil || again != h {
		t.Errorf("%q reads as %q, %v", h, again, err)
	}
	if h.Method == plan.NoCheck {
		return
	}
	if h.Interval < 100*time.Millisecond || h.Timeout <= 0 || h.Timeout > h.Interval || h.Rise == 0 || h.Fall == 0 || strings.ContainsAny(h.Path, " \r\n") {
		t.Errorf("a health check like %q", h)
	}
}
