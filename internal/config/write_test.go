package config

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func written(t *testing.T, c *Config) string {
	t.Helper()
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// The defaults as a file: the fields, order and values of kube-proxy 1.37.
func TestWriteDefaults(t *testing.T) {
	want, err := os.ReadFile("testdata/defaults.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), written(t, mustLoad(t))); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
}

// What was written reads back as the same configuration and is written the same.
func TestRoundTrip(t *testing.T) {
	for name, args := range map[string][]string{
		"defaults": nil,
		"iptables": {"--masquerade-all", "--iptables-masquerade-bit=3", "--nodeport-addresses=192.0.2.0/24,localhost",
			"--cluster-cidr=10.0.0.0/8,2001:db8::/64", "--kubeconfig=/k", "--hostname-override=alder", "--oom-score-adj=0",
			"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "-v=3", "--vmodule=a=5", "--logging-format=json",
			"--feature-gates=AllowServiceExternalIPs=false", "--profiling", "--bind-address-hard-fail"},
		"nftables":    {"--proxy-mode=nftables", "--masquerade-all", "--iptables-sync-period=7s"},
		"ipvs":        {"--proxy-mode=ipvs", "--ipvs-scheduler=lc", "--ipvs-exclude-cidrs=10.0.0.0/8", "--ipvs-sync-period=9s", "--ipvs-strict-arp"},
		"userspace":   {"--proxy-mode=userspace", "--iptables-min-sync-period=2s"},
		"own":         {"--manifests=/a", "--manifests=/b", "--service-proxy-name=x", "--staleness-limit=1m"},
		"IPv6":        {"--bind-address=fd00::1", "--healthz-bind-address=::", "--metrics-bind-address=::1"},
		"NodeCIDR":    {"--detect-local-mode=NodeCIDR"},
		"by a prefix": {"--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth"},
	} {
		t.Run(name, func(t *testing.T) {
			c := mustLoad(t, args...)
			text := written(t, c)
			again, warnings, err := load([]string{"--config=f"}, map[string]string{"f": text})
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range warnings {
				if !strings.Contains(w, "feature gate") {
					t.Errorf("warning %q", w)
				}
			}
			again.ModeDefault = c.ModeDefault // written files name the mode
			if diff := cmp.Diff(c, again, equalConfigs); diff != "" {
				t.Errorf("-written +read:\n%s", diff)
			}
			if diff := cmp.Diff(text, written(t, again)); diff != "" {
				t.Errorf("-first +second:\n%s", diff)
			}
		})
	}
}

// What /configz shows leaves keywords as they are.
func TestProxy(t *testing.T) {
	p := mustLoad(t, "--nodeport-addresses=primary", "--kubeconfig=/k").Proxy()
	if diff := cmp.Diff([]string{"primary", "/k"}, append(p.NodePortAddresses, p.ClientConnection.Kubeconfig)); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
}

// The flags for ports count in what is written, as they do when the proxy runs.
func TestWriteServers(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--healthz-bind-address=192.0.2.11", "--metrics-port=1024"}, "healthzBindAddress: 192.0.2.11:10256"},
		{[]string{"--healthz-bind-address=192.0.2.11", "--healthz-port=1025"}, "healthzBindAddress: 192.0.2.11:1025"},
		{[]string{"--healthz-port=0"}, `healthzBindAddress: ""`},
		{[]string{"--metrics-port=0"}, `metricsBindAddress: ""`},
	} {
		var out strings.Builder
		if _, err := mustLoad(t, tt.args...).WriteTo(&out); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), tt.want+"\n") {
			t.Errorf("%q writes no %s:\n%s", tt.args, tt.want, &out)
		}
	}
}
