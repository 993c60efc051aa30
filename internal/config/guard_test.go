package config

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestExternalAddresses(t *testing.T) {
	const own = "mode: iptables\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\nexternalAddresses: "
	c := mustFile(t, own+"{refuseClusterRanges: true, refuse: [192.0.2.0/24], allow: [203.0.113.0/24, \"2001:db8::/32\"]}")
	want := ExternalAddresses{true, []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
		[]netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8::/32")}}
	for _, c := range []*Config{c, mustFile(t, strings.TrimPrefix(written(t, c), header))} {
		if diff := cmp.Diff(want, c.ExternalAddresses, equalConfigs); diff != "" {
			t.Errorf("-want +have:\n%s", diff)
		}
	}
	_, _, err := file(own + "{refuse: [192.0.2.0], allow: [x]}")
	for _, want := range []string{"externalAddresses.refuse[0]", "externalAddresses.allow[0]", `"x"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %s in %v", want, err)
		}
	}
}
