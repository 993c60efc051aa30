package main

import (
	"fmt"
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
)

// probes is the number of Services that lead to a real pod, spread over the
// others by name.
const probes = 16

const namespace = "bench"

// synthetic is the cluster: size Services with endpoints that do not exist, and
// the probes.
type synthetic struct {
	server     *apiserver.Server
	size       int
	endpoints  int
	generation int
	atB        [probes]bool // the probe leads to pod b, not a
}

// fill puts the whole cluster into the API server.
func (c *synthetic) fill() error {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelTopologyZone: "zone-0"}},
		Spec:       corev1.NodeSpec{PodCIDR: "10.244.0.0/16", PodCIDRs: []string{"10.244.0.0/16"}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeAddr}}},
	}
	if err := c.server.Put(node); err != nil {
		return err
	}
	for i := range c.size {
		if i%(c.size/probes) == 0 && i/(c.size/probes) < probes {
			k := i / (c.size / probes)
			if err := c.server.Put(service(c.probeName(k), probeAddr(k))); err != nil {
				return err
			}
			if err := c.server.Put(slice(c.probeName(k), []string{podA})); err != nil {
				return err
			}
		}
		if err := c.server.Put(service(serviceName(i), address(96, 256+i))); err != nil {
			return err
		}
		if err := c.putSlice(i); err != nil {
			return err
		}
	}
	return nil
}

// moveProbe makes the other pod the only endpoint of a probe, and returns that
// pod's name.
func (c *synthetic) moveProbe(k int) (string, error) {
	c.atB[k] = !c.atB[k]
	name, addr := "a", podA
	if c.atB[k] {
		name, addr = "b", podB
	}
	return name, c.server.Put(slice(c.probeName(k), []string{addr}))
}

// replace gives n Services, chosen at random, other endpoints.
func (c *synthetic) replace(n int) error {
	c.generation++
	for range n {
		if err := c.putSlice(rand.IntN(c.size)); err != nil {
			return err
		}
	}
	return nil
}

func (c *synthetic) putSlice(i int) error {
	addrs := make([]string, c.endpoints)
	for j := range addrs {
		addrs[j] = address(128, (i*c.endpoints+j+c.generation*7919)&0x3fffff)
	}
	return c.server.Put(slice(serviceName(i), addrs))
}

func serviceName(i int) string { return fmt.Sprintf("svc-%06d", i) }

// probeName sorts the probe among the others.
func (c *synthetic) probeName(k int) string { return serviceName(k*(c.size/probes)) + "-probe" }

func probeAddr(k int) string { return fmt.Sprintf("10.111.255.%d", k+1) }

// address returns the i-th address above 10.first.0.0.
func address(first, i int) string {
	return fmt.Sprintf("10.%d.%d.%d", first+i>>16, i>>8&255, i&255)
}

// service is as a controller of today would write it: all fields are sent and
// have to be decoded.
func service(name, addr string) *corev1.Service {
	single, policy := corev1.IPFamilyPolicySingleStack, corev1.ServiceInternalTrafficPolicyCluster
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: types.UID(namespace + "-" + name),
			CreationTimestamp: metav1.NewTime(time.Now().Add(-time.Hour)),
			Labels:            map[string]string{"app": name, "app.kubernetes.io/name": name, "team": "bench"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: addr, ClusterIPs: []string{addr},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single, InternalTrafficPolicy: &policy,
			SessionAffinity: corev1.ServiceAffinityNone, Selector: map[string]string{"app": name},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(podPort)}},
		},
	}
}

func slice(svc string, addrs []string) *discoveryv1.EndpointSlice {
	yes, no, port, name, tcp := true, false, int32(podPort), "http", corev1.ProtocolTCP
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: svc + "-x7k2p", UID: types.UID(namespace + "-" + svc + "-slice"),
			CreationTimestamp: metav1.NewTime(time.Now().Add(-time.Hour)),
			Labels:            map[string]string{discoveryv1.LabelServiceName: svc, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
			Annotations:       map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().UTC().Format(time.RFC3339Nano)},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &tcp, Port: &port}},
	}
	for i, a := range addrs {
		node, zone := fmt.Sprintf("node%d", i%100), fmt.Sprintf("zone-%d", i%3)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a}, NodeName: &node, Zone: &zone,
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: namespace, Name: fmt.Sprintf("%s-6c9f5d8b7-%05d", svc, i), UID: types.UID(fmt.Sprintf("%s-%d", svc, i))},
		})
	}
	return s
}
