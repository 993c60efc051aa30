package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// retired is what became of a setting that is accepted and has no effect.
type retired string

const (
	goneCleanup   retired = "use --cleanup, which removes the rules of every mode"
	goneCadvisor  retired = "it never concerned a proxy and has no effect"
	goneContainer retired = "the process is not moved into a container of its own; it has no effect"
	goneKlog      retired = "logs go to standard error; it has no effect"
	goneWindows   retired = "it only has an effect on Windows"
)

// retiredFlags are the flags that old or Windows manifests still give, by what
// they take.
func retiredFlags() (strings, bools map[string]retired) {
	strings = map[string]retired{
		"resource-container":              goneContainer,
		"boot-id-file":                    goneCadvisor,
		"machine-id-file":                 goneCadvisor,
		"log-backtrace-at":                goneKlog,
		"log-dir":                         goneKlog,
		"log-file":                        goneKlog,
		"log-file-max-size":               goneKlog,
		"stderrthreshold":                 goneKlog,
		"source-vip":                      goneWindows,
		"network-name":                    goneWindows,
		"root-hnsendpoint-name":           goneWindows,
		"conntrack-max":                   "use --conntrack-max-per-core and --conntrack-min",
		"azure-container-registry-config": goneCadvisor,
	}
	bools = map[string]retired{
		"cleanup-ipvs":            goneCleanup,
		"cleanup-iptables":        goneCleanup,
		"add-dir-header":          goneKlog,
		"alsologtostderr":         goneKlog,
		"logtostderr":             goneKlog,
		"one-output":              goneKlog,
		"skip-headers":            goneKlog,
		"skip-log-headers":        goneKlog,
		"windows-service":         goneWindows,
		"enable-dsr":              goneWindows,
		"forward-healthcheck-vip": goneWindows,
	}
	return strings, bools
}

// registerRetired adds the retired flags, hidden from the help text.
func registerRetired(fs *pflag.FlagSet) {
	texts, bools := retiredFlags()
	for name := range texts {
		fs.String(name, "", "retired")
		fs.Lookup(name).Hidden = true
	}
	for name := range bools {
		fs.Bool(name, false, "retired")
		fs.Lookup(name).Hidden = true
	}
}

// retiredFlagWarnings returns one warning for each retired flag that was given.
func retiredFlagWarnings(fs *pflag.FlagSet) []string {
	all, bools := retiredFlags()
	maps.Copy(all, bools)
	var out []string
	fs.Visit(func(f *pflag.Flag) {
		if why, ok := all[f.Name]; ok {
			out = append(out, fmt.Sprintf("flag --%s is retired: %s; remove it", f.Name, why))
		}
	})
	return out
}

// retiredField returns what became of a field of the file that v1alpha1 no longer
// has, "" for a field that it never had.
func retiredField(path string) retired {
	switch path {
	case "resourceContainer":
		return goneContainer
	case "ipvs.masqueradeAll":
		return "iptables.masqueradeAll counts for the ipvs mode too; it has no effect"
	}
	return ""
}

// gateWarnings returns one warning for each feature gate that has no effect here.
// All names are accepted: clusters hand one list of gates to all components.
func gateWarnings(gates map[string]bool) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(gates)) {
		switch {
		case name == gateExternalIPs, name == gateIPVS:
		case slices.Contains([]string{"SupportIPVSProxyMode", "NFTablesProxyMode"}, name):
			out = append(out, fmt.Sprintf("feature gate %s is retired and has no effect: choose the mode with --proxy-mode or the field mode; remove it", name))
		default:
			out = append(out, fmt.Sprintf("feature gate %s=%t has no effect in svcproxy; remove it", name, gates[name]))
		}
	}
	return out
}

const (
	gateExternalIPs = "AllowServiceExternalIPs"
	gateIPVS        = "KubeProxyIPVS"
)

// gate returns a feature gate's value.
func gate(gates map[string]bool, name string, byDefault bool) bool {
	if v, ok := gates[name]; ok {
		return v
	}
	return byDefault
}

// fieldOf takes the path out of a strict decoder's message about an unknown field.
func fieldOf(message string) (path string, ok bool) {
	rest, ok := strings.CutPrefix(message, `unknown field "`)
	if !ok {
		return "", false
	}
	return strings.CutSuffix(rest, `"`)
}
