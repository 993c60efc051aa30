package planner_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// endpoint is read from words: address, then any of node=N, zones=A+B, nodes=A+B,
// unready (not ready, still serving as pods without readiness are), terminating
// (serving) and gone (terminating, not serving), down (nothing at all).
func mustEndpoint(t *testing.T, s string) cluster.Endpoint {
	t.Helper()
	words := strings.Fields(s)
	ep := cluster.Endpoint{Addr: netip.MustParseAddr(words[0]), Node: cluster.Intern(""), Flags: cluster.Ready | cluster.Serving}
	var topology cluster.TopologySet
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		list := strings.ReplaceAll(value, "+", "\n")
		switch key {
		case "node":
			ep.Node = cluster.Intern(value)
		case "zones":
			topology.HintZones = list
		case "nodes":
			topology.HintNodes = list
		case "unready", "down":
			ep.Flags = 0
		case "terminating":
			ep.Flags = cluster.Serving | cluster.Terminating
		case "gone":
			ep.Flags = cluster.Terminating
		default:
			t.Fatalf("%q in %q", w, s)
		}
	}
	ep.Topology = mustTopology(topology)
	return ep
}

// TestCategorizeEndpoints has the cases that upstream's test of the same name has,
// under the names by which they are known there: node alder in zone z1. A list that
// no traffic uses is empty.
func TestCategorizeEndpoints(t *testing.T) {
	const (
		internal = "itp=Local "
		external = "nodeport etp=Local "
	)
	tests := []struct {
		name           string
		service        string // words: itp=Local, etp=Local, nodeport
		zone           string // "-": no label
		endpoints      []string
		cluster, local []string
		none           bool // no usable endpoint at all
	}{
		{name: "should use topology since all endpoints have hints, node has a zone label and and there are endpoints for the node's zone",
			endpoints: []string{"10.1.2.3 zones=z1", "10.1.2.4 zones=z2", "10.1.2.5 zones=z3", "10.1.2.6 zones=z1"},
			cluster:   []string{"10.1.2.3", "10.1.2.6"}},
		{name: "externalTrafficPolicy: Local, topology ignored for Local endpoints", service: external,
			endpoints: []string{"10.1.2.3 node=alder zones=z1", "10.1.2.4 node=alder zones=z2", "10.1.2.5 zones=z3", "10.1.2.6 node=birch zones=z1"},
			cluster:   []string{"10.1.2.3", "10.1.2.6"}, local: []string{"10.1.2.3", "10.1.2.4"}},
		{name: "internalTrafficPolicy: Local, topology ignored for Local endpoints", service: internal + "nodeport",
			endpoints: []string{"10.1.2.3 node=alder zones=z1", "10.1.2.4 node=alder zones=z2", "10.1.2.5 zones=z3", "10.1.2.6 zones=z1"},
			cluster:   []string{"10.1.2.3", "10.1.2.6"}, local: []string{"10.1.2.3", "10.1.2.4"}},
		{name: "empty node labels", zone: "-",
			endpoints: []string{"10.1.2.3 zones=z1", "10.1.2.4 zones=z2"}, cluster: []string{"10.1.2.3", "10.1.2.4"}},
		{name: "empty zone label", zone: "-",
			endpoints: []string{"10.1.2.3 zones=z2", "10.1.2.4 zones=z3"}, cluster: []string{"10.1.2.3", "10.1.2.4"}},
		{name: "node in different zone, no endpoint filtering", zone: "z9",
			endpoints: []string{"10.1.2.3 zones=z1", "10.1.2.4 zones=z2"}, cluster: []string{"10.1.2.3", "10.1.2.4"}},
		{name: "unready endpoint",
			endpoints: []string{"10.1.2.3 zones=z1", "10.1.2.4 zones=z2", "10.1.2.6 zones=z1 unready"}, cluster: []string{"10.1.2.3"}},
		{name: "only unready endpoints in same zone (should not filter)",
			endpoints: []string{"10.1.2.3 zones=z1 unready", "10.1.2.4 zones=z2", "10.1.2.5 zones=z3", "10.1.2.6 zones=z1 unready"},
			cluster:   []string{"10.1.2.4", "10.1.2.5"}},
		{name: "missing hints, no filtering applied",
			endpoints: []string{"10.1.2.3 zones=z1", "10.1.2.4 zones=z2", "10.1.2.5", "10.1.2.6 zones=z1"},
			cluster:   []string{"10.1.2.3", "10.1.2.4", "10.1.2.5", "10.1.2.6"}},
		{name: "multiple hints per endpoint, filtering includes any endpoint with zone included",
			endpoints: []string{"10.1.2.3 zones=z1", "10.1.2.4 zones=z1+z2+z3", "10.1.2.5 zones=z2+z3", "10.1.2.6 zones=z3"},
			cluster:   []string{"10.1.2.3", "10.1.2.4"}},
		{name: "PreferSameNode available",
			endpoints: []string{"10.1.2.3 nodes=alder zones=z1", "10.1.2.4 nodes=birch zones=z1", "10.1.2.5 nodes=cedar zones=z2"},
			cluster:   []string{"10.1.2.3"}},
		{name: "PreferSameNode ignored if some endpoints unhinted",
			endpoints: []string{"10.1.2.3 nodes=alder", "10.1.2.4 nodes=birch", "10.1.2.5"},
			cluster:   []string{"10.1.2.3", "10.1.2.4", "10.1.2.5"}},
		{name: "PreferSameNode falls back to PreferSameZone if no endpoint for node",
			endpoints: []string{"10.1.2.3 nodes=dogwood zones=z1", "10.1.2.4 nodes=birch zones=z2", "10.1.2.5 nodes=cedar zones=z3"},
			cluster:   []string{"10.1.2.3"}},
		{name: "an endpoint without node hints leaves zone hints in force",
			endpoints: []string{"10.1.2.3 nodes=alder zones=z2", "10.1.2.4 zones=z1"}, cluster: []string{"10.1.2.4"}},
		{name: "zone hints of some are ignored, behind node hints of all for other nodes",
			endpoints: []string{"10.1.2.3 nodes=birch zones=z1", "10.1.2.4 nodes=cedar"}, cluster: []string{"10.1.2.3", "10.1.2.4"}},
		{name: "conflicting topology and localness require merging allEndpoints", service: external,
			endpoints: []string{"10.0.0.0 node=alder zones=z1", "10.0.0.1 node=alder zones=z2", "10.0.0.2 node=birch zones=z1", "10.0.0.3 node=birch zones=z2"},
			cluster:   []string{"10.0.0.0", "10.0.0.2"}, local: []string{"10.0.0.0", "10.0.0.1"}},
		{name: "internalTrafficPolicy: Local, with empty endpoints", service: internal, none: true},
		{name: "internalTrafficPolicy: Local, but all endpoints are remote", service: internal,
			endpoints: []string{"10.0.0.0 node=birch", "10.0.0.1 node=cedar"}},
		{name: "internalTrafficPolicy: Local, all endpoints are local", service: internal,
			endpoints: []string{"10.0.0.0 node=alder", "10.0.0.1 node=alder"}, local: []string{"10.0.0.0", "10.0.0.1"}},
		{name: "internalTrafficPolicy: Local, some endpoints are local", service: internal,
			endpoints: []string{"10.0.0.0 node=alder", "10.0.0.1 node=birch"}, local: []string{"10.0.0.0"}},
		{name: "Cluster traffic policy, endpoints not Ready",
			endpoints: []string{"10.0.0.0 unready", "10.0.0.1 unready"}, none: true},
		{name: "Cluster traffic policy, some endpoints are Ready",
			endpoints: []string{"10.0.0.0 unready", "10.0.0.1"}, cluster: []string{"10.0.0.1"}},
		{name: "Cluster traffic policy, all endpoints are terminating",
			endpoints: []string{"10.0.0.0 terminating", "10.0.0.1 terminating"}, cluster: []string{"10.0.0.0", "10.0.0.1"}},
		{name: "iTP: Local, eTP: Cluster, some endpoints local", service: internal + "nodeport",
			endpoints: []string{"10.0.0.0 node=alder", "10.0.0.1 node=birch"}, cluster: []string{"10.0.0.0", "10.0.0.1"}, local: []string{"10.0.0.0"}},
		{name: "iTP: Cluster, eTP: Local, some endpoints local", service: external,
			endpoints: []string{"10.0.0.0 node=alder", "10.0.0.1 node=birch"}, cluster: []string{"10.0.0.0", "10.0.0.1"}, local: []string{"10.0.0.0"}},
		{name: "iTP: Local, eTP: Local, some endpoints local", service: internal + external,
			endpoints: []string{"10.0.0.0 node=alder", "10.0.0.1 node=birch"}, cluster: []string{"10.0.0.0", "10.0.0.1"}, local: []string{"10.0.0.0"}},
		{name: "iTP: Local, eTP: Local, all endpoints remote", service: internal + external,
			endpoints: []string{"10.0.0.0 node=birch", "10.0.0.1 node=cedar"}, cluster: []string{"10.0.0.0", "10.0.0.1"}},
		{name: "iTP: Local, eTP: Local, all endpoints remote and terminating", service: internal + external,
			endpoints: []string{"10.0.0.0 node=birch terminating", "10.0.0.1 node=cedar terminating"}, cluster: []string{"10.0.0.0", "10.0.0.1"}},
		{name: "iTP: Cluster, eTP: Local, with terminating endpoints", service: external,
			endpoints: []string{"10.0.0.0 node=birch", "10.0.0.1 down", "10.0.0.2 node=alder terminating", "10.0.0.3 node=birch terminating"},
			cluster:   []string{"10.0.0.0"}, local: []string{"10.0.0.2"}},
		{name: "externalTrafficPolicy ignored if not externally accessible", service: "etp=Local",
			endpoints: []string{"10.0.0.0 node=alder", "10.0.0.1 node=birch"}, cluster: []string{"10.0.0.0", "10.0.0.1"}},
		{name: "no cluster endpoints for iTP:Local internal-only service", service: internal,
			endpoints: []string{"10.0.0.0 node=alder", "10.0.0.1 node=birch"}, local: []string{"10.0.0.0"}},
		{name: "empty endpoints when no service endpoints exist", none: true},
		{name: "single endpoint not ready, not serving, not terminating", endpoints: []string{"10.0.0.0 down"}, none: true},
		{name: "hints of terminating endpoints do not count",
			endpoints: []string{"10.0.0.0 zones=z1", "10.0.0.1 zones=z2", "10.0.0.2 terminating"}, cluster: []string{"10.0.0.0"}},
		{name: "hints are ignored among terminating endpoints",
			endpoints: []string{"10.0.0.0 zones=z1 terminating", "10.0.0.1 zones=z2 terminating"}, cluster: []string{"10.0.0.0", "10.0.0.1"}},
		{name: "terminating endpoints that do not serve count as none", endpoints: []string{"10.0.0.0 gone"}, none: true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, defaultSettings())
			node := &cluster.Node{Name: "alder", Zone: "z1"}
			if test.zone != "" {
				node.Zone = strings.TrimPrefix(test.zone, "-")
			}
			w.sink.SetNode(node)
			n := cluster.Name{Namespace: "ns", Name: "svc"}
			svc := &cluster.Service{Name: n, Type: "ClusterIP", ClusterIPs: []netip.Addr{netip.MustParseAddr("10.62.0.20")}}
			port := cluster.ServicePort{Name: cluster.Intern(""), Protocol: "TCP", Port: 80}
			for _, word := range strings.Fields(test.service) {
				switch word {
				case "itp=Local":
					svc.InternalLocal = true
				case "etp=Local":
					svc.ExternalLocal = true
				case "nodeport":
					svc.Type, port.NodePort = "NodePort", 30000
				}
			}
			svc.Ports = []cluster.ServicePort{port}
			w.sink.SetService(svc)
			sl := &cluster.Slice{Name: n, Service: n.Name, Ports: []cluster.SlicePort{{Name: cluster.Intern(""), Protocol: "TCP", Port: 8080}}}
			for _, e := range test.endpoints {
				sl.Endpoints = append(sl.Endpoints, mustEndpoint(t, e))
			}
			w.sink.SetSlice(sl)
			w.sync()
			sp := w.services[plan.ID{Namespace: "ns", Name: "svc", Protocol: plan.TCP, Family: plan.IPv4}]
			if have := addresses(sp.Pools[plan.Cluster]); !slices.Equal(have, test.cluster) {
				t.Errorf("cluster: have %v, want %v", have, test.cluster)
			}
			if have := addresses(sp.Pools[plan.Local]); !slices.Equal(have, test.local) {
				t.Errorf("local: have %v, want %v", have, test.local)
			}
			rejects := sp.Frontends[0].Route[plan.FromPod].Verdict == plan.Reject
			if rejects != test.none {
				t.Errorf("rejects: %v, want %v", rejects, test.none)
			}
		})
	}
}

func addresses(eps []plan.Endpoint) (out []string) {
	for _, e := range eps {
		out = append(out, e.Addr.Addr().String())
	}
	return out
}
