package subject

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// Feed delivers the objects of a scenario to the proxy under test.
type Feed interface {
	// Put creates or replaces an object.
	Put(world.Object) error
	// Remove deletes an object; it need not exist.
	Remove(world.Key) error
	// InOrder: whoever sees a change has seen those made before it.
	InOrder() bool
	// Begin makes the feed reachable from the node, once.
	Begin(node *lab.Host) error
	// Kubeconfig is the file for the proxy's clientConnection, "" for none.
	Kubeconfig() string
	Close() error
}

// FileFeed writes one manifest per object into a folder.
type FileFeed struct{ dir string }

// NewFileFeed makes the folder.
func NewFileFeed(dir string) (*FileFeed, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the manifests folder: %w", err)
	}
	return &FileFeed{dir}, nil
}

func (f *FileFeed) path(k world.Key) string {
	return filepath.Join(f.dir, strings.ToLower(k.Kind)+"."+k.Namespace+"."+k.Name+".yaml")
}

// Put writes beside and renames, so that no reader sees half an object.
func (f *FileFeed) Put(o world.Object) error {
	b, err := world.Encode(o)
	if err != nil {
		return err
	}
	path := f.path(world.KeyOf(o))
	tmp := filepath.Join(f.dir, ".new")
	if err := os.WriteFile(tmp, b, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// Remove deletes the manifest.
func (f *FileFeed) Remove(k world.Key) error {
	err := os.Remove(f.path(k))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// InOrder is false: a reader that goes over the folder while it changes can meet a
// later change without an earlier one, once.
func (f *FileFeed) InOrder() bool { return false }

// Begin does nothing: the program sees the machine's files.
func (f *FileFeed) Begin(*lab.Host) error { return nil }

// Kubeconfig is empty.
func (f *FileFeed) Kubeconfig() string { return "" }

// Close leaves the folder to its owner.
func (f *FileFeed) Close() error { return nil }

// APIFeed serves the objects over the Kubernetes API, on the node's loopback.
type APIFeed struct {
	server *apiserver.Server
	file   string // kubeconfig
}

// apiAddress is where the API server listens, in the node's namespace.
const apiAddress = "127.0.0.1:6443"

// NewAPIFeed will write the kubeconfig file when it begins.
func NewAPIFeed(kubeconfig string) *APIFeed {
	return &APIFeed{server: apiserver.New(apiserver.Options{}), file: kubeconfig}
}

// Put creates or replaces an object.
func (f *APIFeed) Put(o world.Object) error { return f.server.Put(o) }

// Remove deletes an object.
func (f *APIFeed) Remove(k world.Key) error {
	f.server.Delete(k.Kind, k.Namespace, k.Name)
	return nil
}

// InOrder is true within the objects of one kind.
func (f *APIFeed) InOrder() bool { return true }

// Begin writes the kubeconfig file and listens.
func (f *APIFeed) Begin(node *lab.Host) error {
	if err := apiserver.WriteKubeconfig(f.file, apiAddress); err != nil {
		return err
	}
	return f.listen(node)
}

func (f *APIFeed) listen(node *lab.Host) error {
	l, err := node.Listen(apiAddress)
	if err != nil {
		return fmt.Errorf("serve the API: %w", err)
	}
	f.server.Start(l)
	return nil
}

// Kubeconfig is the file.
func (f *APIFeed) Kubeconfig() string { return f.file }

// Close stops the server.
func (f *APIFeed) Close() error { return f.server.Stop() }

// Do does to the API server what a script may ask for: silence, resume, disconnect,
// stop or start.
func (f *APIFeed) Do(action string, node *lab.Host) error {
	switch action {
	case "silence":
		f.server.Silence(true)
	case "resume":
		f.server.Silence(false)
	case "disconnect":
		f.server.Disconnect()
	case "stop":
		return f.server.Stop()
	case "start":
		return f.listen(node)
	default:
		return world.Usagef("%q: want silence, resume, disconnect, stop or start", action)
	}
	return nil
}

// Reported says whether an event of the reason came in, about an object given by
// kind, namespace and name; nil: about any.
func (f *APIFeed) Reported(reason string, on []string) bool {
	return slices.ContainsFunc(f.server.Events(), func(e apiserver.Event) bool {
		return e.Reason == reason && (on == nil || slices.Equal(on, []string{e.Object.Kind, e.Object.Namespace, e.Object.Name}))
	})
}
