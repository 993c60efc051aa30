package lab

import (
	"bytes"
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

// Run runs a program in the host's namespaces to its end and returns what it prints.
func (h *Host) Run(c *exec.Cmd) (output string, err error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := h.Start(c); err != nil {
		return "", err
	}
	err = c.Wait()
	return out.String(), err
}
