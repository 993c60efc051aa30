package conntrack

import (
	"fmt"
	"strconv"
	"time"

	"github.com/svcproxy/svcproxy/internal/sys/host"
)

// Sizing is how large the table may get and how long its entries live. Zero
// leaves the kernel's value.
type Sizing struct {
	MaxPerCore int // entries per CPU that is online
	Min        int // at least this many, with MaxPerCore
	// Timeouts have the kernel's resolution of one second.
	TCPEstablished time.Duration
	TCPCloseWait   time.Duration
	UDP            time.Duration
	UDPStream      time.Duration
	// BeLiberal: TCP segments outside the window are not invalid. It is only
	// ever switched on.
	BeLiberal bool
}

// Warning is a value that could not be set. The proxy works without it.
type Warning struct {
	Name string // of the sysctl, or "module parameter ..."
	Want string
	Have string // empty if it could not be read
	Err  error
}

func (w *Warning) Error() string {
	have := "unknown"
	if w.Have != "" {
		have = w.Have
	}
	return fmt.Sprintf("%s stays %s instead of %s: %v; set it on the node, or let the proxy write it (CAP_NET_ADMIN and a writable /proc/sys)", w.Name, have, w.Want, w.Err)
}

func (w *Warning) Unwrap() error { return w.Err }

// mostEntries is where scaling with the number of CPUs ends, as in kube-proxy: a
// table for a million flows.
const mostEntries = 1 << 20

// Setup makes the kernel's values at least as s wants them. What is right already
// is not written, so a process without the privilege can run where another has
// prepared the node.
func Setup(h host.Sysctls, s Sizing) []*Warning {
	var out []*Warning
	add := func(w *Warning) {
		if w != nil {
			out = append(out, w)
		}
	}
	limit, err := s.max(h)
	if err != nil {
		add(&Warning{Name: prefix + "nf_conntrack_max", Want: "a value by the number of CPUs", Err: err})
	}
	if limit > 0 {
		add(raise(prefix+"nf_conntrack_max", limit, h.Sysctl, h.SetSysctl))
		add(raise("module parameter nf_conntrack/hashsize", limit/4,
			func(string) (string, error) { return h.Parameter("nf_conntrack", "hashsize") },
			func(_, v string) error { return h.SetParameter("nf_conntrack", "hashsize", v) }))
	}
	for _, t := range []struct {
		name string
		d    time.Duration
	}{
		{"nf_conntrack_tcp_timeout_established", s.TCPEstablished},
		{"nf_conntrack_tcp_timeout_close_wait", s.TCPCloseWait},
		{"nf_conntrack_udp_timeout", s.UDP},
		{"nf_conntrack_udp_timeout_stream", s.UDPStream},
	} {
		if t.d > 0 {
			add(set(h, prefix+t.name, int(t.d/time.Second)))
		}
	}
	if s.BeLiberal {
		add(set(h, prefix+"nf_conntrack_tcp_be_liberal", 1))
	}
	return out
}

const prefix = "net.netfilter."

// max returns how many entries the table shall hold, 0 for the kernel's choice.
func (s Sizing) max(h host.Sysctls) (int, error) {
	if s.MaxPerCore <= 0 {
		return 0, nil
	}
	cpus, err := h.OnlineCPUs()
	if err != nil {
		return s.Min, err
	}
	if scaled := s.MaxPerCore * cpus; scaled > mostEntries {
		return mostEntries, nil
	} else if scaled > s.Min {
		return scaled, nil
	}
	return s.Min, nil
}

// raise writes want if the present value is lower.
func raise(name string, want int, get func(string) (string, error), put func(name, value string) error) *Warning {
	return change(name, want, func(have int) bool { return have >= want }, get, put)
}

func set(h host.Sysctls, name string, want int) *Warning {
	return change(name, want, func(have int) bool { return have == want }, h.Sysctl, h.SetSysctl)
}

func change(name string, want int, right func(have int) bool, get func(string) (string, error), put func(name, value string) error) *Warning {
	w := strconv.Itoa(want)
	have, err := get(name)
	if err != nil {
		return &Warning{Name: name, Want: w, Err: err}
	}
	if v, err := strconv.Atoi(have); err == nil && right(v) {
		return nil
	}
	if err := put(name, w); err != nil {
		return &Warning{Name: name, Want: w, Have: have, Err: err}
	}
	return nil
}
