package plan

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func addr(s string) netip.Addr         { return netip.MustParseAddr(s) }
func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
func prefix(s string) netip.Prefix     { return netip.MustParsePrefix(s) }

func everybody(r Route) [3]Route { return [3]Route{r, r, r} }

// example is a plan with one of everything.
func example() *Plan {
	toCluster := [3]Route{FromPod: {Pool: Cluster}, FromNode: {Pool: Cluster, SNAT: true}, FromOutside: {Pool: Cluster, SNAT: true}}
	toLocal := [3]Route{FromPod: {Pool: Cluster}, FromNode: {Pool: Cluster, SNAT: true}, FromOutside: {Pool: Local}}
	web := &ServicePort{
		ID:       ID{"default", "web", "http", TCP, IPv4},
		Affinity: 3 * time.Hour,
		Frontends: []Frontend{
			{Kind: ClusterIP, Addr: addr("10.62.0.20"), Port: 80, Route: toCluster},
			{Kind: LoadBalancerIP, Addr: addr("203.0.113.5"), Port: 80, Allow: []netip.Prefix{prefix("198.51.100.0/25")}, Route: toLocal},
			{Kind: NodePort, Port: 31080, Route: toLocal},
		},
		Pools: [2][]Endpoint{
			{{addrPort("10.61.1.5:8080"), true, false, 1}, {addrPort("10.61.2.7:8080"), false, true, 3}, {addrPort("10.61.2.8:8080"), false, false, 0}},
			{{addrPort("10.61.1.5:8080"), true, false, 1}},
		},
	}
	dns := &ServicePort{
		ID: ID{"kube-system", "dns", "", UDP, IPv6},
		Frontends: []Frontend{
			{Kind: ClusterIP, Addr: addr("2001:db8:62::10"), Port: 53, Route: everybody(Route{Verdict: Reject})},
			{Kind: ExternalIP, Addr: addr("2001:db8:113::10"), Port: 53, Allow: []netip.Prefix{}, Route: everybody(Route{Verdict: Drop})},
		},
		Serving: []netip.AddrPort{addrPort("[2001:db8:61:1::2]:53")},
	}
	return &Plan{
		Services: map[ID]*ServicePort{web.ID: web, dns.ID: dns},
		Health:   map[HealthID]HealthPort{{Name{"default", "web"}, IPv4}: {32100, 1}},
		Node: &Node{
			Name:  "alder",
			Addrs: []netip.Addr{addr("127.0.0.1"), addr("192.0.2.11")},
			NodePorts: map[Family]NodePorts{
				IPv4: {All: true, Addrs: []netip.Addr{addr("192.0.2.11")}, Loopback: true},
				IPv6: {},
			},
			Local: map[Family]LocalTraffic{
				IPv4: {Kind: LocalPrefix, Prefixes: []netip.Prefix{prefix("10.61.0.0/16")}},
				IPv6: {Kind: LocalInterfacePrefix, Name: "veth"},
			},
			ServiceCIDRs: []netip.Prefix{prefix("10.62.0.0/16"), prefix("2001:db8:62::/112")},
		},
	}
}

const exampleText = `node alder
  address 127.0.0.1
  address 192.0.2.11
  node-ports IPv4 all loopback
  node-port-address 192.0.2.11
  node-ports IPv6 selected
  pods IPv4 from 10.61.0.0/16
  pods IPv6 in veth*
  service-cidr 10.62.0.0/16
  service-cidr 2001:db8:62::/112
service default/web:http TCP IPv4 affinity=3h0m0s
  ClusterIP 10.62.0.20:80 pod=cluster node=cluster+snat outside=cluster+snat
  LoadBalancerIP 203.0.113.5:80 pod=cluster node=cluster+snat outside=local
    allow 198.51.100.0/25
  NodePort *:31080 pod=cluster node=cluster+snat outside=local
  endpoint 10.61.1.5:8080 cluster local here
  endpoint 10.61.2.7:8080 cluster elsewhere weight=3
  endpoint 10.61.2.8:8080 cluster weight=0
service kube-system/dns UDP IPv6
  ClusterIP [2001:db8:62::10]:53 pod=reject node=reject outside=reject
  ExternalIP [2001:db8:113::10]:53 pod=drop node=drop outside=drop
    allow nobody
  endpoint [2001:db8:61:1::2]:53 serving
health-check default/web IPv4 port=32100 local=1
`

