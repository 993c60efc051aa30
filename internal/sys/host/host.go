// Package host is the seam to what belongs to the node as a whole: the addresses
// of its interfaces, sysctls, kernel modules and their parameters. [Kernel] is the
// running kernel, [Fake] one in memory.
//
// It reports and writes; what the values should be is decided elsewhere. The
// network namespace is that of the calling thread.
package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Addresses knows the addresses of the node's interfaces.
type Addresses interface {
	// Addrs returns the addresses of all interfaces, both families, sorted, each
	// once, without zones.
	Addrs() ([]netip.Addr, error)
	// Watch calls changed with all addresses, at once and after each change, until
	// ctx ends, and returns nil then. An error means that changes are not seen;
	// call it again.
	Watch(ctx context.Context, changed func([]netip.Addr)) error
}

// Sysctls reads and writes sysctls by their dotted name, as in
// "net.netfilter.nf_conntrack_max", and parameters of modules. Values are without
// the trailing newline.
type Sysctls interface {
	Sysctl(name string) (string, error)
	SetSysctl(name, value string) error
	Parameter(module, name string) (string, error)
	SetParameter(module, name, value string) error
	// OnlineCPUs is the number of CPUs that the node has switched on, whatever of
	// them this process may use.
	OnlineCPUs() (int, error)
}

// Modules knows and loads kernel modules.
type Modules interface {
	// Module returns nil if the module is loaded or built in; an error of
	// fs.ErrNotExist if not. Where the list of a kernel's modules is not at hand, a
	// built-in one without parameters is not seen: to try is better than to ask.
	Module(name string) error
	// Load loads it, and what it needs, if it is missing. The error says what to do.
	Load(ctx context.Context, name string) error
}

// Host is everything of the node.
type Host interface {
	Addresses
	Sysctls
	Modules
	// IPv6 returns nil if the kernel can do IPv6, else what is missing.
	IPv6() error
}

// Kernel is the running kernel. The zero value is ready.
type Kernel struct {
	Proc string // instead of /proc
	Sys  string // instead of /sys
	// Modules is the folder of the kernel's modules, instead of /lib/modules/RELEASE.
	Modules string
}

var _ Host = Kernel{}

func (k Kernel) proc(path ...string) string { return under(k.Proc, "/proc", path) }
func (k Kernel) sys(path ...string) string  { return under(k.Sys, "/sys", path) }

func under(root, standard string, path []string) string {
	if root == "" {
		root = standard
	}
	return filepath.Join(append([]string{root}, path...)...)
}

// sysctlPath returns the file of a sysctl. As in sysctl(8), a slash in the name
// stands for a dot inside a component (an interface name such as eth0.100).
func (k Kernel) sysctlPath(name string) string {
	swap := strings.NewReplacer(".", "/", "/", ".")
	return k.proc("sys", swap.Replace(name))
}

func (k Kernel) Sysctl(name string) (string, error) {
	v, err := read(k.sysctlPath(name))
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return v, nil
}

func (k Kernel) SetSysctl(name, value string) error {
	if err := write(k.sysctlPath(name), value); err != nil {
		return fmt.Errorf("set sysctl %s to %s: %w", name, value, err)
	}
	return nil
}

func (k Kernel) Parameter(module, name string) (string, error) {
	v, err := read(k.sys("module", module, "parameters", name))
	if err != nil {
		return "", fmt.Errorf("read parameter %s of module %s: %w", name, module, err)
	}
	return v, nil
}

func (k Kernel) SetParameter(module, name, value string) error {
	if err := write(k.sys("module", module, "parameters", name), value); err != nil {
		return fmt.Errorf("set parameter %s of module %s to %s: %w", name, module, value, err)
	}
	return nil
}

func (k Kernel) OnlineCPUs() (int, error) {
	list, err := read(k.sys("devices", "system", "cpu", "online"))
	if err != nil {
		return 0, fmt.Errorf("count the CPUs that are online: %w", err)
	}
	return countCPUs(list)
}

// countCPUs counts a list such as "0-3,8,10-11" (Linux, cpu-lists).
func countCPUs(list string) (int, error) {
	n := 0
	for part := range strings.SplitSeq(list, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		first, err1 := strconv.Atoi(lo)
		last, err2 := strconv.Atoi(hi)
		if err1 != nil || err2 != nil || last < first {
			return 0, fmt.Errorf("CPU list %q: %q is neither a number nor a range", list, part)
		}
		n += last - first + 1
	}
	return n, nil
}

func (k Kernel) IPv6() error {
	if _, err := os.Stat(k.proc("net", "if_inet6")); errors.Is(err, fs.ErrNotExist) {
		return errors.New("the kernel has no IPv6 (no /proc/net/if_inet6)")
	}
	if v, err := k.Sysctl("net.ipv6.conf.all.disable_ipv6"); err == nil && v == "1" {
		return errors.New("IPv6 is switched off (sysctl net.ipv6.conf.all.disable_ipv6 is 1)")
	}
	return nil
}

func read(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}

// write opens the file without creating it, which is what procfs and sysfs want.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
