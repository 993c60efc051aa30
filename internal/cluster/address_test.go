package cluster

import (
	"net/netip"
	"testing"
)

func TestParseAddr(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1":          "10.0.0.1",
		"010.000.0.001":     "10.0.0.1",
		"00192.0.2.1":       "192.0.2.1",
		"0.0.0.0":           "0.0.0.0",
		"00.0.0.0":          "0.0.0.0",
		"2001:db8::1":       "2001:db8::1",
		"2001:0DB8:0:0::01": "2001:db8::1",
		"2001:00db8::00001": "2001:db8::1",
		"::ffff:10.0.0.1":   "10.0.0.1",
		"::ffff:010.0.0.01": "10.0.0.1",
		"::":                "::",
		"":                  "",
		" 10.0.0.1":         "",
		"10.0.0":            "",
		"10.0.0.256":        "",
		"10.0.0.0256":       "",
		"10.0.0.1/32":       "",
		"0x0a.0.0.1":        "",
		"fe80::1%eth0":      "",
		"::ffff:1.2.3.4%a":  "",
		"web.example":       "",
	} {
		have, err := ParseAddr(in)
		if (err == nil) != (want != "") || want != "" && have != netip.MustParseAddr(want) {
			t.Errorf("ParseAddr(%q) = %v, %v; want %q", in, have, err, want)
		}
	}
}

func TestParsePrefix(t *testing.T) {
	for in, want := range map[string]string{
		"10.1.2.3/8":          "10.0.0.0/8",
		"010.1.2.3/08":        "10.0.0.0/8",
		"0.0.0.0/0":           "0.0.0.0/0",
		"192.0.2.1/32":        "192.0.2.1/32",
		"2001:db8::1/64":      "2001:db8::/64",
		"::ffff:10.0.0.0/104": "10.0.0.0/8",
		"::/0":                "::/0",
		"::ffff:10.0.0.0/64":  "",
		"10.0.0.0":            "",
		"10.0.0.0/33":         "",
		"10.0.0.0/-1":         "",
		"10.0.0.0/+8":         "",
		"10.0.0.0/":           "",
		"10.0.0.0/8/8":        "",
		"10.0.0.0/264":        "",
		"fe80::1%eth0/64":     "",
	} {
		have, err := ParsePrefix(in)
		if (err == nil) != (want != "") || want != "" && have != netip.MustParsePrefix(want) {
			t.Errorf("ParsePrefix(%q) = %v, %v; want %q", in, have, err, want)
		}
	}
}
