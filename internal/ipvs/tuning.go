package ipvs

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/sysctls"

	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

// tuning is what was made of the kernel's settings.
type tuning struct {
	mu    sync.Mutex // guards lines
	lines []string
}

// Report implements dataplane.Reporter.
func (b *backend) Report() []string {
	b.tuning.mu.Lock()
	defer b.tuning.mu.Unlock()
	return append([]string(nil), b.tuning.lines...)
}

// tune makes the kernel's settings, once and again after Invalidate. What is right is
// not written; what cannot be written is a warning.
func (b *backend) tune() {
	if b.tuned {
		return
	}
	b.tuned = true
	timeouts := b.setTimeouts() // first: the kernel loads ip_vs for that, which has the sysctls
	release, _ := b.k.sysctls.Sysctl("kernel.osrelease")
	var lines []string
	for _, s := range sysctls.For(release, b.opts.StrictARP) {
		lines = append(lines, b.set(s))
	}
	lines = append(lines, timeouts)
	b.tuning.mu.Lock()
	defer b.tuning.mu.Unlock()
	b.tuning.lines = lines
}

func (b *backend) set(s sysctls.Setting) string {
	have, err := b.k.sysctls.Sysctl(s.Name)
	if err == nil && have != s.Value {
		err = b.k.sysctls.SetSysctl(s.Name, s.Value)
		have = s.Value
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("%s: this kernel does not have it (wanted %s: %s)", s.Name, s.Value, s.Why)
	case err != nil:
		b.env.Log.Warn("a kernel setting could not be made", "error", err, "why", s.Why)
		return fmt.Sprintf("%s is not %s: %v (%s)", s.Name, s.Value, err, s.Why)
	}
	return fmt.Sprintf("%s = %s (%s)", s.Name, have, s.Why)
}

// setTimeouts sets those that are configured.
func (b *backend) setTimeouts() string {
	t := ipvs.Timeouts{TCP: wholeSeconds(b.opts.TCPTimeout), TCPFin: wholeSeconds(b.opts.TCPFinTimeout), UDP: wholeSeconds(b.opts.UDPTimeout)}
	have, err := b.k.servers.Timeouts()
	differs := func(want, have time.Duration) bool { return want != 0 && want != have }
	if err == nil && (differs(t.TCP, have.TCP) || differs(t.TCPFin, have.TCPFin) || differs(t.UDP, have.UDP)) {
		if err = b.k.servers.SetTimeouts(t); err == nil {
			have, err = b.k.servers.Timeouts()
		}
	}
	if err != nil {
		b.env.Log.Warn("the idle time-outs of ip_vs could not be set", "error", err)
		return fmt.Sprintf("idle time-outs: %v", err)
	}
	line := fmt.Sprintf("idle time-outs: %s", have)
	if seconds, err := b.k.sysctls.Sysctl("net.netfilter.nf_conntrack_tcp_timeout_established"); err == nil {
		line += fmt.Sprintf("; connection tracking remembers established TCP for %s s", seconds)
	}
	return line
}
