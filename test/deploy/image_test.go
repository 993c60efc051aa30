// Package deploy tests what is put onto nodes: the container image and the systemd
// unit. Manifests and chart are tested in test/cluster, where an API server is.
package deploy

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// descriptor is a part of an OCI image layout (OCI image specification, descriptor.md).
type descriptor struct {
	MediaType string
	Digest    string
	Size      int64
}

// layout is an image layout in memory, by path.
type layout map[string][]byte

func mustLayout(t *testing.T, file string) layout {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := layout{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if out[strings.TrimPrefix(h.Name, "./")], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// mustBlob returns the content of a descriptor and checks it.
func (l layout) mustBlob(t *testing.T, d descriptor) []byte {
	t.Helper()
	b, ok := l["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
	switch {
	case !ok:
		t.Fatalf("the layout has no %s", d.Digest)
	case int64(len(b)) != d.Size:
		t.Fatalf("%s has %d bytes, not %d", d.Digest, len(b), d.Size)
	case fmt.Sprintf("sha256:%x", sha256.Sum256(b)) != d.Digest:
		t.Fatalf("%s has another content", d.Digest)
	}
	return b
}

func mustDecode(t *testing.T, b []byte, to any) {
	t.Helper()
	if err := json.Unmarshal(b, to); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
}

// mustBuild builds the image; the environment is added to this one.
func mustBuild(t *testing.T, env ...string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "image.tar")
	cmd := exec.Command("../../deploy/image", "oci", file)
	cmd.Env = append(append(os.Environ(), "VERSION=v1.2.3", "GOFLAGS=-mod=readonly", "GOPROXY=off"), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	return file
}

// TestImage builds the image without network, follows its layout down to the files,
// and runs the program in them alone.
func TestImage(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: runs the program with the image as its root folder")
	}
	l := mustLayout(t, mustBuild(t))
	var index struct{ Manifests []descriptor }
	mustDecode(t, l["index.json"], &index)
	if len(index.Manifests) != 1 || !bytes.Contains(l["oci-layout"], []byte(`"1.0.0"`)) {
		t.Fatalf("index %s, layout %s", l["index.json"], l["oci-layout"])
	}
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	mustDecode(t, l.mustBlob(t, index.Manifests[0]), &manifest)
	var config struct {
		Config struct{ Entrypoint, Env []string }
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	mustDecode(t, l.mustBlob(t, manifest.Config), &config)
	if len(manifest.Layers) != 1 || len(config.RootFS.DiffIDs) != 1 {
		t.Fatalf("%d layers, %d of them in the configuration", len(manifest.Layers), len(config.RootFS.DiffIDs))
	}
	gz, err := gzip.NewReader(bytes.NewReader(l.mustBlob(t, manifest.Layers[0])))
	if err != nil {
		t.Fatal(err)
	}
	layer, err := io.ReadAll(gz)
	if err != nil {
		t.Fatal(err)
	}
	if have := fmt.Sprintf("sha256:%x", sha256.Sum256(layer)); have != config.RootFS.DiffIDs[0] {
		t.Errorf("the layer unpacks to %s, not %s", have, config.RootFS.DiffIDs[0])
	}
	root := t.TempDir()
	mustUnpack(t, root, layer)
	mustHaveNull(t, root)
	run := func(args ...string) (string, error) {
		cmd := exec.Command(config.Config.Entrypoint[0], args...)
		cmd.Env, cmd.Dir = config.Config.Env, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := run("--version"); err != nil || out != "svcproxy v1.2.3\n" {
		t.Errorf("--version: %q, %v", out, err)
	}
	out, err := run("modes")
	for _, mode := range []string{"iptables (default)", "nftables"} {
		if !strings.Contains(out, fmt.Sprintf("%-19s yes", mode)) {
			t.Errorf("in the image mode %s does not work: %v\n%s", mode, err, out)
		}
	}
}

// TestImageIsReproducible builds twice; nothing of the time or the place is in it.
func TestImageIsReproducible(t *testing.T) {
	var sums [2][32]byte
	for i := range sums {
		b, err := os.ReadFile(mustBuild(t, "IPTABLES=no"))
		if err != nil {
			t.Fatal(err)
		}
		sums[i] = sha256.Sum256(b)
	}
	if sums[0] != sums[1] {
		t.Error("two builds of the same source differ")
	}
}

// mustHaveNull makes /dev/null, which every container has from its runtime.
func mustHaveNull(t *testing.T, root string) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(root, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mknod(filepath.Join(root, "dev/null"), syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
		t.Fatal(err)
	}
}

func mustUnpack(t *testing.T, root string, layer []byte) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		path := filepath.Join(root, filepath.Clean("/"+h.Name))
		switch {
		case err != nil:
		case h.Typeflag == tar.TypeDir:
			err = os.MkdirAll(path, 0o755)
		case h.Typeflag == tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		default:
			var content []byte
			if content, err = io.ReadAll(r); err == nil {
				err = os.WriteFile(path, content, h.FileInfo().Mode())
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestUnit has systemd read the unit. What it cannot find is only the program, which
// is not installed here.
func TestUnit(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("needs systemd-analyze")
	}
	unit, err := os.ReadFile("../../deploy/systemd/svcproxy.service")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "svcproxy.service")
	if err := os.WriteFile(file, bytes.ReplaceAll(unit, []byte("/usr/local/sbin/svcproxy"), []byte("/bin/true")), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(analyze, "verify", "--man=no", file).CombinedOutput()
	if err != nil || len(bytes.TrimSpace(out)) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}
