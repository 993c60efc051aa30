package plan

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
)

// The JSON form of a plan says the same as the text form, by name: lists are
// sorted, enumerations are the words that their String methods give.
type (
	jsonPlan struct {
		Node         *jsonNode      `json:"node,omitempty"`
		Services     []*ServicePort `json:"services"`
		HealthChecks []jsonHealth   `json:"healthChecks"`
	}
	jsonNode struct {
		Name         string                 `json:"name"`
		Addresses    []netip.Addr           `json:"addresses"`
		NodePorts    map[string]jsonPorts   `json:"nodePorts"` // by family
		Pods         map[string]jsonTraffic `json:"pods"`      // by family
		ServiceCIDRs []netip.Prefix         `json:"serviceCIDRs"`
	}
	jsonPorts struct {
		All       bool         `json:"all"`
		Addresses []netip.Addr `json:"addresses"`
		Loopback  bool         `json:"loopback"`
	}
	jsonTraffic struct {
		Prefixes        []netip.Prefix `json:"prefixes,omitempty"`
		Interface       string         `json:"interface,omitempty"`
		InterfacePrefix string         `json:"interfacePrefix,omitempty"`
	}
	jsonHealth struct {
		Namespace      string `json:"namespace"`
		Name           string `json:"name"`
		Family         string `json:"family"`
		Port           uint16 `json:"port"`
		LocalEndpoints int    `json:"localEndpoints"`
	}
	jsonService struct {
		Namespace       string                    `json:"namespace"`
		Name            string                    `json:"name"`
		Port            string                    `json:"port"`
		Protocol        string                    `json:"protocol"`
		Family          string                    `json:"family"`
		AffinitySeconds float64                   `json:"affinitySeconds,omitempty"`
		Policy          *jsonPolicy               `json:"policy,omitempty"`
		Frontends       []jsonFrontend            `json:"frontends"`
		Endpoints       map[string][]jsonEndpoint `json:"endpoints"` // by pool
		Serving         []netip.AddrPort          `json:"serving,omitempty"`
		Draining        []netip.AddrPort          `json:"draining,omitempty"`
	}
	jsonPolicy struct {
		Scheduler              string     `json:"scheduler,omitempty"`
		SourcePort             bool       `json:"sourcePort,omitempty"`
		Fallback               bool       `json:"fallback,omitempty"`
		DrainTimeoutSeconds    float64    `json:"drainTimeoutSeconds,omitempty"`
		VanishedTimeoutSeconds float64    `json:"vanishedEndpointTimeoutSeconds,omitempty"`
		ClientAddress          string     `json:"clientAddress,omitempty"`
		ProxyProtocol          uint8      `json:"proxyProtocol,omitempty"`
		HealthCheck            *jsonCheck `json:"healthCheck,omitempty"`
	}
	jsonCheck struct {
		Method          string  `json:"method"`
		Path            string  `json:"path,omitempty"`
		Code            uint16  `json:"code,omitempty"`
		Port            uint16  `json:"port,omitempty"`
		IntervalSeconds float64 `json:"intervalSeconds"`
		TimeoutSeconds  float64 `json:"timeoutSeconds"`
		Rise            uint8   `json:"rise"`
		Fall            uint8   `json:"fall"`
	}
	jsonFrontend struct {
		Kind    string               `json:"kind"`
		Address *netip.Addr          `json:"address,omitempty"`
		Port    uint16               `json:"port"`
		Allow   *[]netip.Prefix      `json:"allow,omitempty"`
		Routes  map[string]jsonRoute `json:"routes"` // by origin
	}
	jsonRoute struct {
		Verdict string `json:"verdict"`
		Pool    string `json:"pool,omitempty"`
		SNAT    bool   `json:"snat,omitempty"`
	}
	jsonEndpoint struct {
		Addr      netip.AddrPort `json:"address"`
		OnNode    bool           `json:"onNode"`
		Elsewhere bool           `json:"elsewhere"`
		Weight    uint16         `json:"weight"`
	}
)

