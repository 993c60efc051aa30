package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// kernel is the stage with namespaces, packets and the proxy as a real process.
type kernel struct {
	w       *world
	subject Subject
	mode    string
	feed    feed
	dir     string // for the files of the run

	net      *lab.Lab // nil until something needs it
	servers  map[*host]map[service]*lab.Server
	settings *settingsFile
	fragment []byte // the last `config`
	args     []string
	proxy    *process
	out      output
	marker   marker
	held     map[string][]*held // by name; one for each family
	loads    map[string][]*load
}

func newKernel(w *world, subject Subject, mode string, fromAPI bool, dir string) (*kernel, error) {
	k := &kernel{
		w: w, subject: subject, mode: mode, dir: dir,
		servers: map[*host]map[service]*lab.Server{},
		held:    map[string][]*held{}, loads: map[string][]*load{},
	}
	var err error
	if fromAPI {
		k.feed = newAPIFeed(filepath.Join(dir, "kubeconfig"))
	} else if k.feed, err = newFileFeed(filepath.Join(dir, "manifests")); err != nil {
		return nil, err
	}
	if k.settings, err = newSettingsFile(filepath.Join(dir, configDir)); err != nil {
		return nil, err
	}
	k.marker.zone = w.zone
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
		{Name: "router", Forwards: true, TurnsBack: true, Addrs: mustPair(routerAddr)},
	}}
	for _, n := range neighbours {
		t.Hosts = append(t.Hosts, lab.HostSpec{Name: n.name, Forwards: true})
		k.joinRouter(&t, n.name, mustPair(n.addr), mustBoth(n.pods))
	}
	k.joinRouter(&t, "node", k.w.node().addrs, k.w.podCIDRs)
	for _, all := range everywhere {
		t.Routes = append(t.Routes,
			// Service addresses are the node's business; what it sends back to the
			// router in spite of that is unreachable.
			lab.RouteSpec{Host: "router", To: all, Dev: toNode("node"), Via: k.nodeAddr(all.Addr().Is6())})
	}
	var err error
	if k.net, err = lab.Build(t); err != nil {
		return err
	}
	for _, h := range k.w.hosts {
		if err := k.place(h); err != nil {
			return err
		}
	}
	if err := k.placeMarker(); err != nil {
		return err
	}
	return k.feed.begin(k.net.Host("node"))
}

var everywhere = []netip.Prefix{
	netip.PrefixFrom(netip.IPv4Unspecified(), 0),
	netip.PrefixFrom(netip.IPv6Unspecified(), 0),
}

