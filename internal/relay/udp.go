package relay

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/balance"
	"github.com/svcproxy/svcproxy/internal/relay/socket"
)

// flow is one UDP client of a listener, with a connected socket to its endpoint.
type flow struct {
	in       *datagrams
	key      flowKey
	service  *Service
	endpoint *balance.Endpoint
	fd       int
	watch    watch

	toEndpoint, toClient socket.Peer

	prev, next *flow // in flows, by last use
	used       time.Time
}

type flowKey struct {
	client netip.AddrPort
	local  netip.Addr // where the client's datagrams arrive, and answers leave from
}

// datagrams is a UDP listener in its loop.
type datagrams struct {
	*served
	table map[flowKey]*flow
	last  *flow // of the last datagram: the next one is often of the same
}

// flows are all UDP flows of a loop, and the buffers that they share.
type flows struct {
	loop  *loop
	head  flow // a ring around it: only prev and next; the longest unused first
	n     int
	timer timer

	requests *socket.Inbox
	answers  *socket.Inbox
	used     int // slots of answers that are in back
	out      *socket.Outbox
	back     *socket.Outbox

	icmp     *socket.ICMP
	told     int // errors sent in the second that ends at tellAgain
	tellNext time.Time
}

const (
	// datagramsAtOnce is how many datagrams, or runs of them, are read in one call.
	datagramsAtOnce = 64
	// errorsPerSecond is how many ICMP errors each loop sends.
	errorsPerSecond = 1000
)

// datagramsOf serves a UDP listener.
func (l *loop) datagramsOf(s *served) *datagrams {
	if l.flows == nil {
		fs := &flows{
			loop:     l,
			requests: socket.NewInbox(datagramsAtOnce),
			answers:  socket.NewInbox(datagramsAtOnce),
			out:      socket.NewOutbox(datagramsAtOnce),
			back:     socket.NewOutbox(datagramsAtOnce),
			icmp:     socket.NewICMP(),
		}
		fs.head.prev, fs.head.next = &fs.head, &fs.head
		fs.timer = timer{f: fs.expire, index: -1}
		l.flows = fs
	}
	return &datagrams{served: s, table: make(map[flowKey]*flow)}
}

// ready passes on what clients have sent.
func (d *datagrams) ready(uint32) {
	fs := d.loop.flows
	n, err := fs.requests.Receive(d.fd, 0)
	if err != nil {
		return // nothing there, or the error of an answer that could not be delivered
	}
	for i := range n {
		local, segment := fs.requests.Details(i)
		f := d.flowOf(i, flowKey{fs.requests.From(i), local})
		if f == nil {
			continue
		}
		fs.touch(f)
		data := fs.requests.Data(i)
		f.service.meter.fromClient.Add(uint64(len(data)))
		fs.out.Put(f.fd, &f.toEndpoint, data, segment)
	}
	fs.out.Send()
}

// flowOf returns the flow of the datagrams in slot i, a new one if need be; nil if
// they lead nowhere.
func (d *datagrams) flowOf(i int, key flowKey) *flow {
	f := d.last
	if f == nil || f.key != key {
		f = d.table[key]
	}
	if f != nil && f.endpoint.Gone() {
		f.end()
		f = nil
	}
	if f == nil {
		f = d.begin(i, key)
	}
	d.last = f
	return f
}

// begin opens the flow of the datagrams in slot i.
func (d *datagrams) begin(i int, key flowKey) *flow {
	fs := d.loop.flows
	local := netip.AddrPortFrom(key.local, d.config.Addr.Port())
	service, route := d.route(Flow{plan.UDP, key.client, local})
	if service == nil || route.Verdict == plan.Reject {
		if service != nil {
			service.meter.failed(NoEndpoint)
		}
		fs.tell(socket.PortUnreachable(key.client.Addr()), key.client, local)
		return nil
	}
	if route.Verdict == plan.Drop {
		service.meter.failed(NoEndpoint)
		return nil
	}
	if !d.relay.reserveFlow(d.loop, service) {
		service.meter.failed(NoDescriptors)
		return nil
	}
	e := service.balancer.Pick(key.client, route.Pool, nil)
	if e == nil {
		d.relay.freeFlow(service)
		service.meter.failed(NoEndpoint)
		fs.tell(socket.PortUnreachable(key.client.Addr()), key.client, local)
		return nil
	}
	f := &flow{in: d, key: key, service: service, endpoint: e, fd: -1, toClient: fs.requests.Answer(i, key.local)}
	if err := f.dial(route); err != nil {
		d.relay.freeFlow(service)
		service.balancer.Failed(e)
		service.meter.failed(ConnectFailed)
		d.relay.opts.Log.Debug("no flow to an endpoint", "service", service.name, "endpoint", e.Addr, "err", err)
		return nil
	}
	service.balancer.Connected(key.client.Addr(), e)
	service.meter.opened()
	d.users.Add(1) // answers leave by its socket
	d.table[key] = f
	fs.add(f)
	return f
}

func (f *flow) dial(route plan.Route) error {
	l := f.in.loop
	d := socket.Dialing{To: f.endpoint.Addr, Mark: l.relay.opts.Mark, UDP: true, Options: socket.DatagramOptions(f.endpoint.Addr.Addr())}
	if keepsClient(f.key.client.Addr(), f.endpoint.Addr.Addr(), route, f.service.balancer.Policy()) {
		d.From, d.Ports = f.key.client.Addr(), l.ports
	}
	fd, err := socket.Dial(d)
	if err != nil {
		return err
	}
	if f.watch, err = l.add(fd, unix.EPOLLIN, f); err != nil {
		unix.Close(fd)
		return err
	}
	f.fd = fd
	return nil
}

