package loopback

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
)

// notes collects remarks.
type notes struct {
	mu   sync.Mutex
	list []plan.Note
}

func (n *notes) add(more []plan.Note) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.list = append(n.list, more...)
}

func (n *notes) reasons() (out []plan.Reason) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, note := range n.list {
		out = append(out, note.Reason)
	}
	return out
}

// eventually fails if a condition does not come true.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if holds() {
			return
		}
	}
	t.Fatalf("it does not become true that %s", what)
}

// endpoint serves a name on a port of its own.
func endpoint(t *testing.T, name string) plan.Endpoint {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { // the name for each line
				defer c.Close()
				for s := bufio.NewScanner(c); s.Scan(); {
					fmt.Fprintln(c, name)
				}
			}()
		}
	}()
	return plan.Endpoint{Addr: netip.MustParseAddrPort(l.Addr().String()), OnNode: true, Weight: 1}
}

// freePort returns a port that nobody has.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

func service(name string, port uint16, endpoints ...plan.Endpoint) *plan.ServicePort {
	sp := &plan.ServicePort{
		ID:        plan.ID{Namespace: "default", Name: name, Port: "http", Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{{Kind: plan.NodePort, Port: port}},
		Pools:     [2][]plan.Endpoint{endpoints},
	}
	if len(endpoints) == 0 {
		sp.Frontends[0].Route[plan.FromNode] = plan.Route{Verdict: plan.Reject}
	}
	return sp
}

// world follows plans as the loop would.
type world struct {
	*Forwarder
	notes notes
	plan  plan.Plan
}

func run(t *testing.T) *world {
	t.Helper()
	w := &world{}
	w.Forwarder = New(Config{
		Families: []plan.Family{plan.IPv4}, Notes: w.notes.add, Relay: relay.Options{Loops: 1},
		Retry: 10 * time.Millisecond, Drain: 10 * time.Millisecond,
	})
	w.plan.Services = map[plan.ID]*plan.ServicePort{}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { w.Run(ctx) })
	t.Cleanup(func() { cancel(); done.Wait() })
	return w
}

// set changes the plan: loopback, and Service ports, without a port for one that goes.
func (w *world) set(loopback bool, changed ...*plan.ServicePort) {
	node := &plan.Node{NodePorts: map[plan.Family]plan.NodePorts{plan.IPv4: {Loopback: loopback}}}
	u := plan.Update{Node: true}
	for _, sp := range changed {
		old := w.plan.Services[sp.ID]
		w.plan.Services[sp.ID] = sp
		u.Changed = append(u.Changed, plan.Change{ID: sp.ID, Old: old, New: sp})
	}
	w.plan.Node = node
	u.Plan = &w.plan
	w.Follow(u)
}

func (w *world) remove(sp *plan.ServicePort) {
	old := w.plan.Services[sp.ID]
	delete(w.plan.Services, sp.ID)
	w.Follow(plan.Update{Plan: &w.plan, Changed: []plan.Change{{ID: sp.ID, Old: old}}})
}

// ask opens a connection, and says who answers.
func ask(port uint16) (string, net.Conn, error) {
	c, err := net.DialTimeout("tcp4", fmt.Sprintf("127.0.0.1:%d", port), 5*time.Second)
	if err != nil {
		return "", nil, err
	}
	name, err := again(c)
	return name, c, err
}

func again(c net.Conn) (string, error) {
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := fmt.Fprintln(c, "who"); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(line), err
}

func answers(port uint16, want string) func() bool {
	return func() bool {
		name, c, err := ask(port)
		if c != nil {
			c.Close()
		}
		return err == nil && name == want
	}
}

func refuses(port uint16) func() bool {
	return func() bool {
		_, c, err := ask(port)
		if c != nil {
			c.Close()
		}
		return errors.Is(err, unix.ECONNREFUSED)
	}
}

// A node port is served while loopback is selected, the Service is there and has an
// endpoint; open connections outlive its end, and others' coming and going.
func TestComesAndGoes(t *testing.T) {
	w := run(t)
	port, other := freePort(t), freePort(t)
	one, two := endpoint(t, "one"), endpoint(t, "two")
	web := service("web", port, one)
	w.set(false, web)
	w.set(true)
	eventually(t, "the node port is served", answers(port, "one"))
	_, open, err := ask(port)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	w.set(true, service("more", other, two))
	eventually(t, "another node port is served", answers(other, "two"))
	w.set(true, service("web", port, two))
	eventually(t, "it moves to the new endpoint", answers(port, "two"))
	w.set(true, service("web", port))
	eventually(t, "it is refused without endpoints", refuses(port))
	w.set(true, service("web", port, two))
	eventually(t, "it is served again", answers(port, "two"))
	w.remove(web)
	eventually(t, "it is refused without the Service", refuses(port))
	w.set(false)
	eventually(t, "the other is refused without loopback", refuses(other))
	if name, err := again(open); err != nil || name != "one" {
		t.Errorf("the open connection: %q, %v", name, err)
	}
	if r := w.notes.reasons(); len(r) > 0 {
		t.Errorf("remarks %v", r)
	}
}

