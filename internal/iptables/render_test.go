package iptables

import (
	"context"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// reference is the reference example: a node with three Services.
func reference() *plan.Plan {
	addr := netip.MustParseAddr
	ep := func(s string, onNode bool) plan.Endpoint {
		return plan.Endpoint{Addr: netip.MustParseAddrPort(s), Weight: 1, OnNode: onNode}
	}
	cluster := [3]plan.Route{toCluster, toClusterSNAT, toClusterSNAT}
	nodeAddrs := []netip.Addr{addr("10.244.0.0"), addr("10.244.0.1"), addr("172.16.65.181"), addr("172.17.0.1")}
	p := &plan.Plan{
		Services: map[plan.ID]*plan.ServicePort{}, Health: map[plan.HealthID]plan.HealthPort{},
		Node: &plan.Node{
			Name: "node", Addrs: nodeAddrs, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
			NodePorts: map[plan.Family]plan.NodePorts{plan.IPv4: {All: true, Addrs: nodeAddrs}},
			Local:     map[plan.Family]plan.LocalTraffic{plan.IPv4: {Kind: plan.LocalPrefix, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}},
		},
	}
	add := func(sp plan.ServicePort) { p.Services[sp.ID] = &sp }
	add(plan.ServicePort{
		ID:        plan.ID{Namespace: "default", Name: "kubernetes", Port: "https", Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: addr("10.96.0.1"), Port: 443, Route: cluster}},
		Pools:     [2][]plan.Endpoint{{ep("172.16.65.180:6443", false)}, nil},
		Affinity:  10800 * time.Second,
	})
	for _, port := range []string{"dns", "dns-tcp"} {
		proto := plan.UDP
		if port == "dns-tcp" {
			proto = plan.TCP
		}
		add(plan.ServicePort{
			ID:        plan.ID{Namespace: "kube-system", Name: "kube-dns", Port: port, Protocol: proto, Family: plan.IPv4},
			Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: addr("10.96.0.10"), Port: 53, Route: cluster}},
			Pools:     [2][]plan.Endpoint{{ep("10.244.0.2:53", true), ep("10.244.0.3:53", true)}, nil},
		})
	}
	add(plan.ServicePort{
		ID: plan.ID{Namespace: "default", Name: "httpd-svc", Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: addr("10.99.129.90"), Port: 8080, Route: cluster},
			{Kind: plan.NodePort, Port: 30001, Route: [3]plan.Route{toClusterSNAT, toClusterSNAT, toClusterSNAT}},
		},
		Pools: [2][]plan.Endpoint{{ep("10.244.0.4:80", true), ep("10.244.1.2:80", false), ep("10.244.2.2:80", false)}, nil},
	})
	return p
}

// The chains of the reference example have kube-proxy's names.
func TestReferenceNames(t *testing.T) {
	b, fakes := onFakes(t, sys.NFT, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: reference()})
	have := state(fakes)
	for _, want := range []string{
		"-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment \"default/kubernetes:https cluster IP\" -m tcp --dport 443 -j KUBE-SVC-NPX46M4PTMTKRN6Y\n",
		"-j KUBE-SVC-TCOU7JCQXEZGVUNU\n", "-j KUBE-SVC-ERIFXISQEP7F7OF4\n", "-j KUBE-SVC-IYRDZZKXS5EOQ6Q6\n",
		"-j KUBE-SEP-YIL6JZP7A3QYXJU2\n", "-j KUBE-SEP-FXPWU3QR6KR3AMXC\n", "-j KUBE-SEP-RXZQI7N2WC2D3KSY\n",
		"-A KUBE-SEP-YIL6JZP7A3QYXJU2 -p udp -m comment --comment \"kube-system/kube-dns:dns\" -j DNAT --to-destination 10.244.0.2:53\n",
		"--probability 0.33333333349 -j KUBE-SEP-RXZQI7N2WC2D3KSY\n", "--probability 0.50000000000 -j",
		"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n",
		"-m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-FXPWU3QR6KR3AMXC",
	} {
		if !strings.Contains(have, want) {
			t.Errorf("missing: %s", want)
		}
	}
	if t.Failed() {
		t.Log(have)
	}
}

