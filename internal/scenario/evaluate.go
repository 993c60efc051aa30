package scenario

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/svcproxy/svcproxy/internal/cluster"
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/planner"
	"github.com/svcproxy/svcproxy/internal/scenario/dry"
	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/subject"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// evaluation is the stage without a kernel: objects go through the planner, flows
// through the interpreter of plans.
type evaluation struct {
	w       *world.World
	state   *cluster.State
	sink    cluster.Sink
	cidrs   map[string][]netip.Prefix // by the ServiceCIDR's name
	planner *planner.Planner          // nil before start
	plan    *plan.Plan                // as of the last sync
	args    []string
	last    []byte // the last `config`
}

func newEvaluation(w *world.World) *evaluation {
	s := cluster.NewState(time.Now)
	e := &evaluation{w: w, state: s, cidrs: map[string][]netip.Prefix{}}
	e.sink = s.Sink("scenario", cluster.Services, cluster.Slices, cluster.Nodes, cluster.ServiceCIDRs)
	for _, k := range []cluster.Kind{cluster.Services, cluster.Slices, cluster.Nodes, cluster.ServiceCIDRs} {
		e.sink.Synced(k)
	}
	return e
}

func (e *evaluation) declared(*world.Host) error                   { return nil }
func (e *evaluation) listen(*world.Host, world.Server, bool) error { return nil }
func (e *evaluation) close() error                                 { return nil }
func (e *evaluation) link(*world.Host) error                       { return nil }
func (e *evaluation) nodeAddrs([]netip.Addr) error                 { return nil }
func (e *evaluation) addr(netip.Addr, bool) error                  { return nil }
func (e *evaluation) restart(restarting) error                     { return nil }

func (e *evaluation) put(o world.Object) error {
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
		if o.Name == e.w.NodeName {
			e.sink.SetNode(cluster.ReduceNode(o))
		}
	case *networkingv1.ServiceCIDR:
		e.cidrs[o.Name] = cluster.ReduceServiceCIDR(o)
		e.setServiceCIDRs()
	}
	return nil
}

func (e *evaluation) remove(k world.Key) error {
	n := cluster.Name{Namespace: k.Namespace, Name: k.Name}
	switch k.Kind {
	case "Service":
		e.sink.DeleteService(n)
	case "EndpointSlice":
		e.sink.DeleteSlice(n)
	case "Node":
		if k.Name == e.w.NodeName {
			e.sink.SetNode(nil)
		}
	case "ServiceCIDR":
		delete(e.cidrs, k.Name)
		e.setServiceCIDRs()
	case "Endpoints":
		return errors.New("delete Endpoints: not on the plan; guard the line with [!mode:plan]")
	}
	return nil
}

func (e *evaluation) setServiceCIDRs() {
	e.sink.SetServiceCIDRs(slices.Concat(slices.Collect(maps.Values(e.cidrs))...))
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
	data, err := subject.Configuration(e.w, config.IPTables, "", e.last)
	if err != nil {
		return planner.Options{}, err
	}
	return dry.Options(data, e.args)
}

