package scenario

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/subject"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// kernel is the stage with namespaces, packets and the proxy as a real process.
type kernel struct {
	w       *world.World
	subject subject.Subject
	mode    string
	feed    subject.Feed
	dir     string // for the files of the run

	net      *lab.Lab // nil until something needs it
	servers  map[*world.Host]map[world.Server]*lab.Server
	settings *subject.SettingsFile
	fragment []byte // the last `config`
	args     []string
	proxy    *subject.Process
	out      subject.Output
	marker   marker
	alone    func() bool             // the proxy has removed what other modes left; nil: it has not changed its mode
	held     map[string][]*flow.Held // by name; one for each family
	loads    map[string][]*flow.Load
}

func newKernel(w *world.World, program subject.Subject, mode string, fromAPI bool, dir string) (*kernel, error) {
	k := &kernel{
		w: w, subject: program, mode: mode, dir: dir,
		servers: map[*world.Host]map[world.Server]*lab.Server{},
		held:    map[string][]*flow.Held{}, loads: map[string][]*flow.Load{},
	}
	var err error
	if fromAPI {
		k.feed = subject.NewAPIFeed(filepath.Join(dir, "kubeconfig"))
	} else if k.feed, err = subject.NewFileFeed(filepath.Join(dir, "manifests")); err != nil {
		return nil, err
	}
	if k.settings, err = subject.NewSettingsFile(filepath.Join(dir, subject.ConfigDir)); err != nil {
		return nil, err
	}
	k.marker.zone = w.Zone
	return k, nil
}

// The interfaces of the fixed part of the world.
const (
	uplink   = "eth0"
	toRouter = "eth0"
)

func toNode(name string) string { return "to-" + name }

// build makes the namespaces of everything declared so far.
func (k *kernel) build() error {
	if k.net != nil {
		return nil
	}
	t := lab.Topology{Hosts: []lab.HostSpec{
		{Name: "node", Forwards: true, OwnRun: true},
		{Name: "router", Forwards: true, TurnsBack: true, Addrs: world.Both(world.RouterAddr)},
	}}
	for _, n := range world.Neighbours {
		t.Hosts = append(t.Hosts, lab.HostSpec{Name: n.Name, Forwards: true})
		k.joinRouter(&t, n.Name, world.Both(n.Addr), world.BothRanges(n.Pods))
	}
	k.joinRouter(&t, "node", k.w.Node().Addrs, nil)
	t.Routes = append(t.Routes, k.routesToNode()...)
	var err error
	if k.net, err = lab.Build(t); err != nil {
		return err
	}
	for _, h := range k.w.Hosts {
		if err := k.place(h); err != nil {
			return err
		}
	}
	if err := k.placeMarker(); err != nil {
		return err
	}
	return k.feed.Begin(k.net.Host("node"))
}

var everywhere = []netip.Prefix{
	netip.PrefixFrom(netip.IPv4Unspecified(), 0),
	netip.PrefixFrom(netip.IPv6Unspecified(), 0),
}

// routesToNode leads from the router to what is behind the node: its pods and, because
// Service addresses are its business, all that is nowhere else. What it sends back in
// spite of that is unreachable.
func (k *kernel) routesToNode() (out []lab.RouteSpec) {
	for _, to := range slices.Concat(everywhere, k.w.PodCIDRs) {
		if via := k.nodeAddr(to.Addr().Is6()); via.IsValid() {
			out = append(out, lab.RouteSpec{Host: "router", To: to, Dev: toNode("node"), Via: via})
		}
	}
	return out
}

// nodeAddr is the node's first address of a family, or an invalid one.
func (k *kernel) nodeAddr(v6 bool) netip.Addr {
	a, _ := k.w.Node().Addr(v6)
	return a
}

// joinRouter links a node to the router: its addresses and pods are behind the
// link. A pod that does not exist turns back to the router, which says so.
func (k *kernel) joinRouter(t *lab.Topology, name string, addrs []netip.Addr, pods []netip.Prefix) {
	end := lab.EndSpec{Host: name, Interface: toRouter}
	for _, a := range addrs {
		end.Addrs = append(end.Addrs, single(a))
	}
	t.Links = append(t.Links, lab.LinkSpec{A: end, B: lab.EndSpec{Host: "router", Interface: toNode(name)}})
	t.Routes = append(t.Routes, nodeRoutes(name, addrs)...)
	for _, p := range pods {
		i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return a.Is6() == p.Addr().Is6() })
		if i >= 0 {
			t.Routes = append(t.Routes, lab.RouteSpec{Host: "router", To: p, Dev: toNode(name), Via: addrs[i]})
		}
	}
}

