package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// namespace is a network namespace and the thread that lives in it. Sockets and
// processes belong to the namespace of the thread that makes them, so do makes
// them there; afterwards any thread may use them.
type namespace struct {
	file *os.File // the namespace itself
	work chan func()
}

var errClosed = errors.New("the network namespace is closed")

// newNamespace makes a namespace; mounts adds a mount namespace with a private
// /run and a /sys of the new network.
func newNamespace(mounts bool) (*namespace, error) {
	n := &namespace{work: make(chan func())}
	ready := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine, so nothing else
		// ever runs in the namespace by accident.
		runtime.LockOSThread()
		err := n.enter(mounts)
		ready <- err
		if err != nil {
			return
		}
		for fn := range n.work {
			fn()
		}
	}()
	if err := <-ready; err != nil {
		return nil, err
	}
	return n, nil
}

func (n *namespace) enter(mounts bool) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("make a network namespace: %w (needs root)", err)
		}
		return fmt.Errorf("make a network namespace: %w", err)
	}
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("open the network namespace: %w", err)
	}
	n.file = f
	if mounts {
		if err := ownMounts(); err != nil {
			f.Close()
			return err
		}
	}
	return nil
}

func ownMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("detach the mounts: %w", err)
	}
	if err := unix.Mount("run", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return fmt.Errorf("mount a private /run: %w", err)
	}
	// As `ip netns exec` does: /sys/class/net shows the network of the mounter.
	if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NOEXEC|unix.MS_NODEV, ""); err != nil {
		return fmt.Errorf("mount /sys of the namespace: %w", err)
	}
	return nil
}

// do runs fn on the namespace's thread. fn must not block for long: everything
// that happens in the namespace waits for it.
func (n *namespace) do(fn func() error) (err error) {
	done := make(chan struct{})
	defer func() {
		if recover() != nil { // the channel is closed
			err = errClosed
		}
	}()
	n.work <- func() {
		defer close(done)
		err = fn()
	}
	<-done
	return err
}

func (n *namespace) close() error {
	close(n.work)
	return n.file.Close()
}

// pin binds the namespace to a file, which keeps it alive.
func (n *namespace) pin(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	f.Close()
	from := fmt.Sprintf("/proc/self/fd/%d", n.file.Fd())
	if err := unix.Mount(from, path, "", unix.MS_BIND, ""); err != nil {
		os.Remove(path)
		return fmt.Errorf("bind the namespace to %s: %w", path, err)
	}
	return nil
}