func TestText(t *testing.T) {
	if have := example().String(); have != exampleText {
		t.Errorf("have\n%s\nwant\n%s", have, exampleText)
	}
}

// full is a writer without room.
type full struct{}

var errFull = errors.New("no room")

func (full) Write([]byte) (int, error) { return 0, errFull }

func TestWriteError(t *testing.T) {
	if err := Write(full{}, example()); !errors.Is(err, errFull) {
		t.Errorf("have %v, want %v", err, errFull)
	}
}

const exampleJSON = `{
  "node": {
    "name": "alder",
    "addresses": ["127.0.0.1", "192.0.2.11"],
    "nodePorts": {
      "IPv4": {"all": true, "addresses": ["192.0.2.11"], "loopback": true},
      "IPv6": {"all": false, "addresses": [], "loopback": false}
    },
    "pods": {"IPv4": {"prefixes": ["10.61.0.0/16"]}, "IPv6": {"interfacePrefix": "veth"}},
    "serviceCIDRs": ["10.62.0.0/16", "2001:db8:62::/112"]
  },
  "services": [
    {
      "namespace": "default", "name": "web", "port": "http", "protocol": "TCP", "family": "IPv4", "affinitySeconds": 10800,
      "frontends": [
        {"kind": "ClusterIP", "address": "10.62.0.20", "port": 80, "routes": {
          "pod": {"verdict": "forward", "pool": "cluster"},
          "node": {"verdict": "forward", "pool": "cluster", "snat": true},
          "outside": {"verdict": "forward", "pool": "cluster", "snat": true}}},
        {"kind": "LoadBalancerIP", "address": "203.0.113.5", "port": 80, "allow": ["198.51.100.0/25"], "routes": {
          "pod": {"verdict": "forward", "pool": "cluster"},
          "node": {"verdict": "forward", "pool": "cluster", "snat": true},
          "outside": {"verdict": "forward", "pool": "local"}}},
        {"kind": "NodePort", "port": 31080, "routes": {
          "pod": {"verdict": "forward", "pool": "cluster"},
          "node": {"verdict": "forward", "pool": "cluster", "snat": true},
          "outside": {"verdict": "forward", "pool": "local"}}}
      ],
      "endpoints": {
        "cluster": [
          {"address": "10.61.1.5:8080", "onNode": true, "elsewhere": false, "weight": 1},
          {"address": "10.61.2.7:8080", "onNode": false, "elsewhere": true, "weight": 3},
          {"address": "10.61.2.8:8080", "onNode": false, "elsewhere": false, "weight": 0}],
        "local": [{"address": "10.61.1.5:8080", "onNode": true, "elsewhere": false, "weight": 1}]
      }
    },
    {
      "namespace": "kube-system", "name": "dns", "port": "", "protocol": "UDP", "family": "IPv6",
      "frontends": [
        {"kind": "ClusterIP", "address": "2001:db8:62::10", "port": 53, "routes": {
          "pod": {"verdict": "reject"}, "node": {"verdict": "reject"}, "outside": {"verdict": "reject"}}},
        {"kind": "ExternalIP", "address": "2001:db8:113::10", "port": 53, "allow": [], "routes": {
          "pod": {"verdict": "drop"}, "node": {"verdict": "drop"}, "outside": {"verdict": "drop"}}}
      ],
      "endpoints": {},
      "serving": ["[2001:db8:61:1::2]:53"]
    }
  ],
  "healthChecks": [{"namespace": "default", "name": "web", "family": "IPv4", "port": 32100, "localEndpoints": 1}]
}`

