package arch

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/svcproxy/svcproxy"

// rule says what a package may import beside the standard library. A pattern is
// an import path, without the module's own path for packages of the project;
// "/..." at its end covers everything below too.
type rule struct {
	pkg string // one package, or a pattern
	may []string
}

// Libraries by what they are for.
var (
	apiTypes = []string{"k8s.io/api/...", "k8s.io/apimachinery/..."}
	kernel   = []string{
		"github.com/google/nftables/...", "github.com/mdlayher/genetlink/...", "github.com/mdlayher/netlink/...", "github.com/ti-mo/conntrack/...",
		"github.com/ti-mo/netfilter/...", "github.com/vishvananda/netlink/...", "github.com/vishvananda/netns/...",
		"golang.org/x/sys/...",
	}
	anything = []string{"..."}
)

// A mode knows plans and the kernel; Kubernetes, the planner, the configuration
// and the other modes do not exist for it.
var modeMay = []string{"internal/plan", "internal/delta", "internal/dataplane", "internal/sys/...", "golang.org/x/sys/..."}

// rules holds for every package of the module; the first match counts. Tests may
// import what they like.
var rules = []rule{
	{"internal/plan", nil},
	{"internal/plan/plantest", []string{"internal/plan"}},
	{"internal/delta", nil},
	{"internal/planner", slices.Concat([]string{"internal/plan", "internal/cluster"}, apiTypes)},
	{"internal/cluster", apiTypes},
	{"internal/cluster/kube", slices.Concat([]string{"internal/cluster", "k8s.io/client-go/...", "k8s.io/klog/v2", "golang.org/x/time/rate"}, apiTypes)},
	{"internal/cluster/file", slices.Concat([]string{"internal/cluster", "github.com/fsnotify/fsnotify", "sigs.k8s.io/yaml", "sigs.k8s.io/json"}, apiTypes)},
	{"internal/dataplane", []string{"internal/plan", "internal/sys/conntrack", "golang.org/x/time/rate"}},
	{"internal/choice", nil},
	{"internal/takeover", []string{"internal/plan", "internal/dataplane"}},
	{"internal/probe", []string{"internal/plan", "internal/dataplane", "golang.org/x/time/rate"}},
	{"internal/health", []string{"internal/plan", "golang.org/x/sys/..."}},
	{"internal/metrics", []string{"internal/plan", "github.com/prometheus/..."}},
	{"internal/iptables", modeMay},
	{"internal/nftables", slices.Concat([]string{"internal/nftables/..."}, modeMay)},
	{"internal/nftables/...", modeMay},
	{"internal/ipvs", slices.Concat([]string{"internal/ipvs/..."}, modeMay)},
	{"internal/ipvs/...", slices.Concat([]string{"internal/ipvs/..."}, modeMay)},
	{"internal/userspace", slices.Concat([]string{"internal/relay/...", "internal/userspace/..."}, modeMay)},
	{"internal/userspace/listeners", []string{"internal/plan", "internal/relay", "golang.org/x/sys/..."}},
	{"internal/userspace/...", modeMay},
	{"internal/loopback", []string{"internal/plan", "internal/relay", "internal/relay/handover", "golang.org/x/sys/..."}},
	{"internal/relay/...", []string{"internal/plan", "internal/relay/...", "golang.org/x/sys/..."}},
	{"internal/ebpf", modeMay},
	{"internal/sys/...", slices.Concat([]string{"internal/sys/..."}, kernel)},
	{"internal/config", []string{
		"internal/plan", "github.com/spf13/pflag", "github.com/fsnotify/fsnotify", "sigs.k8s.io/yaml",
		"k8s.io/kube-proxy/config/...", "k8s.io/component-base/...", "k8s.io/apimachinery/...",
		"k8s.io/utils/...", "sigs.k8s.io/json",
	}},
	{"internal/app", anything},
	{"internal/demo", []string{"internal/plan", "internal/lab"}},
	{"internal/arch", nil},
	{"internal/lab", kernel},
	{"internal/lab/apiserver", slices.Concat([]string{"sigs.k8s.io/yaml"}, apiTypes)},
	{"internal/lab/...", kernel},
	{"internal/scenario/...", anything},
	{"cmd/...", anything},
	{"bench/...", anything},
	{"test/...", anything},
}

