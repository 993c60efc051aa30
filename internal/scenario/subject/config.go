package subject

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	yamljson "sigs.k8s.io/yaml"

	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// SettingsFile is the proxy's configuration file. It lies as a mounted ConfigMap
// does: the file is a symlink through a symlinked folder, which is swapped as a
// whole.
type SettingsFile struct {
	dir      string
	versions int
}

// Where the configuration file of a run is.
const (
	ConfigDir    = "config" // below the folder of the run
	SettingsName = "config.yaml"
)

// NewSettingsFile makes the folder; there is no file before the first Write.
func NewSettingsFile(dir string) (*SettingsFile, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the configuration folder: %w", err)
	}
	err := os.Symlink(filepath.Join("..data", SettingsName), filepath.Join(dir, SettingsName))
	return &SettingsFile{dir: dir}, err
}

// Path is the file's name, the same for all versions.
func (f *SettingsFile) Path() string { return filepath.Join(f.dir, SettingsName) }

// Write puts a new version in force in one step and removes the old one.
func (f *SettingsFile) Write(data []byte) error {
	data0 := filepath.Join(f.dir, "..data")
	old, _ := os.Readlink(data0)
	f.versions++
	version := fmt.Sprintf("..version-%d", f.versions)
	if err := os.Mkdir(filepath.Join(f.dir, version), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(f.dir, version, SettingsName), data, 0o644); err != nil {
		return err
	}
	tmp := filepath.Join(f.dir, "..data_tmp")
	if err := os.Symlink(version, tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, data0); err != nil {
		return err
	}
	if old == "" {
		return nil
	}
	return os.RemoveAll(filepath.Join(f.dir, old))
}

// Configuration is the runner's own KubeProxyConfiguration with a fragment laid
// over it. A fragment that is no YAML mapping is the whole file: that is how a
// scenario writes a broken one. A second document, behind a line "---", is taken as it
// is.
func Configuration(w *world.World, mode, kubeconfig string, fragment []byte) ([]byte, error) {
	quick := map[string]any{"minSyncPeriod": "10ms"}
	base := map[string]any{
		"apiVersion":       "kubeproxy.config.k8s.io/v1alpha1",
		"kind":             "KubeProxyConfiguration",
		"mode":             mode,
		"hostnameOverride": w.NodeName,
		"clusterCIDR":      world.ClusterCIDR.String() + "," + world.PodsV6.String(),
		// The kernel's conntrack sizes are the machine's, not the node's.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0},
		"iptables":  quick, "nftables": quick, "ipvs": quick,
	}
	if kubeconfig != "" {
		base["clientConnection"] = map[string]any{"kubeconfig": kubeconfig}
	}
	first, own, more := strings.Cut(string(fragment), "\n---\n")
	var over map[string]any
	if err := yamljson.Unmarshal([]byte(first), &over); err != nil {
		return fragment, nil
	}
	if err := mapSettings(w, over); err != nil {
		return nil, err
	}
	file, err := yamljson.Marshal(overlay(base, over))
	switch slow := flow.Patient(time.Second) > time.Second; {
	case more:
		file = append(file, "---\n"+own...)
	case mode == "userspace" && slow:
		file = append(file, "---\n"+patientConnects()...)
	}
	return file, err
}

// patientConnects is the configuration of tries to connect on a machine on which an
// endpoint that is there can take longer than the proxy waits.
func patientConnects() string {
	var all []string
	for _, d := range []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second} {
		all = append(all, flow.Patient(d).String())
	}
	return "apiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\nuserspace: {connectTimeouts: [" + strings.Join(all, ", ") + "]}\n"
}

// mapSettings fits the addresses in a fragment to the family set.
func mapSettings(w *world.World, over map[string]any) error {
	switch w.Families {
	case world.Only6:
		_, err := world.MapTree(over)
		return err
	case world.Dual:
		if list, ok := over["nodePortAddresses"].([]any); ok {
			for _, e := range list[:len(list):len(list)] {
				s, _ := e.(string)
				for _, t := range world.Twins(s) {
					list = append(list, t)
				}
			}
			over["nodePortAddresses"] = list
		}
		if s, ok := over["clusterCIDR"].(string); ok && !strings.Contains(s, ",") {
			t, err := world.Twin(s)
			if err != nil {
				return err
			}
			if t != s {
				over["clusterCIDR"] = s + "," + t
			}
		}
	}
	return nil
}

// overlay merges mappings; other values of over replace those of base.
func overlay(base, over map[string]any) map[string]any {
	out := make(map[string]any, len(base))
	for k, v := range base {
		out[k] = v
	}
	for k, v := range over {
		b, ok := out[k].(map[string]any)
		o, ok2 := v.(map[string]any)
		if ok && ok2 {
			v = overlay(b, o)
		}
		out[k] = v
	}
	return out
}
