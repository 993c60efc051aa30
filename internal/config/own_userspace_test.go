package config

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestPortRange(t *testing.T) {
	for _, tt := range []struct {
		in          string
		first, last uint16
		bad         bool
	}{
		{in: ""}, {in: "0"}, {in: "0-0"}, {in: "0+0"},
		{in: "40000-40009", first: 40000, last: 40009}, {in: "40000+9", first: 40000, last: 40009},
		{in: " 7 ", first: 7, last: 7}, {in: "1-65535", first: 1, last: 65535},
		{in: "9-8", bad: true}, {in: "0-9", bad: true}, {in: "1-65536", bad: true}, {in: "65535+1", bad: true},
		{in: "x", bad: true}, {in: "1-2-3", bad: true}, {in: "-1", bad: true}, {in: "1,2", bad: true},
	} {
		first, last, err := parsePortRange(tt.in)
		if first != tt.first || last != tt.last || (err != nil) != tt.bad {
			t.Errorf("%q: have %d, %d, %v", tt.in, first, last, err)
		}
	}
}

func FuzzPortRange(f *testing.F) {
	for _, s := range []string{"", "0-0", "1-2", "5+6", "65535"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		first, last, err := parsePortRange(s)
		if first > last || (err != nil && last != 0) || (first == 0 && last != 0) {
			t.Errorf("%q gives %d-%d, %v", s, first, last, err)
		}
	})
}

// Where kube-proxy had them, the settings have effect in userspace mode again, and the
// own document's win.
func TestUserspace(t *testing.T) {
	addr := cmpopts.EquateComparable(netip.Prefix{})
	for _, tt := range []struct {
		name string
		args []string
		body string
		want UserspaceOptions
	}{
		{"flags", []string{"--proxy-mode=userspace", "--proxy-port-range=40000-40009", "--udp-timeout=3s"}, "",
			UserspaceOptions{FirstPort: 40000, LastPort: 40009, UDPTimeout: 3 * time.Second, RouteBit: 15}},
		{"former fields", nil, "mode: userspace\nportRange: 40000+9\nudpIdleTimeout: 3s",
			UserspaceOptions{FirstPort: 40000, LastPort: 40009, UDPTimeout: 3 * time.Second, RouteBit: 15}},
		{"own document", nil, "mode: userspace\nudpIdleTimeout: 3s\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\n" +
			"userspace: {udpIdleTimeout: 4s, connectTimeouts: [100ms, 1s], ejection: {failures: 3, for: 20s}, drainTimeout: 1m, " +
			"listenAddresses: [192.0.2.0/30, 'fd00::4/126'], routeMarkBit: 9, interception: route}",
			UserspaceOptions{
				UDPTimeout: 4 * time.Second, ConnectTimeouts: []time.Duration{100 * time.Millisecond, time.Second},
				EjectAfter: 3, EjectFor: 20 * time.Second, DrainTimeout: time.Minute, Interception: InterceptRoute, RouteBit: 9,
				Listen4: netip.MustParsePrefix("192.0.2.0/30"), Listen6: netip.MustParsePrefix("fd00::4/126"),
			}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, warnings, err := load(tt.args, nil)
			if tt.body != "" {
				c, warnings, err = file(tt.body)
			}
			if err != nil || len(warnings) > 0 {
				t.Fatal(err, warnings)
			}
			if diff := cmp.Diff(tt.want, c.Userspace, addr); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Everything that cannot be is named with its value.
func TestUserspaceFaults(t *testing.T) {
	own := "mode: userspace\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\nuserspace: "
	for body, want := range map[string]string{
		"mode: userspace\nportRange: 5-4":                  "portRange: Invalid value: \"5-4\"",
		"mode: userspace\nudpIdleTimeout: fast":            "udpIdleTimeout: \"fast\" cannot be used",
		own + "{udpIdleTimeout: -1s}":                      "udpIdleTimeout",
		own + "{connectTimeouts: [0s]}":                    "userspace.connectTimeouts[0]",
		own + "{ejection: {failures: -1}}":                 "userspace.ejection.failures",
		own + "{drainTimeout: 0s}":                         "userspace.drainTimeout",
		own + "{listenAddresses: [10.0.0.0/24]}":           "userspace.listenAddresses[0]",
		own + "{listenAddresses: [10.0.0.1/30]}":           "userspace.listenAddresses[0]",
		own + "{listenAddresses: [127.0.0.0/30]}":          "userspace.listenAddresses[0]",
		own + "{listenAddresses: ['fe80::/126']}":          "userspace.listenAddresses[0]",
		own + "{listenAddresses: ['::1']}":                 "userspace.listenAddresses[0]",
		own + "{listenAddresses: [1.0.0.0/30,2.0.0.0/30]}": "userspace.listenAddresses[1]",
		own + "{routeMarkBit: 32}":                         "userspace.routeMarkBit",
		own + "{routeMarkBit: 14}":                         "is the masquerade bit",
		own + "{interception: magic}":                      "userspace.interception",
	} {
		if _, _, err := file(body); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: have %v, want %q", body, err, want)
		}
	}
}
