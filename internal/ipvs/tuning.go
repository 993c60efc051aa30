package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

// setting is a sysctl that the mode needs.
type setting struct {
	name, value, why string
}

// Kernels before 4.1 have no conn_reuse_mode. Until 5.9 a connection that was chosen
// anew lost its first packet, which cost the client a second.
const (
	reuseSince = 4<<8 | 1
	reuseFixed = 5<<8 | 9
)

// version reads the first two numbers of a kernel's release, as major<<8 | minor; 0 if
// there are none.
func version(release string) int {
	major, rest, _ := strings.Cut(release, ".")
	minor := rest
	if end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		minor = rest[:end]
	}
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	if err1 != nil || err2 != nil {
		return 0
	}
	return a<<8 | b
}

// settingsFor lists the sysctls for a kernel.
func settingsFor(release string, strictARP bool) []setting {
	out := []setting{
		{"net.ipv4.ip_forward", "1", "packets are forwarded to endpoints"},
		{"net.ipv4.vs.conntrack", "1", "masquerading needs connection tracking"},
		{"net.ipv4.vs.expire_nodest_conn", "1", "connections end with their real server"},
		{"net.ipv4.vs.expire_quiescent_template", "1", "persistence ends with its real server"},
	}
	switch v := version(release); {
	case v == 0 || v >= reuseFixed:
		out = append(out, setting{"net.ipv4.vs.conn_reuse_mode", "1", "a client's port that is used again may get another real server"})
	case v >= reuseSince:
		out = append(out, setting{"net.ipv4.vs.conn_reuse_mode", "0",
			"before Linux 5.9, 1 delays connections from a port that is used again by a second; with 0 they stay with their old real server, even if it drains"})
	}
	if strictARP {
		out = append(out, setting{"net.ipv4.conf.all.arp_ignore", "1", "strictARP"}, setting{"net.ipv4.conf.all.arp_announce", "2", "strictARP"})
	}
	return out
}

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
	release, _ := b.k.sysctls.Sysctl("kernel.osrelease")
	var lines []string
	for _, s := range settingsFor(release, b.opts.StrictARP) {
		lines = append(lines, b.set(s))
	}
	lines = append(lines, b.setTimeouts())
	b.tuning.mu.Lock()
	defer b.tuning.mu.Unlock()
	b.tuning.lines = lines
}

func (b *backend) set(s setting) string {
	have, err := b.k.sysctls.Sysctl(s.name)
	if err == nil && have != s.value {
		err = b.k.sysctls.SetSysctl(s.name, s.value)
		have = s.value
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("%s: this kernel does not have it (wanted %s: %s)", s.name, s.value, s.why)
	case err != nil:
		b.env.Log.Warn("a kernel setting could not be made", "error", err, "why", s.why)
		return fmt.Sprintf("%s is not %s: %v (%s)", s.name, s.value, err, s.why)
	}
	return fmt.Sprintf("%s = %s (%s)", s.name, have, s.why)
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

// checkSupport returns nil if ip_vs works for a family with the scheduler; else what is
// missing, and the remedy.
func checkSupport(ctx context.Context, k kernel, f ipvs.Family, scheduler string) error {
	if err := k.servers.Probe(ctx, f, scheduler); err != nil {
		return fmt.Errorf("ipvs for %s: %w", f, err)
	}
	return nil
}