func TestJSON(t *testing.T) {
	have, err := json.MarshalIndent(example(), "", " ")
	if err != nil {
		t.Fatal(err)
	}
	var v any
	if err := json.Unmarshal([]byte(exampleJSON), &v); err != nil {
		t.Fatal(err)
	}
	var h any
	if err := json.Unmarshal(have, &h); err != nil {
		t.Fatal(err)
	}
	want, _ := json.MarshalIndent(v, "", " ")
	same, _ := json.MarshalIndent(h, "", " ")
	if string(same) != string(want) {
		t.Errorf("have\n%s\nwant\n%s", same, want)
	}
	empty, err := json.Marshal(&Plan{})
	if want := `{"services":[],"healthChecks":[]}`; err != nil || string(empty) != want {
		t.Errorf("an empty plan is %s (%v), want %s", empty, err, want)
	}
}

func TestEval(t *testing.T) {
	p := example()
	const pod, podIf = "10.61.1.250", "veth1"
	tests := []struct {
		name    string
		src, in string
		proto   Protocol
		dst     string
		origin  Origin
		want    string
	}{
		{"pod to a ClusterIP, one endpoint of weight 0", pod, podIf, TCP, "10.62.0.20:80", FromPod, "forwarded 10.61.1.5:8080 10.61.2.7:8080"},
		{"node", "192.0.2.11", "", TCP, "10.62.0.20:80", FromNode, "forwarded 10.61.1.5:8080+snat 10.61.2.7:8080+snat"},
		{"a node's process with a pod address is of the node", pod, "", TCP, "10.62.0.20:80", FromNode, "forwarded 10.61.1.5:8080+snat 10.61.2.7:8080+snat"},
		{"outside", "198.51.100.7", "eth0", TCP, "10.62.0.20:80", FromOutside, "forwarded 10.61.1.5:8080+snat 10.61.2.7:8080+snat"},
		{"endpoint to itself", "10.61.1.5", "veth5", TCP, "10.62.0.20:80", FromPod, "forwarded 10.61.1.5:8080+snat 10.61.2.7:8080"},
		{"undefined port", pod, podIf, TCP, "10.62.0.20:81", FromPod, "refused"},
		{"another protocol", pod, podIf, UDP, "10.62.0.20:80", FromPod, "refused"},
		{"nobody's Service address", pod, podIf, TCP, "10.62.7.7:80", FromPod, "dropped"},
		{"allowed source", "198.51.100.7", "eth0", TCP, "203.0.113.5:80", FromOutside, "forwarded 10.61.1.5:8080"},
		{"source not allowed", "198.51.100.200", "eth0", TCP, "203.0.113.5:80", FromOutside, "dropped"},
		{"pod, not allowed", pod, podIf, TCP, "203.0.113.5:80", FromPod, "dropped"},
		{"another port of an external address", pod, podIf, TCP, "203.0.113.5:81", FromPod, "pass"},
		{"node port", "198.51.100.7", "eth0", TCP, "192.0.2.11:31080", FromOutside, "forwarded 10.61.1.5:8080"},
		{"node port of another protocol", "198.51.100.7", "eth0", UDP, "192.0.2.11:31080", FromOutside, "pass"},
		{"node port on a ClusterIP", "198.51.100.7", "eth0", TCP, "10.62.0.20:31080", FromOutside, "refused"},
		{"node port on an external address", "198.51.100.7", "eth0", TCP, "203.0.113.5:31080", FromOutside, "pass"},
		{"node port on loopback", "127.0.0.1", "", TCP, "127.0.0.1:31080", FromNode, "forwarded 10.61.1.5:8080+snat 10.61.2.7:8080+snat"},
		{"node port on other loopback addresses", "127.0.0.1", "", TCP, "127.0.0.2:31080", FromNode, "pass"},
		{"loopback from outside", "198.51.100.7", "eth0", TCP, "127.0.0.1:31080", FromOutside, "pass"},
		{"without endpoints", "2001:db8:61:1::250", "veth1", UDP, "[2001:db8:62::10]:53", FromPod, "refused"},
		{"by interface only", "2001:db8:61:1::250", "eth0", UDP, "[2001:db8:62::10]:53", FromOutside, "refused"},
		{"nobody is allowed", "2001:db8:61:1::250", "veth1", UDP, "[2001:db8:113::10]:53", FromPod, "dropped"},
		{"elsewhere", pod, podIf, TCP, "192.0.2.99:80", FromPod, "pass"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := Eval(p, Packet{Proto: test.proto, Src: addr(test.src), Dst: addrPort(test.dst), In: test.in})
			if r.String() != test.want || r.Origin != test.origin {
				t.Errorf("have %s from %s, want %s from %s", r, r.Origin, test.want, test.origin)
			}
		})
	}

	r := Eval(p, Packet{Proto: TCP, Src: addr(pod), Dst: addrPort("10.62.0.20:80"), In: podIf})
	if r.Affinity != 3*time.Hour || r.Service.Name != "web" || r.Frontend.Kind != ClusterIP {
		t.Errorf("have affinity %v, %v, %v", r.Affinity, r.Service, r.Frontend.Kind)
	}
	if r.Endpoints[0].Share != 0.25 || r.Endpoints[1].Share != 0.75 {
		t.Errorf("shares %v, want 1/4 and 3/4", r.Endpoints)
	}
	web := p.Services[ID{"default", "web", "http", TCP, IPv4}]
	for i := range web.Pools[Cluster] {
		web.Pools[Cluster][i].Weight = 0
	}
	if r := Eval(p, Packet{Proto: TCP, Src: addr(pod), Dst: addrPort("10.62.0.20:80"), In: podIf}); r.Outcome != Refused {
		t.Errorf("nobody takes new flows: have %s", r)
	}
	p.Node.Local[IPv4] = LocalTraffic{Kind: LocalInterface, Name: "cni0"}
	for in, want := range map[string]Origin{"cni0": FromPod, "cni01": FromOutside, "": FromNode} {
		if have := p.Node.Origin(Packet{Src: addr(pod), Dst: addrPort("10.62.0.20:80"), In: in}); have != want {
			t.Errorf("in %q: from %s, want %s", in, have, want)
		}
	}
	p.Node.Local[IPv4] = LocalTraffic{}
	if have := p.Node.Origin(Packet{Src: addr(pod), Dst: addrPort("10.62.0.20:80"), In: "cni0"}); have != FromOutside {
		t.Errorf("pods unknown: from %s", have)
	}
}

