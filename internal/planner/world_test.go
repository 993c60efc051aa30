package planner_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

// settings is the YAML form of options and of what the host looks like.
type settings struct {
	Node               string   `json:"node"`
	NodeOptional       bool     `json:"nodeOptional"`
	BindAddress        string   `json:"bindAddress"`
	Families           []string `json:"families"`
	MasqueradeAll      bool     `json:"masqueradeAll"`
	DetectLocalMode    string   `json:"detectLocalMode"`
	ClusterCIDR        []string `json:"clusterCIDR"`
	Interface          string   `json:"interface"`
	NodePortAddresses  []string `json:"nodePortAddresses"`
	LocalhostNodePorts bool     `json:"localhostNodePorts"`
	ServiceProxyName   string   `json:"serviceProxyName"`
	AllowExternalIPs   bool     `json:"allowExternalIPs"`
	HealthCheck        string   `json:"healthCheck"`
	GuardCluster       bool     `json:"guardCluster"`
	GuardRefuse        []string `json:"guardRefuse"`
	GuardAllow         []string `json:"guardAllow"`
	Host               []string `json:"host"`
}

// defaultSettings are those of node alder in iptables mode.
func defaultSettings() settings {
	return settings{
		Node:               "alder",
		Families:           []string{"IPv4", "IPv6"},
		ClusterCIDR:        []string{"10.61.0.0/16", "2001:db8:61::/48"},
		LocalhostNodePorts: true,
		AllowExternalIPs:   true,
		Host:               []string{"127.0.0.1", "::1", "192.0.2.11", "2001:db8:1::11", "fe80::11"},
	}
}

func (s *settings) options(tb testing.TB) planner.Options {
	tb.Helper()
	o := planner.Options{
		NodeName: s.Node, NodeOptional: s.NodeOptional, MasqueradeAll: s.MasqueradeAll,
		LocalhostNodePorts: s.LocalhostNodePorts, ServiceProxyName: s.ServiceProxyName, AllowExternalIPs: s.AllowExternalIPs,
		Local: planner.LocalDetector{Name: s.Interface},
	}
	if s.HealthCheck != "" {
		var err error
		if o.DefaultCheck, err = plan.ParseHealthCheck(s.HealthCheck); err != nil {
			tb.Fatal(err)
		}
	}
	o.Guard.ClusterRanges = s.GuardCluster
	for _, c := range s.GuardRefuse {
		o.Guard.Refuse = append(o.Guard.Refuse, netip.MustParsePrefix(c))
	}
	for _, c := range s.GuardAllow {
		o.Guard.Allow = append(o.Guard.Allow, netip.MustParsePrefix(c))
	}
	if s.BindAddress != "" {
		o.NodeIP = netip.MustParseAddr(s.BindAddress)
	}
	for _, f := range s.Families {
		o.Families = append(o.Families, map[string]plan.Family{"IPv4": plan.IPv4, "IPv6": plan.IPv6}[f])
	}
	kinds := map[string]planner.DetectorKind{"": planner.ClusterCIDR}
	for _, k := range []planner.DetectorKind{planner.ClusterCIDR, planner.NodeCIDR, planner.BridgeInterface, planner.InterfaceNamePrefix} {
		kinds[k.String()] = k
	}
	kind, ok := kinds[s.DetectLocalMode]
	if !ok {
		tb.Fatalf("detectLocalMode %q", s.DetectLocalMode)
	}
	o.Local.Kind = kind
	for _, c := range s.ClusterCIDR {
		o.Local.CIDRs = append(o.Local.CIDRs, netip.MustParsePrefix(c))
	}
	for _, a := range s.NodePortAddresses {
		switch a {
		case "primary":
			o.NodePorts.Primary = true
		case "localhost":
			o.NodePorts.Localhost = true
		case "all":
			o.NodePorts.All = true
		default:
			o.NodePorts.CIDRs = append(o.NodePorts.CIDRs, netip.MustParsePrefix(a))
		}
	}
	return o
}

// world is a planner with its facts and a receiver of its updates, who keeps no
// more than the updates say.
type world struct {
	tb       testing.TB
	state    *cluster.State
	sink     cluster.Sink
	settings settings
	planner  *planner.Planner

	services map[plan.ID]*plan.ServicePort
	health   map[plan.HealthID]plan.HealthPort
	node     *plan.Node
	noted    []plan.Note // all notes that updates carried
}

