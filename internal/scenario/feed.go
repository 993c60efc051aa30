package scenario

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
)

// feed delivers the objects of a scenario to the proxy under test.
type feed interface {
	put(object) error
	remove(key) error
	// begin makes the feed reachable from the node, once.
	begin(node *lab.Host) error
	// kubeconfig is the file for the proxy's clientConnection, "" for none.
	kubeconfig() string
	close() error
}

// fileFeed writes one manifest per object into a folder.
type fileFeed struct{ dir string }

func newFileFeed(dir string) (*fileFeed, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the manifests folder: %w", err)
	}
	return &fileFeed{dir}, nil
}

func (f *fileFeed) path(k key) string {
	return filepath.Join(f.dir, strings.ToLower(k.kind)+"."+k.namespace+"."+k.name+".yaml")
}

// put writes beside and renames, so that no reader sees half an object.
func (f *fileFeed) put(o object) error {
	b, err := encode(o)
	if err != nil {
		return err
	}
	path := f.path(keyOf(o))
	tmp := filepath.Join(f.dir, ".new")
	if err := os.WriteFile(tmp, b, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

func (f *fileFeed) remove(k key) error {
	err := os.Remove(f.path(k))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (f *fileFeed) begin(*lab.Host) error { return nil }
func (f *fileFeed) kubeconfig() string    { return "" }
func (f *fileFeed) close() error          { return nil }

// apiFeed serves the objects over the Kubernetes API, on the node's loopback.
type apiFeed struct {
	server *apiserver.Server
	file   string // kubeconfig
}

// apiAddress is where the API server listens, in the node's namespace.
const apiAddress = "127.0.0.1:6443"

func newAPIFeed(kubeconfig string) *apiFeed {
	return &apiFeed{server: apiserver.New(apiserver.Options{}), file: kubeconfig}
}

func (f *apiFeed) put(o object) error { return f.server.Put(o) }

func (f *apiFeed) remove(k key) error {
	f.server.Delete(k.kind, k.namespace, k.name)
	return nil
}

func (f *apiFeed) begin(node *lab.Host) error {
	if err := apiserver.WriteKubeconfig(f.file, apiAddress); err != nil {
		return err
	}
	return f.listen(node)
}

func (f *apiFeed) listen(node *lab.Host) error {
	l, err := node.Listen(apiAddress)
	if err != nil {
		return fmt.Errorf("serve the API: %w", err)
	}
	f.server.Start(l)
	return nil
}

func (f *apiFeed) kubeconfig() string { return f.file }
func (f *apiFeed) close() error       { return f.server.Stop() }

// api carries out silence, resume, disconnect, stop or start: what the API server does
// to its clients. Only with the objects served over the API.
func (k *kernel) api(args []string) error {
	f, ok := k.feed.(*apiFeed)
	if !ok {
		return usagef("the objects come from files; guard the line with [feed:api]")
	}
	if len(args) != 1 {
		return usagef("want silence, resume, disconnect, stop or start")
	}
	switch args[0] {
	case "silence":
		f.server.Silence(true)
	case "resume":
		f.server.Silence(false)
	case "disconnect":
		f.server.Disconnect()
	case "stop":
		return f.server.Stop()
	case "start":
		return f.listen(k.net.Host("node"))
	default:
		return usagef("%q: want silence, resume, disconnect, stop or start", args[0])
	}
	return nil
}