// A port that another program has is named once, and served when it is free.
func TestPortTaken(t *testing.T) {
	w := run(t)
	squatter, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port, other := uint16(squatter.Addr().(*net.TCPAddr).Port), freePort(t)
	one := endpoint(t, "one")
	w.set(true, service("web", port, one), service("more", other, one))
	eventually(t, "others are served", answers(other, "one"))
	eventually(t, "the port is remarked on", func() bool { return len(w.notes.reasons()) == 1 })
	squatter.Close()
	eventually(t, "it is served once it is free", answers(port, "one"))
	r := w.notes.reasons()
	if len(r) != 2 || r[0] != ReasonPortTaken || r[1] != ReasonPortServed {
		t.Errorf("remarks %v, want one of each", r)
	}
	if n := w.notes.list[0]; n.Name != "web" || !n.Warning || !strings.Contains(n.Message, fmt.Sprint(port)) {
		t.Errorf("remark %+v", n)
	}
}

// A node port that passes from one Service to another is served by the new one.
func TestPortChangesHands(t *testing.T) {
	w := run(t)
	port := freePort(t)
	first, second := service("first", port, endpoint(t, "one")), service("second", port, endpoint(t, "two"))
	w.set(true, first)
	eventually(t, "the first is served", answers(port, "one"))
	old := w.plan.Services[first.ID]
	delete(w.plan.Services, first.ID)
	w.plan.Services[second.ID] = second
	w.Follow(plan.Update{Plan: &w.plan, Changed: []plan.Change{{ID: second.ID, New: second}, {ID: first.ID, Old: old}}})
	eventually(t, "the second is served", answers(port, "two"))
	eventually(t, "the figures are the second's", func() bool {
		s := w.Services()
		return s[first.ID] == nil && s[second.ID] != nil && s[second.ID].Figures().Total > 0
	})
}

// Who is not listened for: other protocols and families, sources that are not allowed,
// Services without a node port.
func TestWanted(t *testing.T) {
	sp := service("web", 30080, plan.Endpoint{Addr: netip.MustParseAddrPort("10.61.1.5:8080"), Weight: 1})
	on := map[plan.Family]bool{plan.IPv4: true}
	if got := wanted(sp, on); got != netip.MustParseAddrPort("127.0.0.1:30080") {
		t.Errorf("have %s", got)
	}
	change := func(f func(*plan.ServicePort)) *plan.ServicePort {
		c := *sp
		c.Frontends = append([]plan.Frontend(nil), sp.Frontends...)
		f(&c)
		return &c
	}
	for name, sp := range map[string]*plan.ServicePort{
		"none":         nil,
		"IPv6":         change(func(c *plan.ServicePort) { c.ID.Family = plan.IPv6 }),
		"SCTP":         change(func(c *plan.ServicePort) { c.ID.Protocol = plan.SCTP }),
		"no node port": change(func(c *plan.ServicePort) { c.Frontends[0].Kind = plan.ExternalIP }),
		"dropped":      change(func(c *plan.ServicePort) { c.Frontends[0].Route[plan.FromNode].Verdict = plan.Drop }),
		"not allowed": change(func(c *plan.ServicePort) {
			c.Frontends[0].Allow = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
		}),
		"local only":    change(func(c *plan.ServicePort) { c.Frontends[0].Route[plan.FromNode].Pool = plan.Local }),
		"weight is 0":   change(func(c *plan.ServicePort) { c.Pools[plan.Cluster] = []plan.Endpoint{{Addr: sp.Pools[0][0].Addr}} }),
		"off elsewhere": sp,
	} {
		if name == "off elsewhere" {
			on = map[plan.Family]bool{plan.IPv6: true}
		}
		if got := wanted(sp, on); got.IsValid() {
			t.Errorf("%s: listens on %s", name, got)
		}
		on = map[plan.Family]bool{plan.IPv4: true}
	}
}
