package cluster

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// maxBytesPerEndpoint is the budget for everything that a State holds, Services
// and indexes included, divided by the number of endpoints.
const maxBytesPerEndpoint = 150

// BenchmarkState fills a State with 100,000 endpoints; B/endpoint is the heap that
// it holds afterwards.
func BenchmarkState(b *testing.B) {
	for _, c := range [...]struct{ services, endpoints int }{{1000, 100}, {10_000, 10}} {
		b.Run(fmt.Sprintf("%dx%d", c.services, c.endpoints), func(b *testing.B) {
			b.ReportAllocs()
			var perEndpoint float64
			for b.Loop() {
				perEndpoint = bytesPerEndpoint(c.services, c.endpoints)
			}
			b.ReportMetric(perEndpoint, "B/endpoint")
		})
	}
}

func TestMemory(t *testing.T) {
	for _, c := range [...]struct{ services, endpoints int }{{1000, 100}, {10_000, 10}} {
		have := bytesPerEndpoint(c.services, c.endpoints)
		t.Logf("%d Services with %d endpoints each: %.1f B/endpoint", c.services, c.endpoints, have)
		if have > maxBytesPerEndpoint {
			t.Errorf("%d Services with %d endpoints each hold %.1f bytes of heap per endpoint, want at most %d", c.services, c.endpoints, have, maxBytesPerEndpoint)
		}
	}
}

// bytesPerEndpoint returns the heap that a State with that many Services and
// endpoints of each holds, per endpoint.
func bytesPerEndpoint(services, endpoints int) float64 {
	before := liveHeap()
	s := NewState(time.Now)
	to := s.Sink("test", Services, Slices)
	for i := range services {
		to.SetService(ReduceService(manyService(i)))
		to.SetSlice(ReduceSlice(manySlice(i, endpoints)))
	}
	s.Drain()
	after := liveHeap()
	if _, n := s.Counts(); n != services*endpoints {
		panic(fmt.Sprintf("%d endpoints held, want %d", n, services*endpoints))
	}
	runtime.KeepAlive(s)
	return float64(int64(after)-int64(before)) / float64(services*endpoints)
}

func liveHeap() uint64 {
	var m runtime.MemStats
	for range 3 { // interned values go only after the collection that unlinks them
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// manyService is Service i of many, as an API server returns it.
func manyService(i int) *corev1.Service {
	policy := corev1.ServiceInternalTrafficPolicyCluster
	addr := fmt.Sprintf("10.62.%d.%d", i>>8&255, i&255)
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("namespace-%02d", i%50), Name: fmt.Sprintf("some-application-%05d", i),
			UID: types.UID(fmt.Sprintf("%08d-bf8a-4bb8-9fc0-6e2b4eaaab5c", i)), CreationTimestamp: metav1.Unix(1_700_000_000+int64(i), 0),
			Annotations: map[string]string{"meta.helm.sh/release-name": "some-application"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: addr, ClusterIPs: []string{addr}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			SessionAffinity: corev1.ServiceAffinityNone, InternalTrafficPolicy: &policy,
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
}

func manySlice(i, endpoints int) *discoveryv1.EndpointSlice {
	svc := manyService(i)
	name, proto, port, yes, no := "http", corev1.ProtocolTCP, int32(8080), true, false
	sl := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: svc.Namespace, Name: svc.Name + "-x7k2p", Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name},
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05Z"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &proto, Port: &port}},
	}
	for j := range endpoints {
		n := i*endpoints + j
		node, zone := fmt.Sprintf("worker-%04d.example.internal", n%1000), fmt.Sprintf("region-1%c", 'a'+n%3)
		sl.Endpoints = append(sl.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 64+n>>16, n>>8&255, n&255)}, NodeName: &node, Zone: &zone,
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			Hints:      &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}, ForNodes: []discoveryv1.ForNode{{Name: node}}},
		})
	}
	return sl
}
