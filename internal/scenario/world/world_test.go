package world

import (
	"net/netip"
	"strings"
	"testing"
)

func TestDeclare(t *testing.T) {
	w := New(AsWritten)
	h, err := w.Declare(Pod, []string{"web", "10.61.1.5", "tcp:80", "udp:53"})
	if err != nil {
		t.Fatal(err)
	}
	if len(h.Addrs) != 2 || h.Addrs[1] != netip.MustParseAddr("2001:db8:61:1::5") || len(h.Serves) != 2 || h.On != nil {
		t.Errorf("have %+v, want both families, two ports, a namespace of its own", h)
	}
	if h, err = w.Declare(Pod, []string{"hostnet", "192.0.2.11"}); err != nil || h.On != w.Node() {
		t.Errorf("a pod with the node's address: %+v, %v, want it on the node", h, err)
	}
	if h, err = w.Declare(Client, []string{"two", "198.51.100.7,2001:db8:51::99"}); err != nil || h.Addrs[1] != netip.MustParseAddr("2001:db8:51::99") {
		t.Errorf("a host with both families given: %+v, %v", h, err)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"web", "10.61.1.6"}, "web"},
		{[]string{"other", "10.61.1.5"}, "web has the address"},
		{[]string{"other"}, "NAME IP"},
		{[]string{"other", "10.61.1"}, "10.61.1"},
		{[]string{"other", "10.61.1.6", "tcp"}, "PROTO:PORT"},
		{[]string{"other", "10.61.1.6", "icmp:1"}, "icmp"},
		{[]string{"other", "10.61.1.6", "tcp:99999"}, "99999"},
	} {
		if _, err := w.Declare(Pod, tt.args); !IsUsage(err) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error %v, want one that says %q", tt.args, err, tt.want)
		}
	}
}

func TestTargets(t *testing.T) {
	tests := []struct {
		families Families
		in, want string
	}{
		{AsWritten, "10.62.0.20:80", "10.62.0.20:80"},
		{AsWritten, "[2001:db8:62::20]:80", "[2001:db8:62::20]:80"},
		{AsWritten, "node:31080", "192.0.2.11:31080"},
		{AsWritten, "alder:31080", "192.0.2.11:31080"},
		{AsWritten, "[v6]:31080", "[2001:db8:1::11]:31080"},
		{AsWritten, "lo:31080", "127.0.0.1:31080"},
		{AsWritten, "birch:22", "192.0.2.12:22"},
		{Only6, "node:31080", "[2001:db8:1::11]:31080"},
		{Only6, "lo:31080", "[::1]:31080"},
		{Dual, "node:31080", "192.0.2.11:31080 [2001:db8:1::11]:31080"},
		{Dual, "10.62.0.20:80", "10.62.0.20:80 [2001:db8:62::20]:80"},
		{Dual, "[2001:db8:62::20]:80", "[2001:db8:62::20]:80"},
	}
	for _, tt := range tests {
		to, err := New(tt.families).Targets(tt.in)
		var have []string
		for _, x := range to {
			have = append(have, x.Addr.String())
		}
		if s := strings.Join(have, " "); err != nil || s != tt.want {
			t.Errorf("families %q: %s is %s, %v, want %s", tt.families, tt.in, s, err, tt.want)
		}
	}
	for _, in := range []string{"10.62.0.20", "nobody:80", "node:http", "node:70000"} {
		if _, err := New(AsWritten).Targets(in); !IsUsage(err) {
			t.Errorf("%s: error %v, want a fault of the script", in, err)
		}
	}
}
