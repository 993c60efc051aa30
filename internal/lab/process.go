package lab

import (
	"os/exec"
	"syscall"
)

// Start starts a program in the host's namespaces. It is killed when the Lab is
// closed or this process ends, however that happens.
func (h *Host) Start(c *exec.Cmd) error {
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	// The signal comes when the thread that started the program ends; that is the
	// namespace's own.
	c.SysProcAttr.Pdeathsig = syscall.SIGKILL
	return h.ns.do(c.Start)
}

// Do runs fn on a thread that is in the host's namespaces, for kernel interfaces
// that look at the caller's. fn must not block for long: the host waits for it.
func (h *Host) Do(fn func() error) error { return h.ns.do(fn) }