func newWorld(tb testing.TB, s settings) *world {
	tb.Helper()
	w := &world{
		tb: tb, settings: s, state: cluster.NewState(time.Now),
		services: map[plan.ID]*plan.ServicePort{}, health: map[plan.HealthID]plan.HealthPort{},
	}
	w.sink = w.state.Sink("test", cluster.Services, cluster.Slices, cluster.Nodes, cluster.ServiceCIDRs)
	w.planner = planner.New(w.state, s.options(tb))
	w.setHost()
	return w
}

func (w *world) setHost() {
	var host []netip.Addr
	for _, a := range w.settings.Host {
		host = append(host, netip.MustParseAddr(a))
	}
	w.state.SetHost(host)
}

// set changes settings and host.
func (w *world) set(doc []byte) {
	w.tb.Helper()
	mustYAML(w.tb, doc, &w.settings)
	w.planner.SetOptions(w.settings.options(w.tb))
	w.setHost()
}

// sync updates the plan, takes over the difference and checks that nothing is
// missing from it.
func (w *world) sync() plan.Update {
	w.tb.Helper()
	u := w.planner.Update()
	w.take(u)
	return u
}

func (w *world) take(u plan.Update) {
	w.tb.Helper()
	seen := map[plan.ID]bool{}
	for _, c := range u.Changed {
		if seen[c.ID] {
			w.tb.Errorf("%s is twice in one update", c.ID)
		}
		seen[c.ID] = true
		if c.Old != w.services[c.ID] {
			w.tb.Errorf("%s: Old is not what the last update gave", c.ID)
		}
		if c.Old.Equal(c.New) {
			w.tb.Errorf("%s: Old and New are equal", c.ID)
		}
		if c.New == nil {
			delete(w.services, c.ID)
		} else {
			w.services[c.ID] = c.New
		}
	}
	for _, id := range u.Health {
		if h, ok := u.Plan.Health[id]; ok {
			w.health[id] = h
		} else {
			delete(w.health, id)
		}
	}
	if u.Node {
		w.node = u.Plan.Node
	}
	w.noted = append(w.noted, u.Notes...)
	if !maps.Equal(w.services, u.Plan.Services) {
		w.tb.Error("the changes do not add up to the plan's Services")
	}
	if !maps.Equal(w.health, u.Plan.Health) {
		w.tb.Error("the changes do not add up to the plan's health ports")
	}
	if w.node != u.Plan.Node {
		w.tb.Error("the Node changed without a word")
	}
}

// plan returns the plan as it is now.
func (w *world) plan() *plan.Plan {
	return &plan.Plan{Services: w.services, Node: w.node, Health: w.health}
}

// checkFresh checks that a planner that sees all facts at once comes to the same
// plan and the same notes. A Node that is gone is the only thing that a planner
// remembers of the past.
func (w *world) checkFresh() {
	w.tb.Helper()
	if w.state.Node() == nil {
		return
	}
	fresh := planner.New(w.state, w.settings.options(w.tb))
	u := fresh.Update()
	if have, want := w.plan().String(), u.Plan.String(); have != want {
		w.tb.Errorf("plan differs from one made from scratch:\n%s", diff(want, have))
	}
	if have, want := notesText(w.planner.Why(nil)), notesText(fresh.Why(nil)); have != want {
		w.tb.Errorf("notes differ from those made from scratch:\n%s", diff(want, have))
	}
}

// apply hands objects over, as many as the YAML documents hold.
func (w *world) apply(docs []byte) {
	w.tb.Helper()
	forEachObject(w.tb, docs, func(o any) {
		switch o := o.(type) {
		case *corev1.Service:
			w.sink.SetService(cluster.ReduceService(o))
		case *discoveryv1.EndpointSlice:
			w.sink.SetSlice(cluster.ReduceSlice(o))
		case *corev1.Node:
			if o.Name == w.settings.Node {
				w.sink.SetNode(cluster.ReduceNode(o))
			}
		case *networkingv1.ServiceCIDR:
			w.sink.SetServiceCIDRs(cluster.ReduceServiceCIDR(o))
		}
	})
}

