package world

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Exposed remembers the external and load-balancer addresses of the Services that
// there are, and their ports.
type Exposed map[Key]exposure

type exposure struct {
	addrs []netip.Addr
	ports []int32
}

// Put takes note of an object; others than Services have no such address.
func (e *Exposed) Put(o Object) {
	svc, ok := o.(*corev1.Service)
	if !ok {
		return
	}
	var x exposure
	add := func(s string) {
		if a, err := netip.ParseAddr(s); err == nil {
			x.addrs = append(x.addrs, a)
		}
	}
	for _, s := range svc.Spec.ExternalIPs {
		add(s)
	}
	for _, in := range svc.Status.LoadBalancer.Ingress {
		add(in.IP)
	}
	for _, p := range svc.Spec.Ports {
		x.ports = append(x.ports, p.Port)
	}
	if *e == nil {
		*e = Exposed{}
	}
	(*e)[KeyOf(o)] = x
}

// Forget drops an object.
func (e *Exposed) Forget(k Key) { delete(*e, k) }

// Beside reports whether a Service has the address, and none has the port of it.
func (e *Exposed) Beside(to netip.AddrPort) bool {
	known := false
	for _, x := range *e {
		if !slices.Contains(x.addrs, to.Addr()) {
			continue
		}
		if slices.Contains(x.ports, int32(to.Port())) {
			return false
		}
		known = true
	}
	return known
}