// never are imports that nothing of the product may reach, not even through
// others; except names the packages for which this does not hold.
var never = []struct {
	from, to string
	except   []string
}{
	{"...", "k8s.io/kubernetes/...", nil},
	{"internal/plan", "golang.org/x/...", nil},
	{"internal/iptables", "k8s.io/...", nil},
	{"internal/nftables", "k8s.io/...", nil},
	{"internal/ipvs", "k8s.io/...", nil},
	{"internal/userspace", "k8s.io/...", nil},
	{"internal/ebpf", "k8s.io/...", nil},
	{"internal/dataplane", "k8s.io/...", nil},
	{"internal/health", "k8s.io/...", nil},
	{"internal/metrics", "k8s.io/...", nil},
	{"internal/sys/...", "k8s.io/...", nil},
	{"...", "k8s.io/client-go/...", []string{
		"internal/cluster/kube", "internal/app", "internal/scenario/...", "internal/lab/apiserver", "cmd/...", "bench/...", "test/...",
	}},
}

// goPackage is what "go list -json" says of a package.
type goPackage struct {
	ImportPath string
	Dir        string
	Doc        string
	Standard   bool
	GoFiles    []string
	Imports    []string
	Deps       []string
}

// mustList returns the packages that go list names for patterns, from the module's root.
func mustList(t *testing.T, args ...string) []goPackage {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Dir,Doc,Standard,GoFiles,Imports,Deps"}, args...)...)
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, stderr.String())
	}
	var pkgs []goPackage
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("reading go list: %v", err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) == 0 {
		t.Fatalf("%v lists nothing", cmd)
	}
	return pkgs
}

// root is the module's top folder, relative to this package.
const root = "../.."

// short is an import path as rules write it.
func short(path string) string { return strings.TrimPrefix(path, module+"/") }

func matches(pattern, path string) bool {
	path = short(path)
	if below, ok := strings.CutSuffix(pattern, "..."); ok {
		return strings.HasPrefix(path+"/", below)
	}
	return path == pattern
}

func matchesAny(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, path) })
}

// standard reports whether path is of the standard library: no dot in its first part.
func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

func TestImports(t *testing.T) {
	for _, p := range mustList(t, "./...") {
		i := slices.IndexFunc(rules, func(r rule) bool { return matches(r.pkg, p.ImportPath) })
		if i < 0 {
			t.Errorf("%s has no rule: add one, and a line in docs/ARCHITECTURE.md", short(p.ImportPath))
			continue
		}
		for _, imported := range p.Imports {
			if !standard(imported) && !matchesAny(rules[i].may, imported) {
				t.Errorf("%s must not import %s: it may import the standard library and %v",
					short(p.ImportPath), short(imported), rules[i].may)
			}
		}
	}
}

func TestImportsReachNothingForbidden(t *testing.T) {
	for _, p := range mustList(t, "./...") {
		for _, n := range never {
			if !matches(n.from, p.ImportPath) || matchesAny(n.except, p.ImportPath) {
				continue
			}
			for _, dep := range p.Deps {
				if matches(n.to, dep) && !strings.HasPrefix(dep, module) {
					t.Errorf("%s reaches %s, which %s must not", short(p.ImportPath), dep, n.from)
					break
				}
			}
		}
	}
}

// TestOneModeOneLayout holds every mode of the program to the same files, so that
// who knows one finds the way in the next.
func TestOneModeOneLayout(t *testing.T) {
	found := 0
	for _, imported := range mustList(t, "./internal/app")[0].Imports {
		mode := short(imported)
		if !slices.Contains([]string{"internal/iptables", "internal/nftables", "internal/ipvs", "internal/userspace", "internal/ebpf"}, mode) {
			continue
		}
		found++
		for _, want := range []string{"mode.go", "render.go", "names.go", "apply.go", "cleanup.go", "README.md"} {
			if !exists(root + "/" + mode + "/" + want) {
				t.Errorf("%s has no %s", mode, want)
			}
		}
	}
	if found == 0 {
		t.Error("the program has no mode at all")
	}
}
