package planner

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// The reasons for which an object or a part of it has no effect, or less than its
// author may expect. Problems of single fields carry the reason that the facts
// give them.
const (
	// The whole Service is left alone.

	Headless     plan.Reason = "Headless"     // clusterIP None
	ExternalName plan.Reason = "ExternalName" // type ExternalName
	OtherProxy   plan.Reason = "OtherProxy"   // label service.kubernetes.io/service-proxy-name
	NoClusterIP  plan.Reason = "NoClusterIP"  // no ClusterIP yet
	NoService    plan.Reason = "NoService"    // EndpointSlices of a Service that does not exist

	// Some of its addresses or ports are.

	ExternalIPsDisabled plan.Reason = "ExternalIPsDisabled" // feature gate AllowServiceExternalIPs
	AddressRefused      plan.Reason = "AddressRefused"      // external address where none may be
	IPModeProxy         plan.Reason = "IPModeProxy"         // ingress address with ipMode Proxy
	FamilyMismatch      plan.Reason = "FamilyMismatch"      // address or slice of a family without ClusterIP
	AddressConflict     plan.Reason = "AddressConflict"     // an older Service has the address and port
	NodePortConflict    plan.Reason = "NodePortConflict"    // an older Service has the node port
	DuplicatePort       plan.Reason = "DuplicatePort"       // two ports of one number and protocol

	// Something works in another way than it may look.

	NodeAddress         plan.Reason = "NodeAddress"         // a Service address is the node's own
	SourceRangesIgnored plan.Reason = "SourceRangesIgnored" // ranges of the other family only
	NoHealthCheckPort   plan.Reason = "NoHealthCheckPort"   // healthCheckNodePort missing
	PortNameMismatch    plan.Reason = "PortNameMismatch"    // no slice has a port of that name
	NoEndpoints         plan.Reason = "NoEndpoints"         // connections are refused
	NoLocalEndpoints    plan.Reason = "NoLocalEndpoints"    // policy Local, endpoints elsewhere
	UnknownAnnotation   plan.Reason = "UnknownAnnotation"   // svcproxy.io/... without a meaning
	InvalidAnnotation   plan.Reason = "InvalidAnnotation"   // svcproxy.io/... with a wrong value
	EndpointsDrained    plan.Reason = "EndpointsDrained"    // all have the weight 0
	EndpointsFailing    plan.Reason = "EndpointsFailing"    // health checks fail

	// Node.

	NodeUnknown   plan.Reason = "NodeUnknown"   // no Node of that name
	NodeGone      plan.Reason = "NodeGone"      // it was deleted
	NodePortsOpen plan.Reason = "NodePortsOpen" // nodePortAddresses without this family
	NodePortsNone plan.Reason = "NodePortsNone" // nodePortAddresses without an address of the host
	PodsUnknown   plan.Reason = "PodsUnknown"   // pods cannot be told from other clients
)

// noter collects notes on one object.
type noter struct {
	kind, namespace, name, uid string
	list                       []plan.Note
}

// warn adds a note that its object's author should hear of.
func (n *noter) warn(r plan.Reason, format string, args ...any) {
	n.add(r, true, fmt.Sprintf(format, args...))
}

// info adds a note for those who ask why.
func (n *noter) info(r plan.Reason, format string, args ...any) {
	n.add(r, false, fmt.Sprintf(format, args...))
}

func (n *noter) add(r plan.Reason, warning bool, message string) {
	n.list = append(n.list, plan.Note{
		Kind: n.kind, Namespace: n.namespace, Name: n.name, UID: n.uid,
		Reason: r, Message: message, Warning: warning,
	})
}

// problems adds those of an object's fields.
func (n *noter) problems(ps []cluster.Problem) {
	for _, p := range ps {
		n.add(plan.Reason(p.Reason), true, p.Message)
	}
}

// slice adds the problems of an EndpointSlice in its own name.
func (n *noter) slice(sl *cluster.Slice) {
	o := noter{kind: "EndpointSlice", namespace: sl.Name.Namespace, name: sl.Name.Name, list: n.list}
	o.problems(sl.Problems)
	n.list = o.list
}

// appendNew appends to out those notes of now that are not among before.
func appendNew(out, before, now []plan.Note) []plan.Note {
	for _, n := range now {
		if !slices.Contains(before, n) {
			out = append(out, n)
		}
	}
	return out
}

func compareNotes(a, b plan.Note) int {
	return cmp.Or(
		cmp.Compare(a.Kind, b.Kind),
		cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Name, b.Name),
		cmp.Compare(a.Reason, b.Reason),
		cmp.Compare(a.Message, b.Message),
	)
}
