package scenario

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
)

// evaluation is the stage without a kernel: objects go through the planner, flows
// through the interpreter of plans.
type evaluation struct {
	w       *world
	state   *cluster.State
	sink    cluster.Sink
	planner *planner.Planner // nil before start
	plan    *plan.Plan       // as of the last sync
	args    []string
	last    []byte // the last `config`
}

func newEvaluation(w *world) *evaluation {
	s := cluster.NewState(time.Now)
	e := &evaluation{w: w, state: s}
	e.sink = s.Sink("scenario", cluster.Services, cluster.Slices, cluster.Nodes, cluster.ServiceCIDRs)
	for _, k := range []cluster.Kind{cluster.Services, cluster.Slices, cluster.Nodes, cluster.ServiceCIDRs} {
		e.sink.Synced(k)
	}
	return e
}

func (e *evaluation) declared(*host) error                 { return nil }
func (e *evaluation) listen(*host, service, bool) error    { return nil }
func (e *evaluation) close() error                         { return nil }
func (e *evaluation) nodeAddrs([]netip.Addr) error         { return nil }
func (e *evaluation) addr(netip.Addr, bool) error          { return nil }
func (e *evaluation) restart(kill bool, mode string) error { return nil }

func (e *evaluation) put(o object) error {
	switch o := o.(type) {
	case *corev1.Service:
		e.sink.SetService(cluster.ReduceService(o))
	case *discoveryv1.EndpointSlice:
		e.sink.SetSlice(cluster.ReduceSlice(o))
	case *corev1.Endpoints: //nolint:staticcheck // the file source reads them
		for _, s := range cluster.ReduceEndpoints(o) {
			e.sink.SetSlice(s)
		}
	case *corev1.Node:
		if o.Name == e.w.nodeName {
			e.sink.SetNode(cluster.ReduceNode(o))
		}
	case *networkingv1.ServiceCIDR:
		e.sink.SetServiceCIDRs(cluster.ReduceServiceCIDR(o))
	}
	return nil
}

func (e *evaluation) remove(k key) error {
	n := cluster.Name{Namespace: k.namespace, Name: k.name}
	switch k.kind {
	case "Service":
		e.sink.DeleteService(n)
	case "EndpointSlice":
		e.sink.DeleteSlice(n)
	case "Node":
		if k.name == e.w.nodeName {
			e.sink.SetNode(nil)
		}
	case "Endpoints":
		return errors.New("delete Endpoints: not on the plan; guard the line with [!mode:plan]")
	}
	return nil
}

// config puts a fragment in force as a running proxy does: a faulty one is ignored.
func (e *evaluation) config(fragment []byte) error {
	e.last = fragment
	if e.planner == nil {
		return nil
	}
	if o, err := e.options(); err == nil {
		e.planner.SetOptions(o)
	}
	return nil
}

func (e *evaluation) start(args []string, _ bool) error {
	e.args = args
	o, err := e.options()
	if err != nil {
		return err
	}
	e.planner = planner.New(e.state, o)
	return nil
}

func (e *evaluation) options() (planner.Options, error) {
	data, err := e.w.configuration(config.IPTables, "", e.last)
	if err != nil {
		return planner.Options{}, err
	}
	flags := config.NewFlags()
	fs := pflag.NewFlagSet("svcproxy", pflag.ContinueOnError)
	fs.SetNormalizeFunc(config.NormalizeName)
	flags.Register(fs)
	if err := fs.Parse(append([]string{"--config", "the configuration"}, e.args...)); err != nil {
		return planner.Options{}, err
	}
	c, _, err := flags.Load(func(string) ([]byte, error) { return data, nil })
	if err != nil {
		return planner.Options{}, err
	}
	o := planner.Options{
		NodeName: c.HostnameOverride, NodeIP: c.BindAddress, Families: plan.Families[:],
		MasqueradeAll: c.MasqueradeAll, LocalhostNodePorts: false, // another mode's business
		ServiceProxyName: c.ServiceProxyName, AllowExternalIPs: c.AllowExternalIPs,
		Local: planner.LocalDetector{
			Kind: map[config.LocalMode]planner.DetectorKind{
				config.ClusterCIDR: planner.ClusterCIDR, config.NodeCIDR: planner.NodeCIDR,
				config.BridgeInterface: planner.BridgeInterface, config.InterfaceNamePrefix: planner.InterfaceNamePrefix,
			}[c.Local.Mode],
			CIDRs: c.Local.CIDRs, Name: c.Local.Interface,
		},
	}
	for _, a := range c.NodePortAddresses {
		switch a.Keyword {
		case config.Primary:
			o.NodePorts.Primary = true
		case config.Localhost:
			o.NodePorts.Localhost = true
		case config.All:
			o.NodePorts.All = true
		default:
			o.NodePorts.CIDRs = append(o.NodePorts.CIDRs, a.Range)
		}
	}
	return o, nil
}