// TestEqual changes one thing at a time.
func TestEqual(t *testing.T) {
	if a, b := example(), example(); !a.Equal(b) {
		t.Fatal("two examples differ")
	}
	web, dns := ID{"default", "web", "http", TCP, IPv4}, ID{"kube-system", "dns", "", UDP, IPv6}
	changes := map[string]func(*Plan){
		"service gone":   func(p *Plan) { delete(p.Services, dns) },
		"affinity":       func(p *Plan) { p.Services[web].Affinity++ },
		"frontend port":  func(p *Plan) { p.Services[web].Frontends[0].Port++ },
		"frontend kind":  func(p *Plan) { p.Services[web].Frontends[0].Kind = ExternalIP },
		"frontend gone":  func(p *Plan) { p.Services[web].Frontends = p.Services[web].Frontends[1:] },
		"route":          func(p *Plan) { p.Services[web].Frontends[0].Route[FromNode].SNAT = false },
		"allow":          func(p *Plan) { p.Services[web].Frontends[1].Allow[0] = prefix("198.51.100.0/24") },
		"allow nobody":   func(p *Plan) { p.Services[web].Frontends[0].Allow = []netip.Prefix{} },
		"endpoint":       func(p *Plan) { p.Services[web].Pools[Local][0].Addr = addrPort("10.61.1.5:8081") },
		"weight":         func(p *Plan) { p.Services[web].Pools[Cluster][0].Weight = 2 },
		"serving":        func(p *Plan) { p.Services[dns].Serving = nil },
		"draining":       func(p *Plan) { p.Services[web].Draining = []netip.AddrPort{addrPort("10.61.1.9:8080")} },
		"id":             func(p *Plan) { p.Services[dns].ID.Port = "x" },
		"health":         func(p *Plan) { p.Health[HealthID{Name{"default", "web"}, IPv4}] = HealthPort{32100, 2} },
		"node":           func(p *Plan) { p.Node = nil },
		"node name":      func(p *Plan) { p.Node.Name = "birch" },
		"node address":   func(p *Plan) { p.Node.Addrs[0] = addr("192.0.2.10") },
		"service cidr":   func(p *Plan) { p.Node.ServiceCIDRs = nil },
		"node ports":     func(p *Plan) { p.Node.NodePorts[IPv6] = NodePorts{Loopback: true} },
		"node ports all": func(p *Plan) { p.Node.NodePorts[IPv6] = NodePorts{All: true} },
		"node port addr": func(p *Plan) { p.Node.NodePorts[IPv6] = NodePorts{Addrs: []netip.Addr{addr("::2")}} },
		"local":          func(p *Plan) { p.Node.Local[IPv6] = LocalTraffic{Kind: LocalInterface, Name: "veth"} },
		"local family":   func(p *Plan) { delete(p.Node.Local, IPv6) },
	}
	for name, change := range changes {
		p := example()
		change(p)
		if p.Equal(example()) || example().Equal(p) {
			t.Errorf("%s: still equal", name)
		}
	}
	var none *ServicePort
	if none.Equal(example().Services[web]) || example().Services[web].Equal(none) || !none.Equal(nil) {
		t.Error("nil equals nil only")
	}
}

