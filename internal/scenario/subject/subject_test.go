package subject

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

func TestParse(t *testing.T) {
	tests := []struct {
		line, name string
		command    []string
	}{
		{"kube-proxy --config {CONFIG}", "kube-proxy", []string{"kube-proxy", "--config", "{CONFIG}"}},
		{"/opt/bin/kube-proxy --x='a b' \"c d\"", "kube-proxy", []string{"/opt/bin/kube-proxy", "--x=a b", "c d"}},
		{"PATH=/legacy:/bin A=1 proxy -v 4", "proxy", []string{"env", "PATH=/legacy:/bin", "A=1", "proxy", "-v", "4"}},
	}
	for _, tt := range tests {
		s, err := Parse(tt.line)
		if err != nil || s.Name != tt.name || cmp.Diff(tt.command, s.Command) != "" {
			t.Errorf("%q: have %+v, %v", tt.line, s, err)
		}
	}
	for _, line := range []string{"", "A=1", "proxy 'x"} {
		if s, err := Parse(line); err == nil {
			t.Errorf("%q: have %+v, want an error", line, s)
		}
	}
}

func TestSettingsFileIsSwapped(t *testing.T) {
	dir := filepath.Join(t.TempDir(), ConfigDir)
	f, err := NewSettingsFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"first", "second", "third"} {
		if err := f.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(f.Path())
		if err != nil || string(b) != text {
			t.Errorf("have %q, %v, want %q", b, err, text)
		}
	}
	if link, err := os.Readlink(f.Path()); err != nil || link != filepath.Join("..data", SettingsName) {
		t.Errorf("the file is a link to %q, %v: not as a ConfigMap is mounted", link, err)
	}
	left, err := filepath.Glob(filepath.Join(dir, "..version-*"))
	if err != nil || len(left) != 1 {
		t.Errorf("versions left: %v, %v, want the last", left, err)
	}
}

func TestConfiguration(t *testing.T) {
	read := func(f world.Families, fragment string) map[string]any {
		t.Helper()
		b, err := Configuration(world.New(f), "iptables", "/k", []byte(fragment))
		if err != nil {
			t.Fatal(err)
		}
		var v map[string]any
		if err := yaml.Unmarshal(b, &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	v := read(world.AsWritten, "iptables: {masqueradeAll: true}\nnodePortAddresses: [192.0.2.0/24]\n")
	want := map[string]any{"minSyncPeriod": "10ms", "masqueradeAll": true}
	if d := cmp.Diff(want, v["iptables"]); d != "" {
		t.Errorf("the fragment is not laid over the runner's own (-want +have)\n%s", d)
	}
	if v["mode"] != "iptables" || v["hostnameOverride"] != "alder" || v["clusterCIDR"] != "10.61.0.0/16,2001:db8:61::/48" {
		t.Errorf("the runner's own: %v", v)
	}
	six := read(world.Only6, "nodePortAddresses: [192.0.2.0/24, primary]\nclusterCIDR: 10.61.0.0/16\n")
	if d := cmp.Diff([]any{"2001:db8:1::/64", "primary"}, six["nodePortAddresses"]); d != "" || six["clusterCIDR"] != "2001:db8:61::/48" {
		t.Errorf("mapped to IPv6: %v", six)
	}
	both := read(world.Dual, "nodePortAddresses: [192.0.2.0/24, primary]\nclusterCIDR: 10.61.0.0/16\n")
	if d := cmp.Diff([]any{"192.0.2.0/24", "primary", "2001:db8:1::/64"}, both["nodePortAddresses"]); d != "" || both["clusterCIDR"] != "10.61.0.0/16,2001:db8:61::/48" {
		t.Errorf("both families: %v", both)
	}
	broken := "nodePortAddresses: [\n"
	if b, err := Configuration(world.New(world.AsWritten), "iptables", "", []byte(broken)); err != nil || string(b) != broken {
		t.Errorf("a broken file is written as %q, %v", b, err)
	}
}

func TestOutput(t *testing.T) {
	var o Output
	lines := `time=2026-01-01T00:00:00Z level=INFO msg="a start"
time=2026-01-01T00:00:01Z level=WARN msg=event type=Warning reason=AddressConflict kind=Service namespace=default name=new message="older one"
{"level":"WARN","msg":"event","reason":"NodeAddress","kind":"Service","namespace":"default","name":"edge"}
`
	if _, err := o.Write([]byte(lines)); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		reason string
		on     []string
		want   int
	}{
		{"AddressConflict", nil, 1},
		{"AddressConflict", []string{"Service", "default", "new"}, 1},
		{"AddressConflict", []string{"Service", "default", "old"}, 0},
		{"NodeAddress", []string{"Service", "default", "edge"}, 1},
		{"Conflict", nil, 0},
	}
	for _, tt := range tests {
		if have := o.Events(tt.reason, tt.on); have != tt.want {
			t.Errorf("%s on %v: have %d", tt.reason, tt.on, have)
		}
	}
	if s := o.Tail(1); !strings.HasPrefix(s, "{") || strings.Contains(s, "\n") {
		t.Errorf("last line %q", s)
	}
}

func TestFileFeed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	f, err := NewFileFeed(dir)
	if err != nil {
		t.Fatal(err)
	}
	objs, err := world.Decode([]byte("kind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.62.0.20, ports: [{port: 80}]}\n"), world.AsWritten)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Put(objs[0]); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "service.default.web.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := world.Decode(b, world.AsWritten)
	if err != nil || world.KeyOf(again[0]) != world.KeyOf(objs[0]) {
		t.Errorf("the manifest holds %s, %v", b, err)
	}
	k := world.KeyOf(objs[0])
	if err := f.Remove(k); err != nil {
		t.Fatal(err)
	}
	if err := f.Remove(k); err != nil {
		t.Errorf("remove again: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
