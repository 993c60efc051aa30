package plan

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

func TestValidate(t *testing.T) {
	good := func() *ServicePort {
		return &ServicePort{
			ID:        ID{Namespace: "default", Name: "web", Protocol: TCP, Family: IPv4},
			Frontends: []Frontend{{Kind: ClusterIP, Addr: netip.MustParseAddr("10.96.0.20"), Port: 80}, {Kind: NodePort, Port: 31080}},
			Pools:     [2][]Endpoint{{{Addr: netip.MustParseAddrPort("10.244.1.5:8080")}}, nil},
		}
	}
	if err := good().Validate(); err != nil {
		t.Errorf("a Service port like any other: %v", err)
	}
	for _, c := range []struct {
		want  string
		spoil func(*ServicePort)
	}{
		{"protocol Protocol(1)", func(sp *ServicePort) { sp.ID.Protocol = 1 }},
		{"ClusterIP 2001:db8::1: not an IPv4 address", func(sp *ServicePort) { sp.Frontends[0].Addr = netip.MustParseAddr("2001:db8::1") }},
		{"ClusterIP invalid IP: not an IPv4 address", func(sp *ServicePort) { sp.Frontends[0].Addr = netip.Addr{} }},
		{"NodePort invalid IP: port 0", func(sp *ServicePort) { sp.Frontends[1].Port = 0 }},
		{"endpoint [2001:db8::2]:80: want an IPv4 address", func(sp *ServicePort) { sp.Pools[Cluster][0].Addr = netip.MustParseAddrPort("[2001:db8::2]:80") }},
		{"endpoint 10.244.1.5:0: want", func(sp *ServicePort) { sp.Pools[Cluster][0].Addr = netip.MustParseAddrPort("10.244.1.5:0") }},
		{"endpoint invalid AddrPort: want", func(sp *ServicePort) { sp.Pools[Local] = []Endpoint{{}} }},
		{"no frontends", func(sp *ServicePort) { sp.Frontends = nil }},
	} {
		sp := good()
		c.spoil(sp)
		if err := sp.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("have %v, want an error with %q", err, c.want)
		}
	}
}

func TestLocalTrafficIn(t *testing.T) {
	four, six := netip.MustParsePrefix("10.244.1.7/24"), netip.MustParsePrefix("2001:db8::/64")
	for _, c := range []struct {
		in, want LocalTraffic
		err      string
	}{
		{LocalTraffic{}, LocalTraffic{}, ""},
		{LocalTraffic{Kind: LocalUnknown, Name: "cni0"}, LocalTraffic{}, ""},
		{LocalTraffic{Kind: LocalPrefix, Prefixes: []netip.Prefix{six, four}, Name: "cni0"}, LocalTraffic{Kind: LocalPrefix, Prefixes: []netip.Prefix{four.Masked()}}, ""},
		{LocalTraffic{Kind: LocalPrefix, Prefixes: []netip.Prefix{six}}, LocalTraffic{}, ""},
		{LocalTraffic{Kind: LocalInterface, Name: "cni0"}, LocalTraffic{Kind: LocalInterface, Name: "cni0"}, ""},
		{LocalTraffic{Kind: LocalInterfacePrefix, Name: "veth"}, LocalTraffic{Kind: LocalInterfacePrefix, Name: "veth"}, ""},
		{LocalTraffic{Kind: LocalInterface, Name: "a b"}, LocalTraffic{}, `"a b" is no interface name`},
		{LocalTraffic{Kind: LocalInterface}, LocalTraffic{}, `"" is no interface name`},
		{LocalTraffic{Kind: LocalInterfacePrefix, Name: "veth*"}, LocalTraffic{}, `"veth*" is no interface name`},
		{LocalTraffic{Kind: LocalInterfacePrefix, Name: "sixteen-letters-"}, LocalTraffic{}, "is no interface name"},
	} {
		have, err := c.in.In(IPv4)
		if !reflect.DeepEqual(have, c.want) || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%+v: have %+v, %v; want %+v, %q", c.in, have, err, c.want, c.err)
		}
	}
}
