package sysctls

import "testing"

func TestReuseMode(t *testing.T) {
	for release, want := range map[string]string{
		"6.1.0-44-amd64": "1", "5.9.0": "1", "5.10": "1", "5.8.18": "0", "4.19.0-27": "0", "4.1.0": "0", "4.0.9": "", "3.10.0-1160.el7": "", "": "1", "unknown": "1",
	} {
		have := ""
		for _, s := range For(release, false) {
			if s.Name == "net.ipv4.vs.conn_reuse_mode" {
				have = s.Value
			}
		}
		if have != want {
			t.Errorf("Linux %q: conn_reuse_mode %q, want %q", release, have, want)
		}
	}
}
