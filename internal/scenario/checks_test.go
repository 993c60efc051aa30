package scenario

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

const saved = `-A -t 10.62.0.20:80 -s rr -p 10800
-a -t 10.62.0.20:80 -r 10.61.1.5:8080 -m -w 1
-a -t 10.62.0.20:80 -r 10.61.2.7:8080 -m -w 0
-A -u 10.62.0.10:53 -s wlc
-A -t [2001:db8:62::20]:80 -s sh
-a -t [2001:db8:62::20]:80 -r [2001:db8:61:1::5]:8080 -m -w 3
-A --sctp-service 10.62.0.30:2905 -s rr
-A -f 7 -s rr
-a -f 7 -r 10.61.1.5:0 -m -w 1
`

func TestIPVS(t *testing.T) {
	all, err := parseIPVS(saved)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 4 {
		t.Fatalf("%d virtual servers, want 4", len(all))
	}
	at := func(p lab.Proto, a string) *virtualServer { return all[virtualID{p, netip.MustParseAddrPort(a)}] }
	tests := []struct {
		v      *virtualServer
		props  string
		mapped bool
		want   string // "" holds
	}{
		{at(lab.TCP, "10.62.0.20:80"), "scheduler=rr servers=2 persistent=10800 weight:10.61.1.5=1 weight:10.61.2.7=0", false, ""},
		{at(lab.TCP, "10.62.0.20:80"), "scheduler=lc", false, "scheduler is rr"},
		{at(lab.TCP, "10.62.0.20:80"), "servers=3", false, "servers is 2"},
		{at(lab.TCP, "10.62.0.20:80"), "weight:10.61.3.8=1", false, "is absent"},
		{at(lab.TCP, "10.62.0.20:80"), "absent", false, "is there"},
		{at(lab.UDP, "10.62.0.10:53"), "scheduler=wlc servers=0 persistent=0", false, ""},
		{at(lab.TCP, "[2001:db8:62::20]:80"), "scheduler=sh weight:10.61.1.5=3", true, ""},
		{at(lab.SCTP, "10.62.0.30:2905"), "scheduler=rr", false, ""},
		{at(lab.UDP, "10.62.0.20:80"), "absent", false, ""},
		{at(lab.UDP, "10.62.0.20:80"), "servers=0", false, "is not there"},
		{at(lab.UDP, "10.62.0.10:53"), "colour=red", false, "colour"},
	}
	for _, tt := range tests {
		err := tt.v.compare(strings.Fields(tt.props), tt.mapped)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.props, err, tt.want)
		}
	}
	if _, err := parseIPVS("-a -t 10.62.0.20:80 -r 10.61.1.5:8080 -m -w 1\n"); err == nil {
		t.Error("a real server without a virtual one is no fault")
	}
}

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
