package host

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const modulesDep = `kernel/lib/libcrc32c.ko:
kernel/net/netfilter/ipvs/ip_vs.ko.xz: kernel/net/netfilter/nf_conntrack.ko kernel/lib/libcrc32c.ko
kernel/net/netfilter/ipvs/ip_vs_rr.ko.gz: kernel/net/netfilter/ipvs/ip_vs.ko.xz
kernel/net/sched/sch-odd.ko:
kernel/net/netfilter/nf_conntrack.ko:
/opt/extra/ip_vs_own.ko:
`

func TestFindModule(t *testing.T) {
	list := filepath.Join(tree(t, map[string]string{"modules.dep": modulesDep}), "modules.dep")
	for name, want := range map[string]string{
		"ip_vs":     "kernel/net/netfilter/ipvs/ip_vs.ko.xz kernel/net/netfilter/nf_conntrack.ko kernel/lib/libcrc32c.ko",
		"ip_vs_rr":  "kernel/net/netfilter/ipvs/ip_vs_rr.ko.gz kernel/net/netfilter/ipvs/ip_vs.ko.xz",
		"sch_odd":   "kernel/net/sched/sch-odd.ko",
		"ip_vs_own": "/opt/extra/ip_vs_own.ko",
		"ip_v":      "",
		"nosuch":    "",
	} {
		line, found := findModule(list, name)
		have := strings.TrimSpace(line.file + " " + strings.Join(line.needs, " "))
		if have != want || found != (want != "") {
			t.Errorf("%s: %q, %v; want %q", name, have, found, want)
		}
	}
}

// Built in, loaded, listed and not, in a folder without modules: each says what it is
// and what to do.
func TestModuleStates(t *testing.T) {
	sys := tree(t, map[string]string{"module/nf_conntrack/refcnt": "0\n"})
	k := Kernel{Sys: sys, Modules: tree(t, map[string]string{
		"modules.dep":     modulesDep,
		"modules.builtin": "kernel/net/netfilter/ipvs/ip-vs-builtin.ko\n",
	})}
	for _, name := range []string{"nf_conntrack", "nf-conntrack", "ip_vs_builtin"} {
		if err := errors.Join(k.Module(name), k.Load(t.Context(), name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := k.Module("ip_vs_rr"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ip_vs_rr is listed, not loaded: %v", err)
	}
	for _, c := range []struct {
		k          Kernel
		name, want string
	}{
		{k, "nosuch", "load kernel module nosuch: this kernel has no such module"},
		{k, "sch_odd", "sch-odd.ko"}, // listed, but the file is missing
		{Kernel{Sys: sys, Modules: t.TempDir()}, "ip_vs", "modprobe ip_vs"},
	} {
		if err := c.k.Load(t.Context(), c.name); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Load(%s): %v, want %q", c.name, err, c.want)
		}
	}
}

// What cannot be a module is refused by the kernel, and named.
func TestLoadOfGarbage(t *testing.T) {
	packed := gzipped(t, "no module")
	dir := tree(t, map[string]string{
		"modules.dep": "plain.ko:\npacked.ko.gz:\nother.ko.xz:\n",
		"plain.ko":    "no module", "packed.ko.gz": packed, "other.ko.xz": "no module",
	})
	t.Setenv("PATH", t.TempDir())
	k := Kernel{Sys: t.TempDir(), Modules: dir}
	for name, file := range map[string]string{"plain": "plain.ko", "packed": "packed.ko.gz"} {
		if err := k.Load(t.Context(), name); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// EPERM of one who may not load anything comes first.
	if err := k.Load(t.Context(), "other"); err == nil || !errors.Is(err, errCompressed) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOSYS) {
		t.Errorf("other: %v", err)
	}
}

func gzipped(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, err := z.Write([]byte(text))
	if err := errors.Join(err, z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestGunzip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.ko.gz")
	if err := os.WriteFile(path, []byte(gzipped(t, "the module")), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if have, err := gunzip(f); err != nil || string(have) != "the module" {
		t.Errorf("%q, %v", have, err)
	}
}

// A kernel with modules loads one by file, what it needs first, and says so in /sys.
func TestKernelLoad(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: loading kernel modules")
	}
	var k Kernel
	dir, err := k.modules()
	if err != nil {
		t.Fatal(err)
	}
	const name = "nf_log_syslog" // small, useless here, and of no harm
	if _, listed := findModule(filepath.Join(dir, "modules.dep"), name); !listed {
		t.Skip("needs root and loadable modules in the kernel")
	}
	t.Setenv("PATH", t.TempDir()) // without the program modprobe
	if err := k.Load(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if err := k.Module(name); err != nil {
		t.Error(err)
	}
	if err := k.Load(t.Context(), "ip_vs_wlc"); err != nil { // needs others
		t.Error(err)
	}
	if err := k.Module("ip_vs"); err != nil {
		t.Error(err)
	}
}
