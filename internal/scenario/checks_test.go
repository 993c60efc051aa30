package scenario

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

func TestParseSample(t *testing.T) {
	tests := []struct {
		line   string
		name   string
		labels map[string]string
		value  float64
		ok     bool
	}{
		{`up 1`, "up", nil, 1, true},
		{`syncs_total{ip_family="IPv4"} 12`, "syncs_total", map[string]string{"ip_family": "IPv4"}, 12, true},
		{`a{b="c d",e="}"} 1.5e+09`, "a", map[string]string{"b": "c d", "e": "}"}, 1.5e9, true},
		{`# HELP up whether`, "", nil, 0, false},
		{``, "", nil, 0, false},
	}
	for _, tt := range tests {
		name, labels, v, ok := parseSample(tt.line)
		if ok != tt.ok || ok && (name != tt.name || v != tt.value || cmp.Diff(tt.labels, labels) != "") {
			t.Errorf("%q: have %s %v %v %t", tt.line, name, labels, v, ok)
		}
	}
	if _, _, err := parseSeries(`a{b=c}`); err == nil {
		t.Error("a label without quotes is no fault")
	}
}

func TestParseHealth(t *testing.T) {
	w := world.New(world.AsWritten)
	c, err := parseHealth(w, strings.Fields("32100 path=/x from=probe -> 503 endpoints=0"))
	if err != nil || c.path != "/x" || c.code != 503 || c.endpoints != 0 || c.from.Name != "probe" || c.to[0].Addr.String() != "192.0.2.11:32100" {
		t.Errorf("have %+v, %v", c, err)
	}
	for _, line := range []string{"32100", "32100 ->", "32100 -> ok", "http -> 200", "32100 -> 200 endpoints=few", "32100 from=nobody -> 200"} {
		if _, err := parseHealth(w, strings.Fields(line)); !world.IsUsage(err) {
			t.Errorf("%q: error %v, want a fault of the script", line, err)
		}
	}
}

func TestCompareHealth(t *testing.T) {
	c := healthCheck{code: 200, endpoints: 1}
	body := `{"service": {"namespace": "default", "name": "edge"}, "localEndpoints": 1, "serviceProxyHealthy": true}`
	if err := c.compare(200, []byte(body)); err != nil {
		t.Error(err)
	}
	for code, body := range map[int]string{503: body, 200: `{"localEndpoints": 2}`} {
		if c.compare(code, []byte(body)) == nil {
			t.Errorf("code %d with %s is as wanted", code, body)
		}
	}
}
