package config

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPreference(t *testing.T) {
	for _, tt := range []struct {
		mode string
		want []string
	}{
		{"", []string{IPTables}},
		{"ipvs", []string{IPVS}},
		{"nftables,iptables", []string{NFTables, IPTables}},
		{"nftables, userspace", []string{NFTables, Userspace}},
		{"auto", AutoModes[:]},
	} {
		c := mustLoad(t, "--proxy-mode="+tt.mode)
		if !slices.Equal(c.Preference, tt.want) || c.Mode != tt.want[0] {
			t.Errorf("%q: have %v and mode %s", tt.mode, c.Preference, c.Mode)
		}
	}
	for mode, want := range map[string]string{
		"nftables,iptable": `"iptable" is not a mode`, "nftables,": `"" is not a mode`,
		"auto,iptables": `"auto" is not a mode`, "ipvs,ipvs": "ipvs is there twice",
	} {
		if _, _, err := load([]string{"--proxy-mode=" + mode}, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: have %v, want %q in it", mode, err, want)
		}
	}
}

// What depends on the mode depends on the one that was chosen.
func TestChoose(t *testing.T) {
	c := mustFile(t, "mode: nftables,ipvs,iptables\nnftables: {minSyncPeriod: 2s, masqueradeAll: true}\niptables: {minSyncPeriod: 3s}\nipvs: {scheduler: wlc}")
	for mode, want := range map[string]struct {
		min       time.Duration
		all       bool
		nodePorts int
		scheduler string
	}{
		NFTables: {2 * time.Second, true, 1, ""}, IPTables: {3 * time.Second, false, 0, ""}, IPVS: {0, false, 0, "wlc"},
	} {
		have, err := c.Choose(mode)
		if err != nil {
			t.Fatal(err)
		}
		if have.Mode != mode || have.MinSyncPeriod != want.min || have.MasqueradeAll != want.all ||
			len(have.NodePortAddresses) != want.nodePorts || have.IPVS.Scheduler != want.scheduler {
			t.Errorf("%s: have %+v", mode, have)
		}
		again, err := have.Choose(NFTables)
		if err != nil || len(again.NodePortAddresses) != 1 {
			t.Errorf("back from %s: %v, %v", mode, again, err)
		}
		inForce, applied, restart, err := have.Reload(mustFile(t, "mode: nftables,ipvs,iptables\nnftables: {minSyncPeriod: 2s, masqueradeAll: true}\niptables: {minSyncPeriod: 3s}\nipvs: {scheduler: wlc}"))
		if err != nil || inForce.Mode != mode || len(applied)+len(restart) > 0 {
			t.Errorf("%s: the same file again: mode %s, applied %v, restart %v, %v", mode, inForce.Mode, applied, restart, err)
		}
	}
	if _, err := c.Choose(Userspace); err == nil {
		t.Error("a mode that is not among them was chosen")
	}
}

// A mode that its feature gate switches off is passed over.
func TestPreferenceWithoutIPVS(t *testing.T) {
	mustFile(t, "mode: auto\nfeatureGates: {KubeProxyIPVS: false}\nipvs: {tcpTimeout: -1s}")
}

// Flags that speak of a mode's section speak of all sections while none is chosen,
// and a file written from them says the same.
func TestPreferenceByFlags(t *testing.T) {
	c := mustLoad(t, "--proxy-mode=nftables,ipvs,iptables", "--iptables-min-sync-period=7s", "--ipvs-min-sync-period=9s", "--masquerade-all")
	for _, c := range []*Config{c, mustFile(t, strings.TrimPrefix(written(t, c), "apiVersion: kubeproxy.config.k8s.io/v1alpha1\n"))} {
		for mode, want := range map[string]time.Duration{NFTables: 7 * time.Second, IPTables: 7 * time.Second, IPVS: 9 * time.Second} {
			have, err := c.Choose(mode)
			if err != nil {
				t.Fatal(err)
			}
			if !have.MasqueradeAll || have.MinSyncPeriod != want {
				t.Errorf("%s: masquerade all %t, min %s", mode, have.MasqueradeAll, have.MinSyncPeriod)
			}
		}
		if diff := cmp.Diff([]string{NFTables, IPVS, IPTables}, c.Preference); diff != "" {
			t.Error(diff)
		}
	}
}
