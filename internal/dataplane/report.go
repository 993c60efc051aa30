package dataplane

import (
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// report keeps the loop's figures.
type report struct {
	stats    Stats
	families []plan.Family
	since    time.Time // triggers from before say nothing about this process
	last     time.Time // last success
	noLocal  map[policyFamily]int
}

// policyFamily is a traffic policy, as a label value, and a family.
type policyFamily struct {
	policy string
	family plan.Family
}

func newReport(s Stats, families []plan.Family) report {
	return report{stats: s, families: families, since: time.Now(), noLocal: map[policyFamily]int{}}
}

func (r *report) queued(now time.Time) {
	for _, f := range r.families {
		r.stats.Set("sync_proxy_rules_last_queued_timestamp_seconds", seconds(now), f.String())
	}
}

// upToDate says of all families that the kernel has what was asked for, also of
// those that a change did not concern: people alert on a request that is much newer
// than the last success.
func (r *report) upToDate(now time.Time) {
	for _, f := range r.families {
		r.stats.Set("sync_proxy_rules_last_timestamp_seconds", seconds(now), f.String())
	}
}

// took accounts for an update that joined the backlog.
func (r *report) took(u, backlog *plan.Update, now time.Time) {
	r.queued(now)
	services, endpoints := classify(u.Changed)
	r.stats.Add("sync_proxy_rules_service_changes_total", float64(services))
	r.stats.Add("sync_proxy_rules_endpoint_changes_total", float64(endpoints))
	services, endpoints = classify(backlog.Changed)
	r.pending(services, endpoints)
}

func (r *report) pending(services, endpoints int) {
	r.stats.Set("sync_proxy_rules_service_changes_pending", float64(services))
	r.stats.Set("sync_proxy_rules_endpoint_changes_pending", float64(endpoints))
}

// classify counts the changes of Services and those of endpoints; a change can be
// both.
func classify(changes []plan.Change) (services, endpoints int) {
	for _, c := range changes {
		if c.Old == nil || c.New == nil {
			services++
			if sp := either(c); len(sp.Pools[plan.Cluster])+len(sp.Pools[plan.Local]) > 0 {
				endpoints++
			}
			continue
		}
		same := slices.Equal(c.Old.Pools[plan.Cluster], c.New.Pools[plan.Cluster]) &&
			slices.Equal(c.Old.Pools[plan.Local], c.New.Pools[plan.Local]) && slices.Equal(c.Old.Serving, c.New.Serving)
		if same {
			services++
		} else {
			endpoints++
		}
	}
	return services, endpoints
}

func either(c plan.Change) *plan.ServicePort {
	if c.New != nil {
		return c.New
	}
	return c.Old
}

// applied accounts for a sync that succeeded.
func (r *report) applied(u *plan.Update, start, end time.Time, full bool) {
	r.last = end
	r.upToDate(end)
	took := end.Sub(start).Seconds()
	for _, f := range r.families {
		if !full && !u.Node && !touches(u, f) {
			continue
		}
		l := f.String()
		kind := "sync_partial_proxy_rules_duration_seconds"
		if full {
			kind = "sync_full_proxy_rules_duration_seconds"
		}
		r.stats.Observe("sync_proxy_rules_duration_seconds", took, l)
		r.stats.Observe(kind, took, l)
		for _, t := range u.Triggers {
			if t.Before(r.since) {
				continue
			}
			r.stats.Observe("network_programming_duration_seconds", end.Sub(t).Seconds(), l)
		}
	}
	r.pending(0, 0)
}

func touches(u *plan.Update, f plan.Family) bool {
	return slices.ContainsFunc(u.Changed, func(c plan.Change) bool { return c.ID.Family == f }) ||
		slices.ContainsFunc(u.Health, func(h plan.HealthID) bool { return h.Family == f })
}

// countNoLocal follows the number of Service ports with a Local policy whose
// endpoints are all elsewhere.
func (r *report) countNoLocal(changes []plan.Change) {
	for _, c := range changes {
		for _, policy := range noLocal(c.Old) {
			r.noLocal[policyFamily{policy, c.ID.Family}]--
		}
		for _, policy := range noLocal(c.New) {
			r.noLocal[policyFamily{policy, c.ID.Family}]++
		}
	}
	for _, f := range r.families {
		for _, policy := range []string{"internal", "external"} {
			r.stats.Set("sync_proxy_rules_no_local_endpoints_total", float64(r.noLocal[policyFamily{policy, f}]), policy, f.String())
		}
	}
}

// noLocal returns the traffic policies for which sp drops what comes from outside,
// which is the case just when they are Local and no endpoint is here.
func noLocal(sp *plan.ServicePort) []string {
	if sp == nil {
		return nil
	}
	var out []string
	for _, f := range sp.Frontends {
		policy := "external"
		if f.Kind == plan.ClusterIP {
			policy = "internal"
		}
		if f.Route[plan.FromOutside].Verdict == plan.Drop && !slices.Contains(out, policy) {
			out = append(out, policy)
		}
	}
	return out
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }
