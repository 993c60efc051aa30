package dataplane

import (
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Status is a snapshot of what the loop does. Times are zero for "never".
type Status struct {
	Mode     string   `json:"mode"`
	Families []string `json:"families"`
	// Waiting lists the facts that are awaited before the first plan.
	Waiting []string `json:"waiting,omitempty"`
	// Synced: the whole plan was in the kernel at least once since the start.
	Synced       bool      `json:"synced"`
	FirstSync    time.Time `json:"firstSync,omitzero"`
	LastSuccess  time.Time `json:"lastSuccess,omitzero"`
	PendingSince time.Time `json:"pendingSince,omitzero"` // the oldest change that is not in the kernel
	// LastError is why the last Apply failed; empty once one succeeded.
	LastError string `json:"lastError,omitempty"`
	Failures  int    `json:"failures,omitempty"` // in a row
	// ServicePorts is the number of Service ports of the last plan, by family each.
	ServicePorts int          `json:"servicePorts"`
	Quarantined  []Quarantine `json:"quarantined,omitempty"`
	// Interference counts changes of the kernel's state by others.
	Interference     uint64        `json:"interference"`
	LastInterference string        `json:"lastInterference,omitempty"`
	FactsAge         time.Duration `json:"factsAge"` // nanoseconds since the facts were last confirmed
	MinInterval      time.Duration `json:"minInterval"`
	SyncPeriod       time.Duration `json:"syncPeriod"`
	Flows            FlowStatus    `json:"staleFlows,omitzero"`
	// Kernel says how the mode set up the kernel, a line for each setting.
	Kernel []string `json:"kernel,omitempty"`
}

// Quarantine is a Service port whose wanted version the kernel refuses.
type Quarantine struct {
	Service  string    `json:"service"` // namespace/name:port
	Protocol string    `json:"protocol"`
	Family   string    `json:"family"`
	Error    string    `json:"error"`
	Since    time.Time `json:"since"`
	Retry    time.Time `json:"retry"`
	// InForce: the last good version serves; else the port is not served.
	InForce bool `json:"inForce"`
}

// FlowStatus is how the removal of stale UDP flows stands, and the end of TCP flows.
type FlowStatus struct {
	Pending bool   `json:"pending"`
	Deleted uint64 `json:"deleted"` // UDP
	Ended   uint64 `json:"ended"`   // TCP
	// Ending counts endpoints that vanished whose flows are going to be ended.
	Ending    int    `json:"ending,omitempty"`
	LastError string `json:"lastError,omitempty"`
}

// Status returns a snapshot.
func (l *Loop) Status() Status {
	l.mu.Lock()
	s := l.status
	s.Waiting = slices.Clone(s.Waiting)
	s.Quarantined = slices.Clone(s.Quarantined)
	s.MinInterval, s.SyncPeriod = l.settings.MinInterval, l.settings.SyncPeriod
	l.mu.Unlock()
	s.Mode = l.cfg.Mode
	for _, f := range l.cfg.Families {
		s.Families = append(s.Families, f.String())
	}
	s.FactsAge = l.cfg.Age()
	s.Kernel = l.report()
	if l.flows != nil {
		s.Flows = l.flows.status()
	}
	return s
}

// Synced reports whether the whole plan was in the kernel at least once.
func (l *Loop) Synced() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status.Synced
}

// update changes the status under the lock.
func (l *Loop) update(f func(*Status)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(&l.status)
}

type noStats struct{}

func (noStats) Add(string, float64, ...string)     {}
func (noStats) Set(string, float64, ...string)     {}
func (noStats) Observe(string, float64, ...string) {}

type noHealth struct{}

func (noHealth) Queued(time.Time)                                       {}
func (noHealth) Updated(time.Time)                                      {}
func (noHealth) SetPorts(map[plan.HealthID]plan.HealthPort, *plan.Node) {}
