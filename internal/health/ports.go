package health

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// ReasonPortFailed: a Service's health-check node port cannot be listened on, so
// load balancers take this node for unhealthy.
const ReasonPortFailed plan.Reason = "FailedToStartServiceHealthcheck"

// ports serves the health-check node ports of Services.
type ports struct {
	h    *Health
	wake chan struct{}

	mu     sync.Mutex // guards all below
	wanted map[plan.HealthID]plan.HealthPort
	node   *plan.Node

	open map[plan.HealthID]*port // of run's goroutine
}

// port is one health-check port with all its addresses.
type port struct {
	on      where
	opened  bool
	servers []*http.Server // one for each address
	err     error          // why it is not open
}

// where is what a port listens on; comparable by same.
type where struct {
	network string
	addrs   []netip.AddrPort
}

func (w where) same(o where) bool { return w.network == o.network && slices.Equal(w.addrs, o.addrs) }

func newPorts(h *Health) *ports {
	return &ports{h: h, wake: make(chan struct{}, 1), open: map[plan.HealthID]*port{}}
}

func (p *ports) set(wanted map[plan.HealthID]plan.HealthPort, node *plan.Node) {
	p.mu.Lock()
	p.wanted, p.node = maps.Clone(wanted), node
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *ports) run(ctx context.Context) {
	defer func() {
		for _, o := range p.open {
			o.close()
		}
	}()
	for {
		var retry <-chan time.Time
		if p.reconcile() > 0 {
			retry = time.After(retryEvery)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-retry:
		}
	}
}

// reconcile opens and closes ports as wanted and returns how many failed. Closing
// comes first: a port may have moved from one Service to another.
func (p *ports) reconcile() (failed int) {
	p.mu.Lock()
	wanted := make(map[plan.HealthID]where, len(p.wanted))
	for id, hp := range p.wanted {
		wanted[id] = listenOn(id.Family, hp.Port, p.node)
	}
	p.mu.Unlock()
	for id, o := range p.open {
		w, ok := wanted[id]
		if !ok || !w.same(o.on) {
			o.close()
			if !ok {
				delete(p.open, id)
			}
		}
	}
	ids := slices.SortedFunc(maps.Keys(wanted), func(a, b plan.HealthID) int {
		return cmp.Or(cmp.Compare(a.Service.Namespace, b.Service.Namespace), cmp.Compare(a.Service.Name, b.Service.Name), cmp.Compare(a.Family, b.Family))
	})
	for _, id := range ids {
		o := p.open[id]
		if o != nil && o.opened {
			continue
		}
		if o == nil {
			o = &port{}
			p.open[id] = o
		}
		o.on = wanted[id]
		p.listen(id, o)
		if o.err != nil {
			failed++
		}
	}
	p.h.cfg.Stats.Set("svcproxy_health_ports_failed", float64(failed))
	return failed
}

// listenOn returns where the port of a family is served: everywhere, or on the
// addresses that accept node ports.
func listenOn(f plan.Family, port uint16, node *plan.Node) where {
	w := where{network: "tcp4"}
	everywhere, loopback := netip.IPv4Unspecified(), netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if f == plan.IPv6 {
		w.network, everywhere, loopback = "tcp6", netip.IPv6Unspecified(), netip.IPv6Loopback()
	}
	if node == nil || node.NodePorts[f].All {
		w.addrs = []netip.AddrPort{netip.AddrPortFrom(everywhere, port)}
		return w
	}
	np := node.NodePorts[f]
	for _, a := range np.Addrs {
		w.addrs = append(w.addrs, netip.AddrPortFrom(a, port))
	}
	if np.Loopback {
		w.addrs = append(w.addrs, netip.AddrPortFrom(loopback, port))
	}
	return w
}

// listen opens a port on all its addresses, or on none.
func (p *ports) listen(id plan.HealthID, o *port) {
	said := o.err
	o.err = nil
	listeners := make([]net.Listener, 0, len(o.on.addrs))
	for _, a := range o.on.addrs {
		l, err := p.h.cfg.Listen(o.on.network, a.String())
		if err != nil {
			o.err = fmt.Errorf("listen on %s for the health check of Service %s: %w", a, id.Service, err)
			break
		}
		listeners = append(listeners, l)
	}
	if o.err != nil {
		for _, l := range listeners {
			_ = l.Close()
		}
		if said == nil || said.Error() != o.err.Error() {
			p.failed(id, o)
		}
		return
	}
	o.opened = true
	for _, l := range listeners {
		srv := newServer(p.handler(id), p.h.cfg.Log)
		o.servers = append(o.servers, srv)
		go func() {
			if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				p.h.cfg.Log.Error("a health-check node port is not served any more", "service", id.Service, "address", l.Addr().String(), "error", err)
			}
		}()
	}
	p.h.cfg.Log.Debug("health-check node port is served", "service", id.Service, "family", id.Family, "addresses", o.on.addrs)
}

func (p *ports) failed(id plan.HealthID, o *port) {
	p.h.cfg.Log.Error("a health-check node port cannot be served", "service", id.Service, "family", id.Family, "error", o.err, "retry", retryEvery)
	p.h.cfg.Notes([]plan.Note{{
		Kind: "Service", Namespace: id.Service.Namespace, Name: id.Service.Name, Reason: ReasonPortFailed, Warning: true,
		Message: fmt.Sprintf("%v; load balancers take this node for unhealthy. Free the port, or give the Service another spec.healthCheckNodePort. It is tried again every %s.", o.err, retryEvery),
	}})
}

func (o *port) close() {
	for _, s := range o.servers {
		_ = s.Close()
	}
	o.opened, o.servers = false, nil
}

// handler answers any method and path.
func (p *ports) handler(id plan.HealthID) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		p.mu.Lock()
		local := p.wanted[id].Local
		p.mu.Unlock()
		healthy := p.h.Healthy()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(local))
		if local == 0 || !healthy {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = fmt.Fprintf(w, portBody, id.Service.Namespace, id.Service.Name, local, healthy)
	})
}

// portBody has the layout that load balancers' operators know.
const portBody = `{
	"service": {
		"namespace": %q,
		"name": %q
	},
	"localEndpoints": %d,
	"serviceProxyHealthy": %t
}`
