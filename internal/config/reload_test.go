package config

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestReload(t *testing.T) {
	tests := []struct {
		name             string
		from, to         string
		applied, restart []string
	}{
		{"nothing", "mode: iptables", "mode: iptables\n# a comment", nil, nil},
		{"node-port addresses", "", "nodePortAddresses: [primary]", []string{"nodePortAddresses"}, nil},
		{"several", "clusterCIDR: 10.0.0.0/8", "clusterCIDR: 11.0.0.0/8\niptables: {masqueradeAll: true, minSyncPeriod: 2s}\nlogging: {verbosity: 4}",
			[]string{"clusterCIDR", "iptables.masqueradeAll", "iptables.minSyncPeriod", "logging.verbosity"}, nil},
		{"how pods are recognised", "", "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}",
			[]string{"detectLocal.bridgeInterface", "detectLocalMode"}, nil},
		{"a gate", "", "featureGates: {AllowServiceExternalIPs: false}", []string{"featureGates.AllowServiceExternalIPs"}, nil},
		{"a gate goes", "featureGates: {AllowServiceExternalIPs: false}", "", []string{"featureGates.AllowServiceExternalIPs"}, nil},
		{"conntrack", "", "conntrack: {maxPerCore: 1, tcpBeLiberal: true}", []string{"conntrack.maxPerCore"}, []string{"conntrack.tcpBeLiberal"}},
		{"the mode", "mode: iptables\nnodePortAddresses: [primary]", "mode: ipvs\nnodePortAddresses: [localhost]\nipvs: {syncPeriod: 9s}",
			[]string{"ipvs.syncPeriod", "nodePortAddresses"}, []string{"mode"}},
		{"a mode with another default of node-port addresses", "mode: iptables", "mode: nftables", nil, []string{"mode", "nodePortAddresses"}},
		{"and back", "mode: nftables", "mode: iptables", nil, []string{"mode", "nodePortAddresses"}},
		{"health checks", "", "mode: iptables\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\nhealthCheck: {default: tcp, probesPerSecond: 7}\nserviceProxyName: x",
			[]string{"healthCheck.default", "healthCheck.probesPerSecond"}, []string{"serviceProxyName"}},
		{"external addresses", "", "mode: iptables\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\nexternalAddresses: {refuseClusterRanges: true, allow: [203.0.113.0/24]}",
			[]string{"externalAddresses.allow", "externalAddresses.refuseClusterRanges"}, nil},
		{"addresses and client", "", "healthzBindAddress: 1.2.3.4\nclientConnection: {kubeconfig: /k}\nhostnameOverride: x\niptables: {masqueradeBit: 3}\nenableProfiling: true",
			nil, []string{"clientConnection.kubeconfig", "enableProfiling", "healthzBindAddress", "hostnameOverride", "iptables.masqueradeBit"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, next := mustFile(t, tt.from), mustFile(t, tt.to)
			before := written(t, c)
			inForce, applied, restart, err := c.Reload(next)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([][]string{tt.applied, tt.restart}, [][]string{applied, restart}); diff != "" {
				t.Errorf("applied and restart, -want +have:\n%s", diff)
			}
			if inForce.Mode != c.Mode {
				t.Errorf("mode became %q", inForce.Mode)
			}
			if written(t, c) != before {
				t.Error("the old configuration was written to")
			}
		})
	}
}

// Fields that wait for a restart do not hold up the others, and a second file is
// compared with what is in force.
func TestReloadTwice(t *testing.T) {
	c := mustFile(t, "")
	c, _, restart, err := c.Reload(mustFile(t, "mode: nftables\nnftables: {minSyncPeriod: 5s}\niptables: {minSyncPeriod: 3s}\nnodePortAddresses: [localhost]"))
	if err != nil {
		t.Fatal(err)
	}
	if len(restart) == 0 || c.Mode != IPTables || c.MinSyncPeriod != 3*time.Second || len(c.NodePortAddresses) != 1 {
		t.Errorf("in force: mode %s, min %v, %v; restart for %v", c.Mode, c.MinSyncPeriod, c.NodePortAddresses, restart)
	}
	c, applied, restart, err := c.Reload(mustFile(t, "iptables: {minSyncPeriod: 3s}"))
	if err != nil {
		t.Fatal(err)
	}
	if len(restart) != 0 || !cmp.Equal(applied, []string{"nftables.minSyncPeriod", "nodePortAddresses"}) || len(c.NodePortAddresses) != 0 {
		t.Errorf("back: applied %v, restart %v, node ports %v", applied, restart, c.NodePortAddresses)
	}
}
