package world

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMapText(t *testing.T) {
	in := ` pod:probe tcp 10.62.0.20:80 -> web src=192.0.2.11 dst=10.62.0.40:53 10.61.0.0/16 version 1.37.2`
	want := ` pod:probe tcp [2001:db8:62::20]:80 -> web src=2001:db8:1::11 dst=[2001:db8:62::40]:53 2001:db8:61::/48 version 1.37.2`
	have, err := MapText(in)
	if err != nil || have != want {
		t.Errorf("have %q, %v\nwant %q", have, err, want)
	}
	if _, err := MapText("a 192.0.2.0/28 b"); err == nil || !strings.Contains(err.Error(), "192.0.2.0/28") {
		t.Errorf("error %v, want one that names the range", err)
	}
}

func TestMapTree(t *testing.T) {
	in := map[string]any{
		"ranges": []any{"192.0.2.0/28", " 198.51.100.0/26 ", "10.0.0.0/8", "primary", map[string]any{"ip": "203.0.113.20"}},
		"text":   "IPv4 first, 10.62.0.20 second",
		"list":   "10.61.0.0/16, 10.9.9.9",
		"family": []any{"IPv4", "IPv6"},
		"both":   []any{"10.62.0.20", "2001:db8:62::20", map[string]any{"a": 1}, map[string]any{"a": 1}},
		"port":   80,
	}
	want := map[string]any{
		"ranges": []any{"2001:db8:1::/124", "2001:db8:1::10/126", "2001:db8:1::14/127", "2001:db8:51::/122", "2001:db8:61::/48", "2001:db8:62::/112",
			"2001:db8:4::a00:0/104", "primary", map[string]any{"ip": "2001:db8:113::14"}},
		"text":   "IPv4 first, 10.62.0.20 second",
		"list":   "2001:db8:61::/48,2001:db8:4::a09:909",
		"family": []any{"IPv6"},
		"both":   []any{"2001:db8:62::20", map[string]any{"a": 1}, map[string]any{"a": 1}},
		"port":   80,
	}
	have, err := MapTree(in)
	if d := cmp.Diff(want, have); err != nil || d != "" {
		t.Errorf("%v, (-want +have)\n%s", err, d)
	}
	if _, err := MapTree(map[string]any{"clusterCIDR": "10.0.0.0/8"}); err == nil || !strings.Contains(err.Error(), "clusterCIDR: range 10.0.0.0/8") {
		t.Errorf("error %v, want one that names field and range", err)
	}
}
