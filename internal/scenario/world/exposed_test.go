package world

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestExposed(t *testing.T) {
	service := func(name, external, lb string, port int32) *corev1.Service {
		return &corev1.Service{
			TypeMeta: metav1.TypeMeta{Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec:   corev1.ServiceSpec{ClusterIP: "10.62.0.20", ExternalIPs: []string{external}, Ports: []corev1.ServicePort{{Port: port}}},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: lb}}}},
		}
	}
	var e Exposed
	e.Put(service("a", "192.0.2.80", "203.0.113.5", 443))
	e.Put(service("b", "192.0.2.80", "203.0.113.6", 80))
	e.Put(&corev1.Node{})
	check := func(to string, want bool) {
		t.Helper()
		if have := e.Beside(netip.MustParseAddrPort(to)); have != want {
			t.Errorf("%s: have %t", to, have)
		}
	}
	check("203.0.113.5:2222", true)
	check("203.0.113.5:443", false)
	check("192.0.2.80:80", false)
	check("192.0.2.80:443", false)
	check("192.0.2.80:81", true)
	check("203.0.113.7:81", false)
	check("10.62.0.20:81", false)
	e.Forget(KeyOf(service("b", "", "", 0)))
	check("192.0.2.80:80", true)
	check("203.0.113.6:81", false)
}
