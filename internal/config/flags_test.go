package config

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// kubeProxyFlags are the flags of kube-proxy 1.37 with their defaults, and the two
// that it no longer shows.
const kubeProxyFlags = `
bind-address 0.0.0.0
bind-address-hard-fail false
cleanup false
cluster-cidr
config
config-sync-period 15m0s
conntrack-max-per-core 32768
conntrack-min 131072
conntrack-tcp-be-liberal false
conntrack-tcp-timeout-close-wait 1h0m0s
conntrack-tcp-timeout-established 24h0m0s
conntrack-udp-timeout 0s
conntrack-udp-timeout-stream 0s
detect-local-mode
feature-gates
healthz-bind-address 0.0.0.0:10256
healthz-port 10256
hostname-override
init-only false
iptables-localhost-nodeports true
iptables-masquerade-bit 14
iptables-min-sync-period 1s
iptables-sync-period 30s
ipvs-exclude-cidrs []
ipvs-min-sync-period 1s
ipvs-scheduler
ipvs-strict-arp false
ipvs-sync-period 30s
ipvs-tcp-timeout 0s
ipvs-tcpfin-timeout 0s
ipvs-udp-timeout 0s
kube-api-burst 10
kube-api-content-type application/vnd.kubernetes.protobuf
kube-api-qps 5
kubeconfig
log-flush-frequency 5s
log-json-info-buffer-size 0
log-json-split-stream false
log-text-info-buffer-size 0
log-text-split-stream false
logging-format text
masquerade-all false
master
metrics-bind-address 127.0.0.1:10249
metrics-port 10249
nodeport-addresses []
oom-score-adj -999
pod-bridge-interface
pod-interface-name-prefix
profiling false
proxy-mode
show-hidden-metrics-for-version
v 0
version
vmodule
write-config-to
`

func TestFlagSet(t *testing.T) {
	fs := pflag.NewFlagSet("svcproxy", pflag.ContinueOnError)
	NewFlags().Register(fs)
	for line := range strings.Lines(strings.TrimSpace(kubeProxyFlags)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		f := fs.Lookup(name)
		if f == nil {
			t.Errorf("no flag --%s", name)
			continue
		}
		if f.DefValue != value {
			t.Errorf("--%s: default %q, want %q", name, f.DefValue, value)
		}
	}
	if f := fs.ShorthandLookup("v"); f == nil || f.Name != "v" {
		t.Errorf("-v is %v", f)
	}
}