// MarshalJSON gives the JSON form, for programs that read a plan.
func (p *Plan) MarshalJSON() ([]byte, error) {
	out := jsonPlan{Services: []*ServicePort{}, HealthChecks: []jsonHealth{}}
	if p.Node != nil {
		out.Node = jsonOfNode(p.Node)
	}
	for _, id := range slices.SortedFunc(maps.Keys(p.Services), ID.Compare) {
		out.Services = append(out.Services, p.Services[id])
	}
	for _, id := range slices.SortedFunc(maps.Keys(p.Health), HealthID.Compare) {
		h := p.Health[id]
		out.HealthChecks = append(out.HealthChecks, jsonHealth{id.Service.Namespace, id.Service.Name, id.Family.String(), h.Port, h.Local})
	}
	return json.Marshal(out)
}

func jsonOfNode(n *Node) *jsonNode {
	out := &jsonNode{
		Name: n.Name, Addresses: orEmpty(n.Addrs), ServiceCIDRs: orEmpty(n.ServiceCIDRs),
		NodePorts: map[string]jsonPorts{}, Pods: map[string]jsonTraffic{},
	}
	for f, np := range n.NodePorts {
		out.NodePorts[f.String()] = jsonPorts{np.All, orEmpty(np.Addrs), np.Loopback}
	}
	for f, l := range n.Local {
		t := jsonTraffic{Prefixes: l.Prefixes}
		switch l.Kind {
		case LocalInterface:
			t.Interface = l.Name
		case LocalInterfacePrefix:
			t.InterfacePrefix = l.Name
		}
		out.Pods[f.String()] = t
	}
	return out
}

// MarshalJSON gives the JSON form of one ServicePort.
func (s *ServicePort) MarshalJSON() ([]byte, error) {
	out := jsonService{
		Namespace: s.ID.Namespace, Name: s.ID.Name, Port: s.ID.Port,
		Protocol: s.ID.Protocol.String(), Family: s.ID.Family.String(),
		AffinitySeconds: s.Affinity.Seconds(), Policy: jsonOfPolicy(s.Policy),
		Frontends: []jsonFrontend{}, Endpoints: map[string][]jsonEndpoint{}, Serving: s.Serving, Draining: s.Draining,
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		j := jsonFrontend{Kind: f.Kind.String(), Port: f.Port, Routes: map[string]jsonRoute{}}
		if f.Addr.IsValid() {
			j.Address = &f.Addr
		}
		if f.Allow != nil {
			j.Allow = &f.Allow
		}
		for _, o := range Origins {
			r := jsonRoute{Verdict: f.Route[o].Verdict.String()}
			if f.Route[o].Verdict == Forward {
				r.Pool, r.SNAT = f.Route[o].Pool.String(), f.Route[o].SNAT
			}
			j.Routes[o.String()] = r
		}
		out.Frontends = append(out.Frontends, j)
	}
	for _, p := range [...]Pool{Cluster, Local} {
		for _, e := range s.Pools[p] {
			out.Endpoints[p.String()] = append(out.Endpoints[p.String()], jsonEndpoint(e))
		}
	}
	return json.Marshal(out)
}

// jsonOfPolicy returns nil for the zero Policy.
func jsonOfPolicy(p *Policy) *jsonPolicy {
	if p == nil || *p == (Policy{}) {
		return nil
	}
	out := &jsonPolicy{
		Scheduler: p.Scheduler, SourcePort: p.SourcePort, Fallback: p.Fallback,
		DrainTimeoutSeconds: p.DrainTimeout.Seconds(), VanishedTimeoutSeconds: p.VanishedTimeout.Seconds(),
		ProxyProtocol: p.ProxyProtocol,
	}
	if p.ClientAddress != ClientAddressByRoute {
		out.ClientAddress = p.ClientAddress.String()
	}
	if c := p.Check; c.Method != NoCheck {
		out.HealthCheck = &jsonCheck{
			c.Method.String(), c.Path, c.Code, c.Port, c.Interval.Seconds(), c.Timeout.Seconds(), c.Rise, c.Fall,
		}
	}
	return out
}

func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}
