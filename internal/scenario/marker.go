package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// marker is a Service of the runner that says how far the proxy has come. Every
// sync gives it another port, and its endpoint another one, as the last change of
// all: once the node reaches the new endpoint through the new port, everything
// applied before is in the kernel. It changes both the Service and the slice,
// because they may reach the proxy by streams of their own, and it is served by a
// hidden host on a link of its own, so that no cut of the script touches it.
//
// Where a reader may meet changes out of order, as in a folder, the marker changes
// twice: what brought the second change began after the first was in the kernel, so
// it has met everything.
//
// A change of the node's zone comes by a third stream. After one, the endpoint
// carries a hint for the new zone, and a second endpoint, where nobody listens,
// one for the old: a proxy that does not know yet goes there.
type marker struct {
	generation int
	zone       string // as of the last sync
	server     *lab.Server
}

const (
	markerNamespace = "scenario"
	markerName      = "marker"
	markerHost      = "marker" // of the lab; hosts of the script cannot have the name
	markerInterface = "veth0"  // the node's end of its link
	markerPort      = 20000    // of generation 0
)

var (
	markerVIP   = netip.MustParseAddr("10.62.255.254")
	markerAddr  = netip.MustParseAddr("10.61.3.254")
	markerDecoy = netip.MustParseAddr("10.61.3.253")
)

func (k *kernel) placeMarker() error {
	return k.net.Extend(lab.Topology{Leaves: []lab.LeafSpec{{
		Name: markerHost, Behind: "node", Interface: markerInterface, Addrs: world.Both(markerAddr), From: k.w.Node().Addrs,
	}}})
}

// sync waits until everything applied so far is in the kernel.
func (k *kernel) sync(within time.Duration) error {
	if err := k.build(); err != nil {
		return err
	}
	rounds := 1
	if !k.feed.InOrder() {
		rounds = 2
	}
	deadline := time.Now().Add(flow.Patient(within))
	for range rounds {
		if err := k.mark(deadline); err != nil {
			return fmt.Errorf("not in the kernel after %s: %w", within, err)
		}
	}
	k.marker.zone = k.w.Zone
	if k.alone != nil {
		// What other modes left goes after the first sync. What keeps it, such as a
		// kube-proxy beside, is no fault of the sync.
		_ = flow.Until(deadline, func() error {
			if !k.alone() {
				return errors.New("other modes' objects are there")
			}
			return nil
		})
		k.alone = nil
	}
	return nil
}

// mark changes the marker and waits for it.
func (k *kernel) mark(deadline time.Time) error {
	k.marker.generation++
	port := uint16(markerPort + k.marker.generation)
	name := fmt.Sprintf("generation-%d", k.marker.generation)
	old := k.marker.server
	var err error
	if k.marker.server, err = k.net.Host(markerHost).Serve(name, lab.TCP, port); err != nil {
		return err
	}
	if old != nil {
		old.Close()
	}
	for _, o := range k.markerObjects(port) {
		if err := k.feed.Put(o); err != nil {
			return fmt.Errorf("mark the change: %w", err)
		}
	}
	for _, vip := range world.Both(markerVIP) {
		if vip.Is6() && !k.ipv6() || !k.nodeAddr(vip.Is6()).IsValid() {
			continue
		}
		d := lab.Dialing{Proto: lab.TCP, To: netip.AddrPortFrom(vip, port)}
		err := flow.Until(deadline, func() error {
			if err := k.alive(); err != nil {
				return flow.Final(err)
			}
			if s := flow.Attempt(k.net.Host("node"), d, flow.Patient(flow.Silence)); s.End != lab.Answered || s.Answer.Server != name {
				return fmt.Errorf("the runner's own Service at %s is %s", d.To, s)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// ipv6 reports whether the node has IPv6 at this moment.
func (k *kernel) ipv6() bool {
	off := true
	_ = k.net.Host("node").Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
		off = err != nil || strings.TrimSpace(string(b)) != "0"
		return nil
	})
	return !off
}

// markerObjects is the marker at its present generation: slices first, the Service
// last.
func (k *kernel) markerObjects(port uint16) []world.Object {
	vips, addrs, decoys := world.Both(markerVIP), world.Both(markerAddr), world.Both(markerDecoy)
	portName, tcp, number, yes := "marker", corev1.ProtocolTCP, int32(port), true
	var out []world.Object
	for i, t := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: markerNamespace, Name: markerName + "-" + strings.ToLower(string(t)),
				Labels: map[string]string{discoveryv1.LabelServiceName: markerName},
			},
			AddressType: t,
			Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &number, Protocol: &tcp}},
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{addrs[i].String()}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}}},
		}
		if k.marker.zone != k.w.Zone {
			s.Endpoints[0].Hints = zoneHint(k.w.Zone)
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{decoys[i].String()}, Conditions: s.Endpoints[0].Conditions, Hints: zoneHint(k.marker.zone),
			})
		}
		_, gvk, _ := world.NewObject("EndpointSlice")
		s.SetGroupVersionKind(gvk)
		out = append(out, s)
	}
	policy := corev1.IPFamilyPolicyRequireDualStack
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: markerNamespace, Name: markerName, Labels: k.markerLabels()},
		Spec: corev1.ServiceSpec{
			ClusterIP: vips[0].String(), ClusterIPs: []string{vips[0].String(), vips[1].String()},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, IPFamilyPolicy: &policy,
			Ports: []corev1.ServicePort{{Name: portName, Port: number, Protocol: tcp}},
		},
	}
	_, gvk, _ := world.NewObject("Service")
	svc.SetGroupVersionKind(gvk)
	return append(out, svc)
}

func zoneHint(zone string) *discoveryv1.EndpointHints {
	if zone == "" {
		zone = "none" // nobody's zone
	}
	return &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
}

// markerLabels makes the marker a Service of the proxy under test if that serves
// only Services with its own name on them.
func (k *kernel) markerLabels() map[string]string {
	for i, a := range k.args {
		v, ok := strings.CutPrefix(a, "--service-proxy-name=")
		if !ok && a == "--service-proxy-name" && i+1 < len(k.args) {
			v, ok = k.args[i+1], true
		}
		if ok && v != "" {
			return map[string]string{"service.kubernetes.io/service-proxy-name": v}
		}
	}
	return nil
}