func (e *evaluation) sync(time.Duration) error {
	if e.planner == nil {
		return errors.New("the proxy does not run")
	}
	e.state.SetHost(e.w.Node().Addrs)
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
		family := plan.FamilyOf(t.Addr.Addr())
		found := false
		for id, h := range e.plan.Health {
			if id.Family != family || h.Port != t.Addr.Port() {
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
		if !found && t.Addr.Port() != healthzPort {
			return fmt.Errorf("no health-check port %d in the plan", t.Addr.Port())
		}
	}
	return nil
}

// healthzPort is the proxy's own; the plan knows nothing of it.
const healthzPort = 10256

func (e *evaluation) flow(f *flow.Spec) error {
	if e.plan != nil && dry.Probe(e.plan, e.passes, e.state) {
		e.plan = e.planner.Update().Plan
	}
	for _, t := range f.To {
		err := e.evaluate(f, t)
		if err != nil && f.Within > 0 { // to wait for
			if err = e.sync(f.Within); err == nil {
				err = e.evaluate(f, t)
			}
		}
		if err != nil {
			return fmt.Errorf("%s from %s to %s: %w", f.Proto, f.From.Name, t.Addr, err)
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

func (e *evaluation) evaluate(f *flow.Spec, t world.Target) error {
	pkt, err := e.packet(f, t)
	if err != nil {
		return err
	}
	ways, affinity := e.ways(f, pkt)
	var names []string
	for _, r := range ways {
		if !f.Meets(r.end, t) {
			return fmt.Errorf("planned: %s, want %s", describe(ways), f.Want.String())
		}
		if r.end == lab.Answered {
			if err := e.seen(f, pkt, r); err != nil {
				return err
			}
		}
		names = append(names, r.server)
	}
	if f.Want.End != lab.Answered {
		return nil
	}
	for _, name := range f.Want.Servers {
		if !slices.Contains(names, name) {
			return fmt.Errorf("planned: %s, want %s", describe(ways), f.Want.String())
		}
	}
	// A client that sticks to a server, or a flow that goes on, shows only some of
	// those that could answer.
	for _, name := range names {
		if !slices.Contains(f.Want.Servers, name) && !affinity && f.Sport == 0 {
			return fmt.Errorf("planned: %s, want %s", describe(ways), f.Want.String())
		}
	}
	if f.Sticky && !affinity && f.Sport == 0 && len(ways) > 1 {
		return fmt.Errorf("planned: %s without affinity, want one server for all", describe(ways))
	}
	return planned(&f.Want, ways)
}

// packet is the flow's first, as it enters the node.
func (e *evaluation) packet(f *flow.Spec, t world.Target) (plan.Packet, error) {
	h := f.From.Space()
	pkt := plan.Packet{Proto: plan.Protocol(f.Proto), Dst: t.Addr, In: uplink}
	var err error
	if pkt.Src, err = h.Addr(t.Addr.Addr().Is6()); err != nil {
		return pkt, err
	}
	switch h.Role {
	case world.ThisNode:
		pkt.In = ""
		if t.Addr.Addr().IsLoopback() || slices.Contains(h.Addrs, t.Addr.Addr()) {
			pkt.Src = t.Addr.Addr()
		}
	case world.Pod:
		pkt.In = podInterface(h)
	}
	return pkt, nil
}

// ways returns how a packet may end, and whether its client sticks to one of them.
func (e *evaluation) ways(f *flow.Spec, pkt plan.Packet) ([]reached, bool) {
	if f.From.Space().Cut && !pkt.Dst.Addr().IsLoopback() {
		return []reached{{end: lab.Unreachable}}, false // it has no route
	}
	at := e.owner(pkt.Dst.Addr())
	local := f.From.Role == world.ThisNode || f.From.Role == world.Pod || f.From.On == e.w.Node()
	crosses := local || at == nil || at.Role == world.ThisNode || at.Role == world.Pod
	if e.plan == nil || !crosses {
		return []reached{e.deliver(f.From, pkt.Proto, pkt.Dst)}, false
	}
	r := plan.Eval(e.plan, pkt)
	switch r.Outcome {
	case plan.Refused:
		return []reached{{end: lab.Refused}}, false
	case plan.Dropped:
		return []reached{{end: lab.Dropped}}, false
	case plan.Pass:
		return []reached{e.deliver(f.From, pkt.Proto, pkt.Dst)}, false
	}
	var out []reached
	for _, s := range r.Endpoints {
		w := e.deliver(f.From, pkt.Proto, s.Addr)
		w.snat, w.share = s.SNAT, s.Share
		out = append(out, w)
	}
	return out, r.Affinity > 0
}

// owner returns the host that has the address, nil if there is none.
func (e *evaluation) owner(a netip.Addr) *world.Host {
	for _, h := range e.w.Hosts {
		if h.On == nil && slices.Contains(h.Addrs, a) {
			return h
		}
	}
	return nil
}

// deliver says who answers at an address; a loopback one is the caller's own.
func (e *evaluation) deliver(from *world.Host, p plan.Protocol, to netip.AddrPort) reached {
	end := lab.Unreachable
	for _, h := range e.w.Hosts {
		own := to.Addr().IsLoopback() && (h == from || h.On == from || h == from.On)
		if !own && !slices.Contains(h.Addrs, to.Addr()) {
			continue
		}
		if !own && h.Space() != from.Space() && e.w.Severed(h) {
			return reached{end: lab.Dropped}
		}
		if h.Serves[world.Server{Proto: lab.Proto(p), Port: to.Port()}] {
			return reached{end: lab.Answered, server: h.Name, share: 1}
		}
		end = lab.Refused
	}
	return reached{end: end}
}

// passes says what a probe from the node finds.
func (e *evaluation) passes(to netip.AddrPort) bool {
	return e.deliver(e.w.Node(), plan.TCP, to).end == lab.Answered
}

// seen checks the source address that a server would see.
func (e *evaluation) seen(f *flow.Spec, pkt plan.Packet, r reached) error {
	node := e.w.Node().Addrs
	ok := true
	switch f.Want.Src {
	case "":
	case "client":
		ok = !r.snat || pkt.In == ""
	case "node":
		ok = r.snat || slices.Contains(node, pkt.Src)
	default:
		a, _ := netip.ParseAddr(f.Want.Src)
		if a.Is4() && pkt.Src.Is6() {
			a = world.Counterpart(a)
		}
		ok = pkt.Src == a && !r.snat || slices.Contains(node, a) && r.snat
	}
	if !ok {
		return fmt.Errorf("planned: %s with masquerading %t, want src=%s", r.server, r.snat, f.Want.Src)
	}
	return nil
}

// planned compares the shares.
func planned(o *flow.Outcome, ways []reached) error {
	for _, name := range slices.Sorted(maps.Keys(o.Share)) {
		want := o.Share[name]
		have := 0.0
		for _, r := range ways {
			if r.server == name {
				have += r.share
			}
		}
		if math.Abs(have-want) > o.Within {
			return fmt.Errorf("planned: %s answers %.3f of all flows, want %.3f within %.3f", name, have, want, o.Within)
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
