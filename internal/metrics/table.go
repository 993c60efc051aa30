package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

type kind uint8

const (
	counter kind = iota
	gauge
	histogram
	computed // read when scraped; a counter if its name ends in _total
	// collected is read when scraped for each of many things, see Collect; a
	// histogram if it has buckets, a counter if its name ends in _total.
	collected
)

// spec is one metric.
type spec struct {
	name    string
	kind    kind
	labels  []string
	buckets []float64 // histogram
	modes   []string  // nil: all
	help    string
}

var (
	family  = []string{"ip_family"}
	relayed = []string{"service", "protocol", "ip_family", "via"}
	// syncBuckets go from 1 ms to 16.384 s.
	syncBuckets = prometheus.ExponentialBuckets(0.001, 2, 15)
	// programmingBuckets are finest where the objective for network programming
	// latency of Kubernetes lies, up to a minute.
	programmingBuckets = append(append(append([]float64{0.25, 0.5},
		prometheus.LinearBuckets(1, 1, 59)...), prometheus.LinearBuckets(60, 5, 12)...), prometheus.LinearBuckets(120, 30, 7)...)
	// connectBuckets are those in which the relay counts.
	connectBuckets = []float64{0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5}
	// waitBuckets go from 1 ms to 32 s.
	waitBuckets = prometheus.ExponentialBuckets(0.001, 2, 16)
)