// delete removes objects: lines of kind and namespace/name.
func (w *world) delete(lines []byte) {
	w.tb.Helper()
	for line := range strings.Lines(string(lines)) {
		var kind, name string
		if _, err := fmt.Sscan(line, &kind, &name); err != nil {
			w.tb.Fatalf("%q: want a kind and a name: %v", line, err)
		}
		ns, short, _ := strings.Cut(name, "/")
		n := cluster.Name{Namespace: ns, Name: short}
		switch kind {
		case "Service":
			w.sink.DeleteService(n)
		case "EndpointSlice":
			w.sink.DeleteSlice(n)
		case "Node":
			w.sink.SetNode(nil)
		default:
			w.tb.Fatalf("%q: unknown kind", line)
		}
	}
}

// fail hands over results of health checks: lines of namespace/name, endpoint and
// "fails" or "passes".
func (w *world) fail(lines []byte) {
	w.tb.Helper()
	for line := range strings.Lines(string(lines)) {
		f := strings.Fields(line)
		if len(f) != 3 {
			w.tb.Fatalf("%q: want a Service, an endpoint, and fails or passes", line)
		}
		ns, name, _ := strings.Cut(f[0], "/")
		w.state.SetFailing(cluster.Name{Namespace: ns, Name: name}, netip.MustParseAddrPort(f[1]), f[2] == "fails")
	}
}

// synced says that all facts are there.
func (w *world) synced() {
	for _, k := range []cluster.Kind{cluster.Services, cluster.Slices, cluster.Nodes, cluster.ServiceCIDRs} {
		w.sink.Synced(k)
	}
}

// forEachObject decodes Kubernetes objects from YAML documents.
func forEachObject(tb testing.TB, docs []byte, f func(any)) {
	tb.Helper()
	r := yaml.NewYAMLReader(newReader(docs))
	for {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			tb.Fatal(err)
		}
		if len(bytes.TrimSpace(doc)) == 0 {
			continue
		}
		var head struct{ Kind string }
		mustYAML(tb, doc, &head)
		var o any
		switch head.Kind {
		case "Service":
			o = &corev1.Service{}
		case "EndpointSlice":
			o = &discoveryv1.EndpointSlice{}
		case "Node":
			o = &corev1.Node{}
		case "ServiceCIDR":
			o = &networkingv1.ServiceCIDR{}
		default:
			tb.Fatalf("kind %q in\n%s", head.Kind, doc)
		}
		strict(tb, doc, o)
		f(o)
	}
}

func strict(tb testing.TB, doc []byte, into any) {
	tb.Helper()
	j, err := yaml.ToJSON(doc)
	if err != nil {
		tb.Fatalf("%v in\n%s", err, doc)
	}
	d := json.NewDecoder(bytes.NewReader(j))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		tb.Fatalf("%v in\n%s", err, doc)
	}
}

func mustYAML(tb testing.TB, doc []byte, into any) {
	tb.Helper()
	if err := yaml.Unmarshal(doc, into); err != nil {
		tb.Fatalf("%v in\n%s", err, doc)
	}
}

// notesText is one line per note.
func notesText(notes []plan.Note) string {
	var lines []string
	for _, n := range notes {
		level := "info"
		if n.Warning {
			level = "warning"
		}
		name := n.Name
		if n.Namespace != "" {
			name = n.Namespace + "/" + n.Name
		}
		lines = append(lines, fmt.Sprintf("%s %s %s %s: %s\n", level, n.Kind, name, n.Reason, n.Message))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// diff shows the lines that only one of two texts has.
func diff(want, have string) string {
	w, h := strings.Split(want, "\n"), strings.Split(have, "\n")
	var b strings.Builder
	for i, j := 0, 0; i < len(w) || j < len(h); {
		switch {
		case i < len(w) && j < len(h) && w[i] == h[j]:
			i, j = i+1, j+1
		case i < len(w) && (j == len(h) || !slices.Contains(h[j:], w[i])):
			fmt.Fprintf(&b, "-%s\n", w[i])
			i++
		default:
			fmt.Fprintf(&b, "+%s\n", h[j])
			j++
		}
	}
	return b.String()
}
