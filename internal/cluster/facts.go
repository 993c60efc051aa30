// Package cluster holds the newest known facts about Services, endpoints and the
// own node, in compact form, whatever they come from. Sources reduce API objects
// to facts and write them through a [Sink] into the [State]; the planner asks the
// State what changed.
//
// No policy is decided here. What the State holds depends only on the facts last
// written, not on the order in which they came. Memory is at most 150 bytes of
// heap per endpoint from 10 endpoints per Service on, Services and indexes
// included (BenchmarkState).
package cluster

import (
	"net/netip"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Name is a namespace and a name.
type Name = types.NamespacedName

// String is an interned string: node names, zones and port names repeat in
// thousands of endpoints. The zero value is not "", see [Intern].
type String = unique.Handle[string]

// Intern returns the one String of s.
func Intern(s string) String { return unique.Make(s) }

func internTopology(t TopologySet) Topology { return unique.Make(t) }

// Service is what matters of a v1.Service. Addresses and prefixes that do not
// parse are left out and listed in Problems.
type Service struct {
	Name    Name
	UID     types.UID
	Created int64 // metadata.creationTimestamp, Unix seconds; decides conflicts
	Type    corev1.ServiceType
	// ClusterIPs are spec.clusterIPs (or clusterIP), at most one per family;
	// empty for a headless Service.
	ClusterIPs   []netip.Addr
	ExternalIPs  []netip.Addr
	Ingress      []Ingress      // status.loadBalancer.ingress entries with an ip
	SourceRanges []netip.Prefix // spec.loadBalancerSourceRanges
	Ports        []ServicePort
	// Affinity is the ClientIP affinity's timeout, 0 for none.
	Affinity time.Duration
	// ProxyName is the label service.kubernetes.io/service-proxy-name; a present
	// but empty label counts, as HasProxyName.
	ProxyName           string
	HasProxyName        bool
	Headless            bool // clusterIP None
	ExternalLocal       bool // externalTrafficPolicy: Local
	InternalLocal       bool // internalTrafficPolicy: Local
	DNS                 bool // label k8s-app=kube-dns, or a port 53 in kube-system: needed first
	HealthCheckNodePort uint16
	source              uint16 // set by the Sink; decides which of one name is in force
	// Annotations are those under svcproxy.io/, nil for most.
	Annotations map[string]string
	Problems    []Problem
}

// Ingress is one load-balancer address of a Service's status.
type Ingress struct {
	Addr  netip.Addr
	Proxy bool // ipMode: Proxy
}

// ServicePort is one entry of spec.ports.
type ServicePort struct {
	Name     String
	Protocol corev1.Protocol
	Port     uint16
	NodePort uint16
}

// Slice is what matters of a discovery.k8s.io/v1 EndpointSlice, or of one address
// family of a classic Endpoints object.
type Slice struct {
	Name      Name
	Service   string // the Service's name, in the same namespace; "" if it names none
	IPv6      bool   // addressType
	source    uint16 // set by the Sink; orders slices of one name
	Ports     []SlicePort
	Endpoints []Endpoint
	// Trigger is the annotation endpoints.kubernetes.io/last-change-trigger-time,
	// zero if absent or malformed.
	Trigger  time.Time
	Problems []Problem
}

func (sl *Slice) serviceName() Name {
	return Name{Namespace: sl.Name.Namespace, Name: sl.Service}
}

// SlicePort is one port that all endpoints of a slice have.
type SlicePort struct {
	Name     String
	Protocol corev1.Protocol
	Port     uint16
}

// Endpoint is one endpoint of a slice, by its first address.
type Endpoint struct {
	Addr     netip.Addr
	Node     String // nodeName, Intern("") if unset
	Topology Topology
	Flags    EndpointFlags
}

// EndpointFlags are an endpoint's conditions with the API's defaults applied.
type EndpointFlags uint8

const (
	Ready EndpointFlags = 1 << iota
	Serving
	Terminating
)

// Topology is the zone of an endpoint and its hints, interned as one value because
// endpoints of a zone share them. The zero value says nothing.
type Topology = unique.Handle[TopologySet]

// TopologySet is the comparable form of an endpoint's zone and of
// discovery.k8s.io/v1 EndpointHints: names, those of hints sorted and joined by
// newlines; "" for none.
type TopologySet struct {
	Zone                 string // where the endpoint is
	HintZones, HintNodes string // whom it is meant for
}

// Node is what matters of the own v1.Node.
type Node struct {
	Name     string
	UID      types.UID
	Zone     string       // label topology.kubernetes.io/zone
	Addrs    []netip.Addr // status.addresses: InternalIPs, then ExternalIPs, in their order
	PodCIDRs []netip.Prefix
	// Deleting: a deletion timestamp is set, or the cluster autoscaler's taint
	// ToBeDeletedByClusterAutoscaler.
	Deleting bool
	Problems []Problem
}

// Problem is a field of an object that cannot be used as it stands.
type Problem struct {
	Reason  string // one CamelCase word
	Message string // field, value, why, remedy
}