// A few whole states as text, so that a change of the rules is seen in review.
func TestGolden(t *testing.T) {
	policies := twoServices()
	w := testWorld(plan.IPv4)
	local := clusterService(w, "local", 30, w.at("pod", 5), w.at("remote", 5))
	local.Pools[plan.Local] = local.Pools[plan.Cluster][:1]
	routes := [3]plan.Route{toCluster, toClusterSNAT, toLocal}
	local.Frontends = append(local.Frontends,
		plan.Frontend{Kind: plan.LoadBalancerIP, Addr: w.at("external", 20), Port: 80, Route: routes, Allow: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/25")}},
		plan.Frontend{Kind: plan.NodePort, Port: 31080, Route: routes})
	elsewhere := clusterService(w, "elsewhere", 31, w.at("remote", 6))
	elsewhere.Frontends = append(elsewhere.Frontends,
		plan.Frontend{Kind: plan.ExternalIP, Addr: w.at("external", 21), Port: 80, Route: [3]plan.Route{toCluster, toClusterSNAT, dropped}})
	none := clusterService(w, "none", 32)
	none.Frontends[0].Route = [3]plan.Route{rejected, rejected, rejected}
	none.Frontends = append(none.Frontends, plan.Frontend{Kind: plan.NodePort, Port: 31082, Route: none.Frontends[0].Route})
	for _, sp := range []*plan.ServicePort{local, elsewhere, none} {
		policies.Services[sp.ID] = sp
	}
	policies.Health[plan.HealthID{Service: local.ID.Service(), Family: plan.IPv4}] = plan.HealthPort{Port: 32100}

	large := twoServices()
	var many []netip.Addr
	for i := range 40 {
		many = append(many, w.at("remote", i+1))
		sp := clusterService(w, fmt.Sprintf("svc-%02d", i), 40+i, w.at("remote", 200))
		large.Services[sp.ID] = sp
	}
	sp := clusterService(w, "large", 3, many...)
	large.Services[sp.ID] = sp

	for name, p := range map[string]*plan.Plan{"reference": reference(), "policies": policies, "large": large, "compact": large} {
		t.Run(name, func(t *testing.T) {
			b, fakes := onFakes(t, sys.NFT, plan.IPv4)
			if name == "compact" {
				setMany(t, b, always)
			}
			mustApply(t, b, plan.Update{Plan: p})
			path := filepath.Join("testdata", name+".rules")
			have := fakes[plan.IPv4].String()
			if *update {
				if err := os.WriteFile(path, []byte(have), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if have != string(want) {
				t.Errorf("%s differs (-update rewrites it), %s", path, plantest.FirstDifference(have, string(want)))
			}
		})
	}
}

// the conditional probabilities multiply out to equal shares, or to weights.
func TestShares(t *testing.T) {
	for _, n := range []int{1, 2, 3, 16, 17, 100, 320, 5000} {
		for _, weighted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d endpoints, weighted %v", n, weighted), func(t *testing.T) {
				sp := &plan.ServicePort{
					ID:        plan.ID{Namespace: "a", Name: "b", Protocol: plan.TCP, Family: plan.IPv4},
					Frontends: []plan.Frontend{{Addr: netip.MustParseAddr("10.62.0.1"), Port: 80, Route: [3]plan.Route{toCluster, toCluster, toCluster}}},
				}
				total := 0.0
				want := map[string]float64{}
				for i := range n {
					e := plan.Endpoint{Weight: 1, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 61, byte(i >> 8), byte(i)}), 80)}
					if weighted {
						e.Weight = uint16(i % 5)
					}
					total += float64(e.Weight)
					sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], e)
					want[endpointChain(sp.ID, e.Addr)] += float64(e.Weight)
				}
				if total == 0 {
					return // nobody takes new flows: not this test's business
				}
				r := mustRenderer(t, twoServices().Node)
				have, longest := shares(t, r.service(sp), poolChain(sp.ID, plan.Cluster))
				for chain, w := range want {
					if share := w / total; math.Abs(have[chain]-share) > 0.0001*share {
						t.Errorf("%s gets %.9f, want %.9f", chain, have[chain], share)
					}
				}
				if limit := 32 + 16*int(math.Log2(float64(n))/4); longest > limit {
					t.Errorf("a packet walks up to %d rules, want at most %d", longest, limit)
				}
			})
		}
	}
}

func mustRenderer(t testing.TB, n *plan.Node) *renderer {
	t.Helper()
	r, err := newRenderer(settings{family: plan.IPv4, mark: 1 << 14, node: n})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// shares multiplies out the probabilities below a chain, and returns the longest walk.
func shares(t *testing.T, r *rule.Set, top string) (map[string]float64, int) {
	t.Helper()
	lines := map[string][]parsedRule{}
	for _, c := range r.Chains {
		for line := range strings.Lines(string(r.Text(c))) {
			_, text, _ := strings.Cut(strings.TrimSpace(line)[len("-A "):], " ")
			lines[c.Chain.String()] = append(lines[c.Chain.String()], parseRule(text))
		}
	}
	out, longest := map[string]float64{}, 0
	var down func(chain string, p float64, walked int)
	down = func(chain string, p float64, walked int) {
		for _, r := range lines[chain] {
			walked++
			longest = max(longest, walked)
			take := 1.0
			for _, o := range r.options {
				if o.name == "--probability" {
					take, _ = strconv.ParseFloat(o.value, 64)
				}
			}
			if strings.HasPrefix(r.target, prefixEndpoint) {
				out[r.target] += p * take
			} else {
				down(r.target, p*take, walked)
			}
			p *= 1 - take
		}
	}
	down(top, 1, 0)
	return out, longest
}

// One endpoint more touches the chains on its path only.
func TestOneEndpointMoreTouchesItsPath(t *testing.T) {
	r := mustRenderer(t, twoServices().Node)
	texts := func(n int) map[rule.Chain]string {
		sp := clusterService(testWorld(plan.IPv4), "big", 1)
		for i := range n {
			sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Weight: 1, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 61, byte(i >> 8), byte(i)}), 80)})
		}
		out := map[rule.Chain]string{}
		rendered := r.service(sp)
		for _, c := range rendered.Chains {
			out[c.Chain] = string(rendered.Text(c))
		}
		return out
	}
	a, b := texts(3000), texts(3001)
	changed := 0
	for c, text := range b {
		if a[c] != text {
			changed++
		}
	}
	if changed > 1+1+rule.ChoiceLevels+16 {
		t.Errorf("one endpoint more changes %d of %d chains", changed, len(b))
	}
}