func (e *evaluation) sync(time.Duration) error {
	if e.planner == nil {
		return errors.New("the proxy does not run")
	}
	e.state.SetHost(e.w.node().addrs)
	if ok, missing := e.planner.Ready(); !ok {
		return fmt.Errorf("not ready: %s", strings.Join(missing, "; "))
	}
	e.plan = e.planner.Update().Plan
	return nil
}

func (e *evaluation) health(c healthCheck) error {
	if e.plan == nil {
		return errors.New("nothing is planned yet")
	}
	for _, t := range c.to {
		family := plan.FamilyOf(t.addr.Addr())
		found := false
		for id, h := range e.plan.Health {
			if id.Family != family || h.Port != t.addr.Port() {
				continue
			}
			found = true
			code := 503
			if h.Local > 0 {
				code = 200
			}
			if code != c.code || c.endpoints >= 0 && c.endpoints != h.Local {
				return fmt.Errorf("port %d of %s: code %d with %d endpoints, want %d with %d", h.Port, id.Service, code, h.Local, c.code, c.endpoints)
			}
		}
		if !found && t.addr.Port() != healthzPort {
			return fmt.Errorf("no health-check port %d in the plan", t.addr.Port())
		}
	}
	return nil
}

// healthzPort is the proxy's own; the plan knows nothing of it.
const healthzPort = 10256

func (e *evaluation) flow(f *flow) error {
	for _, t := range f.to {
		if err := e.evaluate(f, t); err != nil {
			return fmt.Errorf("%s from %s to %s: %w", f.proto, f.from.name, t.addr, err)
		}
	}
	return nil
}

// reached is one way in which a flow can end.
type reached struct {
	end    lab.Outcome
	server string
	snat   bool
	share  float64
}

func (e *evaluation) evaluate(f *flow, t target) error {
	pkt, err := e.packet(f, t)
	if err != nil {
		return err
	}
	ways, affinity := e.ways(f, pkt)
	var names []string
	for _, r := range ways {
		if r.end != f.want.end {
			return fmt.Errorf("planned: %s, want %s", describe(ways), f.want.String())
		}
		if r.end == lab.Answered {
			if err := e.seen(f, pkt, r); err != nil {
				return err
			}
		}
		names = append(names, r.server)
	}
	if f.want.end != lab.Answered {
		return nil
	}
	for _, name := range f.want.servers {
		if !slices.Contains(names, name) {
			return fmt.Errorf("planned: %s, want %s", describe(ways), f.want.String())
		}
	}
	// A client that sticks to a server, or a flow that goes on, shows only some of
	// those that could answer.
	for _, name := range names {
		if !slices.Contains(f.want.servers, name) && !affinity && f.sport == 0 {
			return fmt.Errorf("planned: %s, want %s", describe(ways), f.want.String())
		}
	}
	if f.sticky && !affinity && len(ways) > 1 {
		return fmt.Errorf("planned: %s without affinity, want one server for all", describe(ways))
	}
	return f.want.planned(ways)
}