// nodeRoutes leads from a node to the router and back.
func nodeRoutes(name string, addrs []netip.Addr) []lab.RouteSpec {
	var out []lab.RouteSpec
	first := map[bool]bool{}
	for _, a := range addrs {
		from := world.Both(world.RouterAddr)[0]
		all := everywhere[0]
		if a.Is6() {
			from, all = world.Both(world.RouterAddr)[1], everywhere[1]
		}
		out = append(out, lab.RouteSpec{Host: "router", To: single(a), Dev: toNode(name), Src: from})
		if !first[a.Is6()] {
			first[a.Is6()] = true
			out = append(out, lab.RouteSpec{Host: name, To: all, Dev: toRouter, Via: from, Src: a})
		}
	}
	return out
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// place makes a host's namespace, if it has one of its own, and starts its servers.
func (k *kernel) place(h *world.Host) error {
	var t lab.Topology
	switch {
	case h.On != nil:
	case h.Role == world.Pod:
		t.Leaves = []lab.LeafSpec{{Name: h.Name, Behind: "node", Interface: podInterface(h), Addrs: h.Addrs, From: k.w.Node().Addrs}}
	case h.Role == world.Client:
		t.Leaves = []lab.LeafSpec{{Name: h.Name, Behind: "router", Addrs: h.Addrs, From: world.Both(world.RouterAddr)}}
	case h.Role == world.Remote:
		t = remoteTopology(h)
	}
	if err := k.net.Extend(t); err != nil {
		return err
	}
	for s := range h.Serves {
		if err := k.listen(h, s, true); err != nil {
			return err
		}
	}
	return nil
}

// podInterface names the node's end of a pod's link.
func podInterface(h *world.Host) string {
	name := "veth-" + h.Name
	return name[:min(len(name), 15)]
}

// remoteTopology puts a pod behind its node, which the router reaches it by even if its
// address is in no node's range.
func remoteTopology(h *world.Host) lab.Topology {
	at := world.BehindOf(h)
	t := lab.Topology{Leaves: []lab.LeafSpec{{Name: h.Name, Behind: at.Name, Addrs: h.Addrs, From: world.Both(at.Addr)}}}
	for _, a := range h.Addrs {
		for _, via := range world.Both(at.Addr) {
			if via.Is6() == a.Is6() {
				t.Routes = append(t.Routes, lab.RouteSpec{Host: "router", To: single(a), Dev: toNode(at.Name), Via: via})
			}
		}
	}
	return t
}

// labHost returns the namespace of a host.
func (k *kernel) labHost(h *world.Host) (*lab.Host, error) {
	if err := k.build(); err != nil {
		return nil, err
	}
	h = h.Space()
	if n := k.net.Host(h.Name); n != nil {
		return n, nil
	}
	return nil, fmt.Errorf("host %s has no namespace", h.Name)
}

func (k *kernel) declared(h *world.Host) error {
	if k.net == nil {
		return nil // build will place it
	}
	return k.place(h)
}

func (k *kernel) listen(h *world.Host, s world.Server, on bool) error {
	if !on {
		srv := k.servers[h][s]
		if srv == nil {
			return nil // SCTP, without the kernel's
		}
		srv.Close()
		delete(k.servers[h], s)
		return nil
	}
	if s.Proto == lab.SCTP && !lab.HasSCTP() {
		return nil
	}
	n, err := k.labHost(h)
	if err != nil {
		return err
	}
	if k.servers[h][s] != nil {
		return nil // build started it
	}
	srv, err := n.Serve(h.Name, s.Proto, s.Port)
	if err != nil {
		return err
	}
	if k.servers[h] == nil {
		k.servers[h] = map[world.Server]*lab.Server{}
	}
	k.servers[h][s] = srv
	return nil
}

func (k *kernel) link(h *world.Host) error {
	n, err := k.labHost(h)
	if err != nil {
		return err
	}
	if h.Cut {
		return n.Cut(uplink)
	}
	return n.Join(uplink)
}

func (k *kernel) addr(a netip.Addr, add bool) error {
	n, err := k.labHost(k.w.Node())
	if err != nil {
		return err
	}
	if add {
		if err := n.AddAddr(uplink, single(a)); err != nil {
			return err
		}
		return k.net.Extend(lab.Topology{Routes: nodeRoutes("node", k.w.Node().Addrs)})
	}
	// Routes that prefer the address as source would go with it.
	if err := k.preferSources(); err != nil {
		return err
	}
	if err := n.DelAddr(uplink, a); err != nil {
		return err
	}
	return k.net.Host("router").DelRoute(toNode("node"), single(a))
}

// preferSources makes the node's first addresses the source of what it sends, and the
// way to it.
func (k *kernel) preferSources() error {
	t := lab.Topology{Routes: append(nodeRoutes("node", k.w.Node().Addrs), k.routesToNode()...)}
	for _, a := range world.Both(markerAddr) {
		t.Routes = append(t.Routes, lab.RouteSpec{Host: "node", To: single(a), Dev: markerInterface, Src: k.nodeAddr(a.Is6())})
	}
	for _, h := range k.w.Hosts {
		if h.Role != world.Pod || h.On != nil {
			continue
		}
		for _, a := range h.Addrs {
			t.Routes = append(t.Routes, lab.RouteSpec{Host: "node", To: single(a), Dev: podInterface(h), Src: k.nodeAddr(a.Is6())})
		}
	}
	return k.net.Extend(t)
}

func (k *kernel) nodeAddrs(old []netip.Addr) error {
	if k.net == nil {
		return nil
	}
	n := k.net.Host("node")
	for _, a := range k.w.Node().Addrs {
		if !slices.Contains(old, a) {
			if err := n.AddAddr(uplink, single(a)); err != nil {
				return err
			}
		}
	}
	if err := k.preferSources(); err != nil {
		return err
	}
	for _, a := range old {
		if !slices.Contains(k.w.Node().Addrs, a) {
			if err := n.DelAddr(uplink, a); err != nil {
				return err
			}
		}
	}
	return nil
}

func (k *kernel) put(o world.Object) error { return k.feed.Put(o) }
func (k *kernel) remove(x world.Key) error { return k.feed.Remove(x) }

func (k *kernel) config(fragment []byte) error {
	k.fragment = fragment
	if k.proxy == nil {
		return nil
	}
	return k.writeConfig()
}

func (k *kernel) writeConfig() error {
	data, err := subject.Configuration(k.w, k.mode, k.feed.Kubeconfig(), k.fragment)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	return k.settings.Write(data)
}

func (k *kernel) start(args []string, mustFail bool) error {
	if k.proxy != nil {
		return world.Usagef("the proxy was started already")
	}
	k.args = args
	if err := k.launch(); err != nil {
		return err
	}
	if !mustFail {
		return nil
	}
	// The script wants the start to fail: wait for the end to see it.
	select {
	case <-k.proxy.Exited:
		err := k.proxy.Err
		k.proxy = nil
		return err
	case <-time.After(2 * flow.Settle):
		return nil
	}
}

// launch writes the configuration and starts the proxy.
func (k *kernel) launch() error {
	if err := k.build(); err != nil {
		return err
	}
	if err := k.writeConfig(); err != nil {
		return err
	}
	r := strings.NewReplacer("{CONFIG}", k.settings.Path(), "{KUBECONFIG}", k.feed.Kubeconfig(),
		"{NODE}", k.w.NodeName, "{MANIFESTS}", filepath.Join(k.dir, "manifests"))
	var command []string
	for _, word := range k.subject.Command {
		command = append(command, r.Replace(word))
	}
	var err error
	k.proxy, err = subject.Start(k.net.Host("node"), append(command, k.args...), &k.out)
	return err
}

// userspaceMode is the mode in which the process itself carries connections.
const userspaceMode = "userspace"

func (k *kernel) stopProxy(kill bool) error {
	if k.proxy == nil {
		return world.Usagef("the proxy does not run")
	}
	p, err := k.proxy, k.alive()
	k.proxy = nil
	return errors.Join(err, p.End(kill))
}

// verified is the event of a svcproxy that has removed what other modes left.
const verified = "ModeVerified"

// restart ends the proxy and starts it again. The next process comes first if that is
// asked for and, as in an upgrade, in userspace mode, where it takes over what the
// process itself serves: unless that is killed or the mode changes.
func (k *kernel) restart(how restarting) error {
	beside := how.beside || k.mode == userspaceMode && !how.kill && (how.mode == "" || how.mode == k.mode)
	predecessor := k.proxy
	if predecessor != nil && !beside {
		if err := k.stopProxy(how.kill); err != nil {
			return err
		}
	}
	if next := cmp.Or(how.mode, k.mode); next != k.mode {
		k.mode = next
		if before := k.out.Events(verified, nil); k.subject.Name == "svcproxy" {
			k.alone = func() bool { return k.out.Events(verified, nil) > before }
		}
	}
	if err := k.launch(); err != nil || predecessor == nil || !beside {
		return err
	}
	return predecessor.Terminate()
}

// alive returns an error with the proxy's last words if it has ended.
func (k *kernel) alive() error {
	if k.proxy == nil {
		return errors.New("the proxy does not run")
	}
	select {
	case <-k.proxy.Exited:
		return fmt.Errorf("the proxy ended: %v; it said last:\n%s", k.proxy.Err, k.out.Tail(10))
	default:
		return nil
	}
}

func (k *kernel) flow(f *flow.Spec) error {
	h, err := k.labHost(f.From)
	if err != nil {
		return err
	}
	for _, t := range f.To {
		err := flow.Eventually(f.Within, func() error { return f.Check(h, t, k.w.Node().Addrs) })
		if err != nil {
			return err
		}
	}
	return nil
}

func (k *kernel) close() error {
	for _, all := range k.held {
		for _, h := range all {
			h.Close()
		}
	}
	for _, all := range k.loads {
		for _, l := range all {
			l.Close()
		}
	}
	var errs []error
	if k.proxy != nil {
		errs = append(errs, k.proxy.End(true))
	}
	errs = append(errs, k.feed.Close())
	if k.net != nil {
		errs = append(errs, k.net.Close())
	}
	return errors.Join(errs...)
}