// ready passes on what the endpoint has sent, and errors.
func (f *flow) ready(events uint32) {
	fs := f.in.loop.flows
	if events&unix.EPOLLERR != 0 {
		_ = socket.Error(f.fd) // clears it; the queue says more
		for u, ok := socket.NextError(f.fd); ok; u, ok = socket.NextError(f.fd) {
			fs.tell(u, f.key.client, netip.AddrPortFrom(f.key.local, f.in.config.Addr.Port()))
		}
	}
	n, err := fs.answers.Receive(f.fd, fs.used)
	if err != nil {
		return
	}
	fs.touch(f)
	for i := range n {
		_, segment := fs.answers.Details(fs.used + i)
		data := fs.answers.Data(fs.used + i)
		f.service.meter.toClient.Add(uint64(len(data)))
		fs.back.Put(f.in.fd, &f.toClient, data, segment)
	}
	if fs.used += n; fs.used == fs.answers.Slots() {
		fs.flush()
	}
}

// flush sends the answers of all flows.
func (fs *flows) flush() {
	fs.back.Send()
	fs.used = 0
}

// end closes a flow.
func (f *flow) end() {
	f.in.loop.flows.out.Send() // what is for its socket
	f.in.loop.forget(f.watch)
	unix.Close(f.fd)
	f.leave()
}

// leave forgets a flow whose socket is not watched any more.
func (f *flow) leave() {
	fs := f.in.loop.flows
	fs.out.Send()
	fs.remove(f)
	delete(f.in.table, f.key)
	if f.in.last == f {
		f.in.last = nil
	}
	f.service.balancer.Release(f.endpoint)
	f.service.meter.open.Add(-1)
	f.in.relay.freeFlow(f.service)
	f.in.relay.oneLess()
	if f.in.Listener.users.Load() == 1 {
		fs.flush() // before the socket goes
	}
	f.in.release()
}

// endAll ends the flows of one listener.
func (d *datagrams) endAll() {
	for _, f := range d.table {
		f.end()
	}
}

// endAll ends all flows.
func (fs *flows) endAll(why Reason) {
	for fs.n > 0 {
		fs.head.next.service.meter.failed(why)
		fs.head.next.end()
	}
}

// tell passes an ICMP error on, unless too many were already.
func (fs *flows) tell(u socket.Unreachable, client, local netip.AddrPort) {
	if now := fs.loop.now; now.After(fs.tellNext) {
		fs.told, fs.tellNext = 0, now.Add(time.Second)
	}
	if fs.told++; fs.told > errorsPerSecond {
		return
	}
	if err := fs.icmp.Send(u, client, local); err != nil && fs.told == 1 {
		fs.loop.relay.opts.Log.Warn("cannot pass on that a datagram did not arrive", "err", err)
	}
}

func (fs *flows) add(f *flow) {
	f.used = fs.loop.now
	fs.n++
	fs.loop.relay.open.Add(1)
	fs.link(f)
	if fs.timer.index < 0 {
		fs.loop.timers.push(&fs.timer, f.used.Add(fs.loop.relay.opts.UDPTimeout))
	}
}

func (fs *flows) link(f *flow) {
	f.prev, f.next = fs.head.prev, &fs.head
	f.prev.next, fs.head.prev = f, f
}

func (fs *flows) remove(f *flow) {
	f.prev.next, f.next.prev = f.next, f.prev
	fs.n--
}

func (fs *flows) touch(f *flow) {
	f.used = fs.loop.now
	if f.next != &fs.head {
		f.prev.next, f.next.prev = f.next, f.prev
		fs.link(f)
	}
}

// expire ends the flows that were idle for too long, and comes back for the next.
func (fs *flows) expire() {
	timeout := fs.loop.relay.opts.UDPTimeout
	for fs.n > 0 && fs.loop.now.Sub(fs.head.next.used) >= timeout {
		fs.head.next.end()
	}
	if fs.n > 0 {
		fs.loop.timers.push(&fs.timer, fs.head.next.used.Add(timeout))
	}
}

// makeRoom ends the flow that was idle the longest, of a Service or, with nil, of all;
// false: there is none. A loop without UDP listeners has nil flows.
func (fs *flows) makeRoom(of *Service) bool {
	if fs == nil {
		return false
	}
	for f := fs.head.next; f != &fs.head; f = f.next {
		if of == nil || f.service == of {
			f.service.meter.failed(GaveWay)
			f.end()
			return true
		}
	}
	return false
}

// reserveFlow counts one more flow, and its descriptor; false: there is no room, and
// none can be made.
func (r *Relay) reserveFlow(l *loop, s *Service) bool {
	if r.flows.Add(1) > int64(r.opts.MaxFlows) && !l.flows.makeRoom(nil) {
		r.flows.Add(-1)
		return false
	}
	if !r.limit.takeFor(s, 1) && !(l.makeRoom(s, 1) && r.limit.takeFor(s, 1)) {
		r.flows.Add(-1)
		return false
	}
	return true
}

func (r *Relay) freeFlow(s *Service) {
	r.flows.Add(-1)
	r.limit.giveFor(s, 1)
}