// packet is the flow's first, as it enters the node.
func (e *evaluation) packet(f *flow, t target) (plan.Packet, error) {
	h := f.from
	if h.on != nil {
		h = h.on
	}
	pkt := plan.Packet{Proto: plan.Protocol(f.proto), Dst: t.addr, In: uplink}
	var err error
	if pkt.Src, err = h.addr(t.addr.Addr().Is6()); err != nil {
		return pkt, err
	}
	switch h.role {
	case thisNode:
		pkt.In = ""
		if t.addr.Addr().IsLoopback() || slices.Contains(h.addrs, t.addr.Addr()) {
			pkt.Src = t.addr.Addr()
		}
	case pod:
		pkt.In = podInterface(h)
	}
	return pkt, nil
}

// ways returns how a packet may end, and whether its client sticks to one of them.
func (e *evaluation) ways(f *flow, pkt plan.Packet) ([]reached, bool) {
	at := e.owner(pkt.Dst.Addr())
	local := f.from.role == thisNode || f.from.role == pod || f.from.on == e.w.node()
	crosses := local || at == nil || at.role == thisNode || at.role == pod
	if e.plan == nil || !crosses {
		return []reached{e.deliver(pkt.Proto, pkt.Dst)}, false
	}
	r := plan.Eval(e.plan, pkt)
	switch r.Outcome {
	case plan.Refused:
		return []reached{{end: lab.Refused}}, false
	case plan.Dropped:
		return []reached{{end: lab.Dropped}}, false
	case plan.Pass:
		return []reached{e.deliver(pkt.Proto, pkt.Dst)}, false
	}
	var out []reached
	for _, s := range r.Endpoints {
		w := e.deliver(pkt.Proto, s.Addr)
		w.snat, w.share = s.SNAT, s.Share
		out = append(out, w)
	}
	return out, r.Affinity > 0
}

// owner returns the host that has the address, nil if there is none.
func (e *evaluation) owner(a netip.Addr) *host {
	for _, h := range e.w.hosts {
		if h.on == nil && slices.Contains(h.addrs, a) {
			return h
		}
	}
	return nil
}

// deliver says who answers at an address.
func (e *evaluation) deliver(p plan.Protocol, to netip.AddrPort) reached {
	end := lab.Unreachable
	for _, h := range e.w.hosts {
		if !slices.Contains(h.addrs, to.Addr()) {
			continue
		}
		if h.serves[service{lab.Proto(p), to.Port()}] {
			return reached{end: lab.Answered, server: h.name, share: 1}
		}
		end = lab.Refused
	}
	return reached{end: end}
}

// seen checks the source address that a server would see.
func (e *evaluation) seen(f *flow, pkt plan.Packet, r reached) error {
	node := e.w.node().addrs
	ok := true
	switch f.want.src {
	case "":
	case "client":
		ok = !r.snat || pkt.In == ""
	case "node":
		ok = r.snat || slices.Contains(node, pkt.Src)
	default:
		a, _ := netip.ParseAddr(f.want.src)
		if a.Is4() && pkt.Src.Is6() {
			a, _ = counterpart(a)
		}
		ok = pkt.Src == a && !r.snat || slices.Contains(node, a) && r.snat
	}
	if !ok {
		return fmt.Errorf("planned: %s with masquerading %t, want src=%s", r.server, r.snat, f.want.src)
	}
	return nil
}

// planned compares the shares.
func (o *outcome) planned(ways []reached) error {
	for name, want := range o.share {
		have := 0.0
		for _, r := range ways {
			if r.server == name {
				have += r.share
			}
		}
		if math.Abs(have-want) > o.within {
			return fmt.Errorf("planned: %s answers %.3f of all flows, want %.3f within %.3f", name, have, want, o.within)
		}
	}
	return nil
}

func describe(ways []reached) string {
	var out []string
	for _, r := range ways {
		if r.end == lab.Answered {
			out = append(out, r.server)
			continue
		}
		out = append(out, r.end.String())
	}
	return strings.Join(out, "|")
}