// table lists every metric of the process but those of the Go runtime and the
// process itself. It is not changed.
var table = []spec{
	// kube-proxy's.
	{"kubeproxy_sync_proxy_rules_duration_seconds", histogram, family, syncBuckets, nil, "Time of one sync, of whatever kind."},
	{"kubeproxy_sync_full_proxy_rules_duration_seconds", histogram, family, syncBuckets, nil, "Time of a sync that looked at everything."},
	{"kubeproxy_sync_partial_proxy_rules_duration_seconds", histogram, family, syncBuckets, nil, "Time of a sync of changes only."},
	{"kubeproxy_sync_proxy_rules_last_timestamp_seconds", gauge, family, nil, nil, "When a sync last succeeded (Unix time)."},
	{"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", gauge, family, nil, nil, "When a change last asked for a sync (Unix time)."},
	{"kubeproxy_network_programming_duration_seconds", histogram, family, programmingBuckets, nil, "Time from the change of an endpoint in the cluster, as its slice notes it, to its effect on this node."},
	{"kubeproxy_sync_proxy_rules_endpoint_changes_pending", gauge, nil, nil, nil, "Service ports with endpoint changes that are not in the kernel."},
	{"kubeproxy_sync_proxy_rules_endpoint_changes_total", counter, nil, nil, nil, "Changes of a Service port's endpoints."},
	{"kubeproxy_sync_proxy_rules_service_changes_pending", gauge, nil, nil, nil, "Service ports with other changes that are not in the kernel."},
	{"kubeproxy_sync_proxy_rules_service_changes_total", counter, nil, nil, nil, "Changes of a Service port other than of its endpoints."},
	{"kubeproxy_sync_proxy_rules_no_local_endpoints_total", gauge, []string{"traffic_policy", "ip_family"}, nil, nil, "Service ports with a Local traffic policy, whose endpoints are all on other nodes."},
	{"kubeproxy_proxy_healthz_total", counter, []string{"code"}, nil, nil, "Answers of /healthz by HTTP status."},
	{"kubeproxy_proxy_livez_total", counter, []string{"code"}, nil, nil, "Answers of /livez by HTTP status."},
	{"kubeproxy_conntrack_reconciler_sync_duration_seconds", histogram, family, syncBuckets, nil, "Time of one removal of stale UDP flows."},
	{"kubeproxy_conntrack_reconciler_deleted_entries_total", counter, family, nil, nil, "Stale UDP flows removed from connection tracking."},

	{"kubeproxy_sync_proxy_rules_iptables_restore_failures_total", counter, family, nil, []string{"iptables"}, "Failed calls of iptables-restore."},
	{"kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total", counter, family, nil, []string{"iptables"}, "Failed calls of iptables-restore that wrote changes only."},
	{"kubeproxy_sync_proxy_rules_iptables_total", gauge, []string{"table", "ip_family"}, nil, []string{"iptables"}, "Rules in force."},
	{"kubeproxy_sync_proxy_rules_iptables_last", gauge, []string{"table", "ip_family"}, nil, []string{"iptables"}, "Rules written by the last sync."},
	{"kubeproxy_iptables_ct_state_invalid_dropped_packets_total", counter, nil, nil, []string{"iptables"}, "Packets of Services dropped because connection tracking calls them invalid."},
	// For dashboards: node ports of loopback addresses are not served by rules.
	{"kubeproxy_iptables_localhost_nodeports_accepted_packets_total", counter, nil, nil, []string{"iptables"}, "Packets accepted on node ports of loopback addresses."},
	{"kubeproxy_sync_proxy_rules_nftables_sync_failures_total", counter, family, nil, []string{"nftables"}, "Failed nftables transactions."},
	{"kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total", counter, family, nil, []string{"nftables"}, "Failed removals of nftables objects."},

	// Libraries'.
	{"rest_client_requests_total", counter, []string{"code", "method", "host"}, nil, nil, "Requests to the API server by HTTP status."},
	{"rest_client_request_duration_seconds", histogram, []string{"verb", "host"}, []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60}, nil, "Time from a request to the API server to the head of its answer."},
	{"kubernetes_build_info", gauge, []string{"major", "minor", "git_version", "git_commit", "git_tree_state", "build_date", "go_version", "compiler", "platform"}, nil, nil, "1, labelled with what is running; kept for dashboards, see svcproxy_build_info."},

	// Our own.
	{"svcproxy_build_info", gauge, []string{"version", "commit", "date", "go_version", "mode"}, nil, nil, "1, labelled with what is running."},
	{"svcproxy_view_age_seconds", computed, nil, nil, nil, "Time since the facts about the cluster were last confirmed by every source."},
	{"svcproxy_services", computed, nil, nil, nil, "Services known."},
	{"svcproxy_endpoints", computed, nil, nil, nil, "Endpoints known."},
	{"svcproxy_relay_connections", collected, relayed, nil, nil, "Open TCP connections and UDP flows through the process, by Service port; via says whether they came to the Service or to a node port on loopback."},
	{"svcproxy_relay_connections_total", collected, relayed, nil, nil, "TCP connections and UDP flows that got an endpoint."},
	{"svcproxy_relay_bytes_total", collected, append(slices.Clone(relayed), "direction"), nil, nil, "Bytes that endpoints (to_endpoint) and clients (to_client) were sent."},
	{"svcproxy_relay_retries_total", collected, relayed, nil, nil, "Connects that were tried again at another endpoint."},
	{"svcproxy_relay_failures_total", collected, append(slices.Clone(relayed), "reason"), nil, nil, "Flows that were refused or ended before their time."},
	{"svcproxy_relay_connect_seconds", collected, relayed, connectBuckets, nil, "Time from accepting a client to having an endpoint, retries included."},
	{"svcproxy_relay_services_not_shown", collected, nil, nil, nil, "Service ports with traffic through the process that are left out of the metrics above, to bound their number."},
	{"svcproxy_synced", computed, nil, nil, nil, "1 once the whole plan was in the kernel."},
	{"svcproxy_sync_failures_total", counter, nil, nil, nil, "Syncs that failed and were repeated."},
	{"svcproxy_interference_total", counter, nil, nil, nil, "Times that somebody else changed the kernel's state."},
	{"svcproxy_mode_choice", gauge, []string{"mode", "preference", "remembered"}, nil, nil, "1, labelled with the mode that was chosen, where the configuration leaves a choice."},
	{"svcproxy_kube_proxy_running", gauge, nil, nil, nil, "1 while a kube-proxy runs on this node too."},
	{"svcproxy_quarantined_service_ports", gauge, nil, nil, nil, "Service ports that the kernel refuses."},
	{"svcproxy_tcp_flows_ended_total", counter, family, nil, nil, "TCP flows removed from connection tracking, whose endpoint vanished or failed before it answered."},
	{"svcproxy_health_check_targets", gauge, nil, nil, nil, "Places at which endpoints are probed."},
	{"svcproxy_health_check_failing_targets", gauge, nil, nil, nil, "Places whose endpoints fail their health check."},
	{"svcproxy_health_check_late_seconds", gauge, nil, nil, nil, "How late the last probe began; it grows when more are due than may be sent."},
	{"svcproxy_health_check_flips_total", counter, []string{"to"}, nil, nil, "Changes to failing and to healthy."},
	{"svcproxy_health_checks_total", counter, []string{"method", "result"}, nil, nil, "Probes of endpoints that ended."},
	{"svcproxy_health_check_duration_seconds", histogram, []string{"method"}, waitBuckets, nil, "Time of one probe of an endpoint."},
	{"svcproxy_health_ports_failed", gauge, nil, nil, nil, "Health-check node ports of Services that cannot be listened on."},
	// Every mode waits for the lock where it removes what iptables mode left.
	{"svcproxy_iptables_lock_wait_seconds", histogram, family, waitBuckets, nil, "Time spent waiting for the xtables lock."},
}
