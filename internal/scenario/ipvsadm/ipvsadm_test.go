package ipvsadm

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/lab"
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

func TestCompare(t *testing.T) {
	all, err := Parse(saved)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 4 {
		t.Fatalf("%d virtual servers, want 4", len(all))
	}
	at := func(p lab.Proto, a string) *Server { return all[ID{p, netip.MustParseAddrPort(a)}] }
	tests := []struct {
		v      *Server
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
		{at(lab.TCP, "10.62.0.20:80"), "persistent=10800s", false, ""},
		{at(lab.TCP, "10.62.0.20:80"), "persistent=3h", false, ""},
		{at(lab.TCP, "10.62.0.20:80"), "persistent=2h", false, "want 7200"},
		{at(lab.TCP, "10.62.0.20:80"), "persistent=long", false, "long"},
		{at(lab.TCP, "[2001:db8:62::20]:80"), "scheduler=sh weight:10.61.1.5=3", true, ""},
		{at(lab.SCTP, "10.62.0.30:2905"), "scheduler=rr", false, ""},
		{at(lab.UDP, "10.62.0.20:80"), "absent", false, ""},
		{at(lab.UDP, "10.62.0.20:80"), "servers=0", false, "is not there"},
		{at(lab.UDP, "10.62.0.10:53"), "colour=red", false, "colour"},
	}
	for _, tt := range tests {
		err := tt.v.Compare(strings.Fields(tt.props), tt.mapped)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.props, err, tt.want)
		}
	}
	if _, err := Parse("-a -t 10.62.0.20:80 -r 10.61.1.5:8080 -m -w 1\n"); err == nil {
		t.Error("a real server without a virtual one is no fault")
	}
}