// dispatchOf renders a dispatch of n ClusterIPs.
func dispatchOf(t testing.TB, addrs []netip.Addr) (*plan.Plan, *sys.Fake) {
	t.Helper()
	p := twoServices()
	clear(p.Services)
	for i, a := range addrs {
		sp := clusterService(testWorld(plan.IPv4), fmt.Sprintf("svc-%d", i), 1, netip.MustParseAddr("10.61.2.2"))
		sp.Frontends[0].Addr = a
		p.Services[sp.ID] = sp
	}
	b, fakes := onFakes(t, sys.Legacy, plan.IPv4)
	mustApply(t, b, plan.Update{Plan: p})
	return p, fakes[plan.IPv4]
}

// A packet meets at most 2*sqrt(N) rules among N addresses, and far fewer at many;
// whatever the addresses are.
func TestDispatchIsNotLinear(t *testing.T) {
	for _, n := range []int{40, 100, 400, 2000, 5000} {
		for _, layout := range []string{"in a row", "scattered"} {
			t.Run(fmt.Sprintf("%d addresses %s", n, layout), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(uint64(n), 1))
				seen := map[netip.Addr]bool{}
				var addrs []netip.Addr
				for i := 0; len(addrs) < n; i++ {
					a := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
					if layout == "scattered" {
						a = netip.AddrFrom4([4]byte{10, byte(96 + rng.IntN(16)), byte(rng.IntN(256)), byte(rng.IntN(256))})
					}
					if !seen[a] {
						seen[a] = true
						addrs = append(addrs, a)
					}
				}
				p, f := dispatchOf(t, addrs)
				w := newWalker(t, p.Node, f)
				for _, a := range addrs {
					pkt := walked{Packet: plan.Packet{Proto: plan.TCP, Src: testWorld(plan.IPv4).at("pod", 250), Dst: netip.AddrPortFrom(a, 80), In: "cni0"}, chance: 1}
					pkt.orig = pkt.Dst
					w.chain(sys.NAT, "PREROUTING", pkt)
				}
				const inService = 6 // jump, masquerading, choice, endpoint
				limit := max(2*int(math.Sqrt(float64(n))), rule.RootRules+2*rule.LeafRules) + inService
				if n >= 2000 {
					limit = 64 + inService
				}
				if w.most > limit {
					t.Errorf("up to %d rules, want at most %d", w.most, limit)
				}
			})
		}
	}
}

// The dispatch depends on the set of addresses only, and one more touches its path.
func TestDispatchIsCanonical(t *testing.T) {
	var addrs []netip.Addr
	for i := range 600 {
		addrs = append(addrs, netip.AddrFrom4([4]byte{10, 96 + byte(i%16), byte(i * 7), byte(i * 13)}))
	}
	_, a := dispatchOf(t, addrs)
	_, b := dispatchOf(t, append(addrs, netip.MustParseAddr("10.100.50.60")))
	changed := 0
	lines := map[string]int{}
	for line := range strings.Lines(a.String()) {
		lines[line]++
	}
	chains := map[string]bool{}
	for line := range strings.Lines(b.String()) {
		if lines[line] == 0 && strings.HasPrefix(line, "-A ") {
			if chain := strings.Fields(line)[1]; strings.HasPrefix(chain, prefixAddr) && !chains[chain] {
				chains[chain] = true
				changed++
			}
		}
	}
	if changed > 8 {
		t.Errorf("one address more changes %d chains of the dispatch: %v", changed, chains)
	}
}

func TestBadInterfaceIsAnError(t *testing.T) {
	n := *twoServices().Node
	n.Local = map[plan.Family]plan.LocalTraffic{plan.IPv4: {Kind: plan.LocalInterface, Name: "a b"}}
	p := twoServices()
	p.Node = &n
	b, _ := onFakes(t, sys.Legacy, plan.IPv4)
	if err := b.Apply(context.Background(), plan.Update{Plan: p}); err == nil || !strings.Contains(err.Error(), `"a b"`) {
		t.Errorf("Apply: %v, want an error that names the interface", err)
	}
}