// nodeAddr is the node's first address of a family, or an invalid one.
func (k *kernel) nodeAddr(v6 bool) netip.Addr {
	a, _ := k.w.node().addr(v6)
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
		from := mustPair(routerAddr)[0]
		all := everywhere[0]
		if a.Is6() {
			from, all = mustPair(routerAddr)[1], everywhere[1]
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
func (k *kernel) place(h *host) error {
	var t lab.Topology
	switch {
	case h.on != nil:
	case h.role == pod:
		t.Leaves = []lab.LeafSpec{{Name: h.name, Behind: "node", Interface: podInterface(h), Addrs: h.addrs, From: k.w.node().addrs}}
	case h.role == client:
		t.Leaves = []lab.LeafSpec{{Name: h.name, Behind: "router", Addrs: h.addrs, From: mustPair(routerAddr)}}
	case h.role == remote:
		t = remoteTopology(h)
	}
	if err := k.net.Extend(t); err != nil {
		return err
	}
	for s := range h.serves {
		if err := k.listen(h, s, true); err != nil {
			return err
		}
	}
	return nil
}

// podInterface names the node's end of a pod's link.
func podInterface(h *host) string {
	name := "veth-" + h.name
	return name[:min(len(name), 15)]
}

// remoteTopology puts a pod behind the other node that its address belongs to,
// birch if it belongs to neither.
func remoteTopology(h *host) lab.Topology {
	at := neighbours[0]
	for _, n := range neighbours {
		if slices.ContainsFunc(mustBoth(n.pods), func(p netip.Prefix) bool { return p.Contains(h.addrs[0]) }) {
			at = n
		}
	}
	t := lab.Topology{Leaves: []lab.LeafSpec{{Name: h.name, Behind: at.name, Addrs: h.addrs, From: mustPair(at.addr)}}}
	return t
}

// labHost returns the namespace of a host.
func (k *kernel) labHost(h *host) (*lab.Host, error) {
	if err := k.build(); err != nil {
		return nil, err
	}
	if h.on != nil {
		h = h.on
	}
	if n := k.net.Host(h.name); n != nil {
		return n, nil
	}
	return nil, fmt.Errorf("host %s has no namespace", h.name)
}

func (k *kernel) declared(h *host) error {
	if k.net == nil {
		return nil // build will place it
	}
	return k.place(h)
}

func (k *kernel) listen(h *host, s service, on bool) error {
	if !on {
		srv := k.servers[h][s]
		if srv == nil {
			return usagef("host %s does not listen on %s port %d", h.name, s.proto, s.port)
		}
		srv.Close()
		delete(k.servers[h], s)
		return nil
	}
	if s.proto == lab.SCTP && !lab.HasSCTP() {
		return nil
	}
	n, err := k.labHost(h)
	if err != nil {
		return err
	}
	if k.servers[h][s] != nil {
		return nil // build started it
	}
	srv, err := n.Serve(h.name, s.proto, s.port)
	if err != nil {
		return err
	}
	if k.servers[h] == nil {
		k.servers[h] = map[service]*lab.Server{}
	}
	k.servers[h][s] = srv
	return nil
}

func (k *kernel) addr(a netip.Addr, add bool) error {
	n, err := k.labHost(k.w.node())
	if err != nil {
		return err
	}
	if add {
		if err := n.AddAddr(uplink, single(a)); err != nil {
			return err
		}
		return k.net.Extend(lab.Topology{Routes: nodeRoutes("node", k.w.node().addrs)})
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

// preferSources makes the node's first addresses the source of what it sends.
func (k *kernel) preferSources() error {
	t := lab.Topology{Routes: nodeRoutes("node", k.w.node().addrs)}
	for _, h := range k.w.hosts {
		if h.role != pod || h.on != nil {
			continue
		}
		for _, a := range h.addrs {
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
	for _, a := range k.w.node().addrs {
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
		if !slices.Contains(k.w.node().addrs, a) {
			if err := n.DelAddr(uplink, a); err != nil {
				return err
			}
		}
	}
	return nil
}

func (k *kernel) put(o object) error { return k.feed.put(o) }
func (k *kernel) remove(x key) error { return k.feed.remove(x) }

func (k *kernel) config(fragment []byte) error {
	k.fragment = fragment
	if k.proxy == nil {
		return nil
	}
	return k.writeConfig()
}

func (k *kernel) writeConfig() error {
	data, err := k.w.configuration(k.mode, k.feed.kubeconfig(), k.fragment)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	return k.settings.write(data)
}

func (k *kernel) start(args []string, mustFail bool) error {
	if k.proxy != nil {
		return usagef("the proxy was started already")
	}
	if err := k.build(); err != nil {
		return err
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
	case <-k.proxy.exited:
		err := k.proxy.err
		k.proxy = nil
		return err
	case <-time.After(2 * settle):
		return nil
	}
}

// launch writes the configuration and starts the proxy.
func (k *kernel) launch() error {
	if err := k.writeConfig(); err != nil {
		return err
	}
	r := strings.NewReplacer("{CONFIG}", k.settings.path(), "{KUBECONFIG}", k.feed.kubeconfig(),
		"{NODE}", k.w.nodeName, "{MANIFESTS}", filepath.Join(k.dir, "manifests"))
	var command []string
	for _, word := range k.subject.Command {
		command = append(command, r.Replace(word))
	}
	var err error
	k.proxy, err = spawn(k.net.Host("node"), append(command, k.args...), &k.out)
	return err
}

func (k *kernel) stopProxy(kill bool) error {
	if k.proxy == nil {
		return usagef("the proxy does not run")
	}
	p := k.proxy
	k.proxy = nil
	return p.end(kill)
}

func (k *kernel) restart(kill bool, mode string) error {
	if k.proxy != nil {
		if err := k.stopProxy(kill); err != nil {
			return err
		}
	}
	if mode != "" {
		k.mode = mode
	}
	return k.launch()
}

// alive returns an error with the proxy's last words if it has ended.
func (k *kernel) alive() error {
	if k.proxy == nil {
		return errors.New("the proxy does not run")
	}
	select {
	case <-k.proxy.exited:
		return fmt.Errorf("the proxy ended: %v; it said last:\n%s", k.proxy.err, k.out.tail(10))
	default:
		return nil
	}
}

func (k *kernel) flow(f *flow) error {
	h, err := k.labHost(f.from)
	if err != nil {
		return err
	}
	for _, t := range f.to {
		err := eventually(f.within, func() error { return f.check(h, t, k.w.node().addrs) })
		if err != nil {
			return err
		}
	}
	return nil
}

func (k *kernel) close() error {
	for _, all := range k.held {
		for _, h := range all {
			h.close()
		}
	}
	for _, all := range k.loads {
		for _, l := range all {
			l.close()
		}
	}
	var errs []error
	if k.proxy != nil {
		errs = append(errs, k.proxy.end(true))
	}
	errs = append(errs, k.feed.close())
	if k.net != nil {
		errs = append(errs, k.net.Close())
	}
	return errors.Join(errs...)
}