// TestMerge: two updates in one say the same as one after the other, so that a
// change is not lost with the Apply that failed.
func TestMerge(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 500 {
		before := map[ID]*ServicePort{}
		id := func() ID { return ID{Name: string(rune('a' + r.IntN(5)))} }
		for range 3 {
			before[id()] = &ServicePort{}
		}
		now := map[ID]*ServicePort{}
		for k, v := range before {
			now[k] = v
		}
		step := func() Update {
			u := Update{Plan: &Plan{}, Node: r.IntN(2) == 0, Health: []HealthID{{Family: Family(r.IntN(3))}}}
			seen := map[ID]bool{}
			for range r.IntN(5) {
				k := id()
				if seen[k] {
					continue
				}
				seen[k] = true
				c := Change{ID: k, Old: now[k]}
				switch r.IntN(3) {
				case 0:
					c.New = &ServicePort{}
				case 1:
					c.New = before[k] // back where it was
				}
				if c.Old == c.New {
					continue
				}
				u.Changed = append(u.Changed, c)
				if now[k] = c.New; c.New == nil {
					delete(now, k)
				}
			}
			return u
		}
		a, b, c := step(), step(), step()
		node := a.Node || b.Node || c.Node
		a.Merge(b)
		a.Merge(c)
		if a.Plan != c.Plan || a.Node != node {
			t.Fatal("the merged update is not about the later plan")
		}
		have := map[ID]*ServicePort{}
		for k, v := range before {
			have[k] = v
		}
		seen := map[ID]bool{}
		for _, c := range a.Changed {
			if seen[c.ID] || have[c.ID] != c.Old || c.Old == c.New {
				t.Fatalf("change %+v: Old is %p", c, have[c.ID])
			}
			seen[c.ID] = true
			if have[c.ID] = c.New; c.New == nil {
				delete(have, c.ID)
			}
		}
		if len(have) != len(now) {
			t.Fatalf("%d ports after the merged update, want %d", len(have), len(now))
		}
		for k, v := range now {
			if have[k] != v {
				t.Fatalf("%v differs after the merged update", k)
			}
		}
	}
}

func TestEmpty(t *testing.T) {
	for name, u := range map[string]Update{
		"change": {Changed: []Change{{}}}, "node": {Node: true}, "health": {Health: []HealthID{{}}}, "note": {Notes: []Note{{}}},
	} {
		if u.Empty() {
			t.Errorf("an update with a %s counts as empty", name)
		}
	}
	if u := (Update{Plan: example(), Triggers: []time.Time{{}}}); !u.Empty() {
		t.Error("an update without a change does not count as empty")
	}
}

func TestNames(t *testing.T) {
	id := ID{"ns", "web", "http", SCTP, IPv6}
	have := strings.Join([]string{
		id.String(), ID{Namespace: "ns", Name: "web"}.String(), id.Service().String(), id.Protocol.String(), id.Family.String(),
		Protocol(4).String(), Family(5).String(), FamilyOf(addr("::ffff:1.2.3.4")).String(),
	}, " ")
	if want := "ns/web:http ns/web ns/web SCTP IPv6 Protocol(4) Family(5) IPv6"; have != want {
		t.Errorf("have %s, want %s", have, want)
	}
}
