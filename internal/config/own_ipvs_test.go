package config

import (
	"strings"
	"testing"
	"time"
)

func TestIPVSDrainTimeout(t *testing.T) {
	const own = "mode: ipvs\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\n"
	if c := mustFile(t, own+"ipvs: {drainTimeout: 90s}\n"); c.IPVS.DrainTimeout != 90*time.Second {
		t.Errorf("have %s, want 90s", c.IPVS.DrainTimeout)
	}
	if c := mustFile(t, own); c.IPVS.DrainTimeout != 0 {
		t.Errorf("have %s without a word about it, want the mode's default", c.IPVS.DrainTimeout)
	}
	_, _, err := file(own + "ipvs: {drainTimeout: -1s}\n")
	if err == nil || !strings.Contains(err.Error(), "ipvs.drainTimeout") {
		t.Errorf("have %v, want an error that names ipvs.drainTimeout", err)
	}
}
