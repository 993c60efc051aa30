package host

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

func (k Kernel) Module(name string) error {
	name = moduleName(name)
	if _, err := os.Stat(k.sys("module", name)); err == nil {
		return nil
	}
	// One that is built in and has no parameters is seen nowhere else.
	if dir, err := k.modules(); err == nil {
		if _, builtIn := findModule(filepath.Join(dir, "modules.builtin"), name); builtIn {
			return nil
		}
	}
	return fmt.Errorf("kernel module %s: %w", name, fs.ErrNotExist)
}

// Load needs no program: it does what modprobe(8) does, by the list of modules that
// depmod(8) made. Only a module that is compressed in a way that neither the kernel
// (before Linux 5.17) nor this package can read is left to modprobe. Lines of
// /etc/modprobe.d do not count.
func (k Kernel) Load(ctx context.Context, name string) error {
	name = moduleName(name)
	if k.Module(name) == nil {
		return nil
	}
	if err := k.load(ctx, name); err != nil {
		return fmt.Errorf("load kernel module %s: %w", name, err)
	}
	return nil
}

func (k Kernel) load(ctx context.Context, name string) error {
	dir, err := k.modules()
	if err != nil {
		return err
	}
	line, found := findModule(filepath.Join(dir, "modules.dep"), name)
	if !found {
		if _, err := os.Stat(filepath.Join(dir, "modules.dep")); err != nil {
			return fmt.Errorf("the list of modules: %w; load it on the host (modprobe %s), or mount the host's /lib/modules", err, name)
		}
		return fmt.Errorf("this kernel has no such module: %s lists none (%w); install the kernel package that has it, or use another kernel",
			filepath.Join(dir, "modules.dep"), fs.ErrNotExist)
	}
	// The module comes first, then what it needs, each before what it needs itself.
	files := append([]string{line.file}, line.needs...)
	for i := len(files) - 1; i >= 0; i-- {
		file := files[i]
		if !filepath.IsAbs(file) {
			file = filepath.Join(dir, file)
		}
		err := initModule(file)
		switch {
		case err == nil, errors.Is(err, unix.EEXIST):
		case errors.Is(err, errCompressed):
			return modprobe(ctx, name, err)
		case errors.Is(err, unix.EPERM):
			return fmt.Errorf("%s: %w: loading needs CAP_SYS_MODULE, and a kernel that still takes modules (sysctl kernel.modules_disabled); load it on the host: modprobe %s, and a line in /etc/modules-load.d", file, err, name)
		case errors.Is(err, unix.ENOKEY), errors.Is(err, unix.EKEYREJECTED):
			return fmt.Errorf("%s: %w: the kernel takes only modules that are signed with a key it knows", file, err)
		default:
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// moduleName is the kernel's spelling.
func moduleName(name string) string { return strings.ReplaceAll(name, "-", "_") }

// modules returns the folder of the running kernel's modules.
func (k Kernel) modules() (string, error) {
	if k.Modules != "" {
		return k.Modules, nil
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("read the kernel's release: %w", err)
	}
	return filepath.Join("/lib/modules", unix.ByteSliceToString(u.Release[:])), nil
}

// moduleLine is a line of modules.dep or modules.builtin; paths are relative to the
// folder unless absolute.
type moduleLine struct {
	file  string
	needs []string
}

// findModule finds a module's line in such a list.
func findModule(list, name string) (moduleLine, bool) {
	f, err := os.Open(list)
	if err != nil {
		return moduleLine{}, false
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		file, needs, _ := strings.Cut(lines.Text(), ":")
		base, _, isModule := strings.Cut(path.Base(file), ".ko")
		if isModule && moduleName(base) == name {
			return moduleLine{file, strings.Fields(needs)}, true
		}
	}
	return moduleLine{}, false
}

// errCompressed: neither the kernel nor this package can unpack a module.
var errCompressed = errors.New("compressed in a way that this kernel does not read")

// initModule loads one file.
func initModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if strings.HasSuffix(file, ".ko") {
		return unix.FinitModule(int(f.Fd()), "", 0)
	}
	// The kernel may unpack one kind, or none.
	err = unix.FinitModule(int(f.Fd()), "", unix.MODULE_INIT_COMPRESSED_FILE)
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOEXEC) {
		return err
	}
	if !strings.HasSuffix(file, ".gz") {
		return errCompressed
	}
	image, err := gunzip(f)
	if err != nil {
		return fmt.Errorf("unpack: %w", err)
	}
	return unix.InitModule(image, "")
}

func gunzip(f *os.File) ([]byte, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(z)
}

// modprobe loads a module with the program, if there is one; because says why.
func modprobe(ctx context.Context, name string, because error) error {
	program, err := exec.LookPath("modprobe")
	if err != nil {
		return fmt.Errorf("it is %w, and there is no program modprobe here; load it on the host: modprobe %s", because, name)
	}
	out, err := exec.CommandContext(ctx, program, "--", name).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(out))
	}
	return nil
}
