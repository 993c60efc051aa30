package plan

import (
	"encoding/json"
	"net/netip"
	"slices"
	"testing"
	"time"
)

func everything() Policy {
	return Policy{
		Scheduler: "mh", SourcePort: true, Fallback: true,
		DrainTimeout: 90 * time.Second, VanishedTimeout: 1500 * time.Millisecond,
		ClientAddress: ClientAddressHidden, ProxyProtocol: 2,
		Check: HealthCheck{
			Method: CheckHTTP, Path: "/a?b", Code: 204, Port: 81,
			Interval: 5 * time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3,
		},
	}
}

func TestPolicyForms(t *testing.T) {
	for _, c := range []struct {
		policy     *Policy
		text, json string
	}{
		{nil, "", ""},
		{&Policy{}, "", ""},
		{&Policy{ProxyProtocol: 1}, "proxy-protocol=v1", `{"proxyProtocol":1}`},
		{&Policy{ClientAddress: ClientAddressKept}, "client-address=keep", `{"clientAddress":"keep"}`},
		{&Policy{Check: HealthCheck{Method: CheckTCP, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 1}},
			"health-check=tcp,interval=1s,timeout=1s,rise=1,fall=1",
			`{"healthCheck":{"method":"tcp","intervalSeconds":1,"timeoutSeconds":1,"rise":1,"fall":1}}`},
		{new(everything()),
			"scheduler=mh source-port fallback drain-timeout=1m30s vanished-endpoint-timeout=1.5s client-address=hide proxy-protocol=v2 " +
				"health-check=http,path=/a?b,code=204,port=81,interval=5s,timeout=500ms,rise=2,fall=3",
			`{"scheduler":"mh","sourcePort":true,"fallback":true,"drainTimeoutSeconds":90,"vanishedEndpointTimeoutSeconds":1.5,` +
				`"clientAddress":"hide","proxyProtocol":2,"healthCheck":{"method":"http","path":"/a?b","code":204,"port":81,` +
				`"intervalSeconds":5,"timeoutSeconds":0.5,"rise":2,"fall":3}}`},
	} {
		sp := &ServicePort{ID: ID{Namespace: "default", Name: "web", Protocol: TCP, Family: IPv4}, Policy: c.policy}
		want := "service default/web TCP IPv4\n"
		if c.text != "" {
			want += "  policy " + c.text + "\n"
		}
		if have := sp.String(); have != want {
			t.Errorf("text %q, want %q", have, want)
		}
		data, err := json.Marshal(sp)
		var have struct{ Policy json.RawMessage }
		if err != nil || json.Unmarshal(data, &have) != nil || string(have.Policy) != c.json {
			t.Errorf("JSON %s (%v), want %s", have.Policy, err, c.json)
		}
	}
}

func TestPolicyEqual(t *testing.T) {
	id := ID{Namespace: "default", Name: "web"}
	plain := &ServicePort{ID: id}
	if !plain.Equal(&ServicePort{ID: id, Policy: &Policy{}}) {
		t.Error("no Policy differs from the zero one")
	}
	if chosen := (&ServicePort{ID: id, Policy: new(everything())}); chosen.Equal(plain) || !chosen.Equal(&ServicePort{ID: id, Policy: new(everything())}) {
		t.Error("Policies are not compared by value")
	}
}

func TestTarget(t *testing.T) {
	a := netip.MustParseAddrPort("[2001:db8:61::5]:8080")
	if have := (HealthCheck{}).Target(a); have != a {
		t.Errorf("without a port: %s", have)
	}
	if have := (HealthCheck{Port: 81}).Target(a).String(); have != "[2001:db8:61::5]:81" {
		t.Errorf("with a port: %s", have)
	}
}

func TestDepartures(t *testing.T) {
	at := func(n byte) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 61, 1, n}), 8080)
	}
	// lists are the endpoints in the pool, among Serving and among Draining.
	port := func(drain, vanished time.Duration, lists ...[]byte) *ServicePort {
		sp := &ServicePort{ID: ID{Name: "web", Protocol: TCP}, Policy: &Policy{DrainTimeout: drain, VanishedTimeout: vanished}}
		for i, list := range lists {
			for _, n := range list {
				switch i {
				case 0:
					sp.Pools[Local] = append(sp.Pools[Local], Endpoint{Addr: at(n)})
				case 1:
					sp.Serving = append(sp.Serving, at(n))
				case 2:
					sp.Draining = append(sp.Draining, at(n))
				}
			}
		}
		return sp
	}
	const s, m = time.Second, time.Minute
	of := func(n byte, d time.Duration) Departure { return Departure{at(n), d} }
	for name, c := range map[string]struct {
		old, new *ServicePort
		want     []Departure
	}{
		"new":                       {nil, port(s, m, []byte{1}, []byte{1}), nil},
		"removed":                   {port(s, m, []byte{1}, []byte{1}), nil, nil},
		"unchanged":                 {port(s, m, []byte{1}, []byte{1, 2}), port(s, m, []byte{1}, []byte{1, 2}), nil},
		"no limits":                 {port(0, 0, []byte{1, 2}, []byte{1, 2}), port(0, 0, []byte{1}, []byte{1}), nil},
		"vanishes":                  {port(0, m, []byte{1, 2}, []byte{1, 2}), port(0, m, []byte{1}, []byte{1}), []Departure{of(2, m)}},
		"vanishes, both":            {port(s, m, []byte{1, 2}, []byte{1, 2}), port(s, m, []byte{1}, []byte{1}), []Departure{of(2, s)}},
		"vanishes, both, other way": {port(m, s, []byte{1, 2}, []byte{1, 2}), port(m, s, []byte{1}, []byte{1}), []Departure{of(2, s)}},
		"vanishes, drain only":      {port(m, 0, []byte{1, 2}, []byte{1, 2}), port(m, 0, []byte{1}, []byte{1}), []Departure{of(2, m)}},
		"unready, then vanishes":    {port(0, m, nil, []byte{2}), port(0, m), []Departure{of(2, m)}},
		"not ready":                 {port(s, m, []byte{2}, []byte{2}), port(s, m, nil, []byte{2}), nil},
		"terminates":                {port(s, m, []byte{2}, []byte{2}), port(s, m, nil, nil, []byte{2}), []Departure{of(2, s)}},
		"terminates, no drain":      {port(0, m, []byte{2}, []byte{2}), port(0, m, nil, nil, []byte{2}), nil},
		"terminates in the pool":    {port(s, m, []byte{2}, []byte{2}), port(s, m, []byte{2}), nil},
		"still terminates":          {port(s, m, nil, nil, []byte{2}), port(s, m, nil, nil, []byte{2}), nil},
		"terminated, then goes":     {port(s, m, nil, nil, []byte{2}), port(s, m), nil},
	} {
		change := Change{ID: ID{Name: "web", Protocol: TCP}, Old: c.old, New: c.new}
		if have := change.Departures(); !slices.Equal(have, c.want) {
			t.Errorf("%s: %v, want %v", name, have, c.want)
		}
		change.ID.Protocol = UDP
		if have := change.Departures(); have != nil {
			t.Errorf("%s, UDP: %v", name, have)
		}
	}
}
