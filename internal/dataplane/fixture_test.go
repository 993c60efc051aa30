package dataplane

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/conntrack"
)

// world is a planner whose facts are the plan itself.
type world struct {
	changed chan struct{}

	mu      sync.Mutex // guards all below
	missing []string
	want    map[plan.ID]*plan.ServicePort
	held    map[plan.ID]*plan.ServicePort
	first   []plan.ID
	out     plan.Plan // as last handed out
	node    *plan.Node
	health  map[plan.HealthID]plan.HealthPort
	notes   []plan.Note
	trigger []time.Time
}

func newWorld() *world {
	w := &world{
		changed: make(chan struct{}, 1), want: map[plan.ID]*plan.ServicePort{}, held: map[plan.ID]*plan.ServicePort{},
		out: plan.Plan{Services: map[plan.ID]*plan.ServicePort{}, Health: map[plan.HealthID]plan.HealthPort{}},
	}
	w.node = &plan.Node{Name: "alder", NodePorts: map[plan.Family]plan.NodePorts{
		plan.IPv4: {All: true, Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.11")}},
	}}
	w.out.Node = w.node
	return w
}

func (w *world) edit(f func()) {
	w.mu.Lock()
	f()
	w.mu.Unlock()
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// set replaces or, without endpoints and frontends, removes a Service port.
func (w *world) set(sps ...*plan.ServicePort) {
	w.edit(func() {
		for _, sp := range sps {
			w.want[sp.ID] = sp
			delete(w.held, sp.ID) // its facts changed
		}
	})
}

func (w *world) remove(ids ...plan.ID) {
	w.edit(func() {
		for _, id := range ids {
			delete(w.want, id)
			delete(w.held, id)
		}
	})
}

func (w *world) Changed() <-chan struct{} { return w.changed }

func (w *world) Ready() (bool, []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.missing) == 0, w.missing
}

func (w *world) First() plan.Update {
	w.mu.Lock()
	defer w.mu.Unlock()
	u := plan.Update{Plan: &w.out, Partial: true}
	for _, id := range w.first {
		u.Changed = append(u.Changed, w.move(id, w.want[id])...)
	}
	return u
}

func (w *world) Update() plan.Update {
	w.mu.Lock()
	defer w.mu.Unlock()
	u := plan.Update{Plan: &w.out, Node: w.out.Node != w.node, Notes: w.notes, Triggers: w.trigger}
	w.notes, w.trigger = nil, nil
	w.out.Node = w.node
	ids := maps.Clone(w.want)
	maps.Copy(ids, w.out.Services)
	for _, id := range slices.SortedFunc(maps.Keys(ids), func(a, b plan.ID) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }) {
		want := w.want[id]
		if h, ok := w.held[id]; ok {
			want = h
		}
		u.Changed = append(u.Changed, w.move(id, want)...)
	}
	for id, p := range w.health {
		if w.out.Health[id] != p {
			u.Health = append(u.Health, id)
			w.out.Health[id] = p
		}
	}
	return u
}

func (w *world) move(id plan.ID, to *plan.ServicePort) []plan.Change {
	old := w.out.Services[id]
	if old == to {
		return nil
	}
	if to == nil {
		delete(w.out.Services, id)
	} else {
		w.out.Services[id] = to
	}
	return []plan.Change{{ID: id, Old: old, New: to}}
}

func (w *world) Hold(id plan.ID, sp *plan.ServicePort) { w.mu.Lock(); w.held[id] = sp; w.mu.Unlock() }
func (w *world) Release(id plan.ID)                    { w.mu.Lock(); delete(w.held, id); w.mu.Unlock() }

// kernel is a Backend that trusts its memory as far as the contract allows, so a
// change that the loop loses stays lost.
type kernel struct {
	takes time.Duration // of one Apply
	fail  func(n int, u plan.Update) error

	mu      sync.Mutex // guards all below
	applies []apply
	state   map[plan.ID]*plan.ServicePort
	trusted bool
	rereads int
	node    *plan.Node
	watch   func(ctx context.Context, disturbed func(string)) error
}

// apply is one call, with times since the start of the test.
type apply struct {
	start, end time.Time
	partial    bool
	changed    []string // "name old>new", by the endpoints' number
	err        error
}

func newKernel() *kernel { return &kernel{state: map[plan.ID]*plan.ServicePort{}} }

func (k *kernel) Apply(ctx context.Context, u plan.Update) error {
	a := apply{start: time.Now(), partial: u.Partial, changed: describe(u.Changed)}
	if k.takes > 0 {
		select {
		case <-time.After(k.takes):
		case <-ctx.Done():
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	a.end = time.Now()
	defer func() { k.applies = append(k.applies, a) }()
	if k.fail != nil {
		if a.err = k.fail(len(k.applies)+1, u); a.err != nil {
			clear(k.state) // the worst that can have happened
			return a.err
		}
	}
	if k.trusted {
		for _, c := range u.Changed {
			if c.New == nil {
				delete(k.state, c.ID)
			} else {
				k.state[c.ID] = c.New
			}
		}
	} else {
		k.state = maps.Clone(u.Plan.Services)
		k.trusted = !u.Partial
	}
	k.node = u.Plan.Node
	return nil
}

func (k *kernel) Invalidate() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.trusted = false
	k.rereads++
}

func (k *kernel) calls() []apply {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.applies)
}

// lines describes what the kernel forwards.
func (k *kernel) lines() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return lines(k.state)
}

func lines(m map[plan.ID]*plan.ServicePort) []string {
	var out []string
	for id, sp := range m {
		out = append(out, fmt.Sprintf("%s %d", id.Name, len(sp.Pools[plan.Cluster])))
	}
	slices.Sort(out)
	return out
}

func describe(changes []plan.Change) []string {
	var out []string
	n := func(sp *plan.ServicePort) string {
		if sp == nil {
			return "-"
		}
		return fmt.Sprint(len(sp.Pools[plan.Cluster]))
	}
	for _, c := range changes {
		out = append(out, c.ID.Name+" "+n(c.Old)+">"+n(c.New))
	}
	slices.Sort(out)
	return out
}

func tcp(name string) plan.ID {
	return plan.ID{Namespace: "default", Name: name, Port: "http", Protocol: plan.TCP, Family: plan.IPv4}
}

func udp(name string) plan.ID {
	return plan.ID{Namespace: "default", Name: name, Port: "dns", Protocol: plan.UDP, Family: plan.IPv4}
}

// service makes a Service port at 10.62.0.<host> with the given endpoints
// (10.61.2.<n>:5353) that all serve.
func service(id plan.ID, host byte, endpoints ...byte) *plan.ServicePort {
	sp := &plan.ServicePort{ID: id, Frontends: []plan.Frontend{{
		Kind: plan.ClusterIP, Addr: netip.AddrFrom4([4]byte{10, 62, 0, host}), Port: 53,
	}}}
	for _, e := range endpoints {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 61, 2, e}), 5353)
		sp.Pools[plan.Cluster] = append(sp.Pools[plan.Cluster], plan.Endpoint{Addr: a, Weight: 1})
		sp.Serving = append(sp.Serving, a)
	}
	return sp
}

// recorder is a Health, a Stats and a receiver of notes.
type recorder struct {
	mu      sync.Mutex // guards all below
	queued  time.Time
	updated []time.Time
	ports   int
	notes   []plan.Note
	figures map[string]float64
}

func (r *recorder) Queued(at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.queued.IsZero() {
		r.queued = at
	}
}

func (r *recorder) Updated(at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queued = time.Time{}
	r.updated = append(r.updated, at)
}

func (r *recorder) SetPorts(map[plan.HealthID]plan.HealthPort, *plan.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ports++
}

func (r *recorder) note(n []plan.Note) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes = append(r.notes, n...)
}

func (r *recorder) figure(v float64, add bool, metric string, labels ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.figures == nil {
		r.figures = map[string]float64{}
	}
	key := strings.Join(append([]string{metric}, labels...), " ")
	if add {
		v += r.figures[key]
	}
	r.figures[key] = v
}

func (r *recorder) Add(m string, v float64, l ...string)     { r.figure(v, true, m, l...) }
func (r *recorder) Set(m string, v float64, l ...string)     { r.figure(v, false, m, l...) }
func (r *recorder) Observe(m string, _ float64, l ...string) { r.figure(1, true, m+" samples", l...) }

func (r *recorder) get(key string) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.figures[key]
}

func (r *recorder) reasons() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, n := range r.notes {
		out = append(out, string(n.Reason)+" "+n.Name)
	}
	return out
}

// bench is a running loop on a clock that stands until everything waits.
type bench struct {
	*Loop
	t      *testing.T
	world  *world
	kernel *kernel
	rec    *recorder
	flows  *conntrack.Fake
	start  time.Time
	stop   func()
}

// onBench runs f with a loop that is set up by prepare and was started.
func onBench(t *testing.T, prepare func(*bench, *Config), f func(*bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bench{t: t, world: newWorld(), kernel: newKernel(), rec: &recorder{}, flows: &conntrack.Fake{}, start: time.Now()}
		cfg := Config{
			Mode: "test", Planner: b.world, Backend: b.kernel, Families: []plan.Family{plan.IPv4},
			Log: slog.New(slog.DiscardHandler), Stats: b.rec, Health: b.rec, Notes: b.rec.note, Flows: b.flows,
			Jitter:   func() float64 { return 0 },
			Settings: Settings{MinInterval: time.Second, SyncPeriod: 30 * time.Second},
		}
		if prepare != nil {
			prepare(b, &cfg)
		}
		b.Loop = New(cfg)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- b.Run(ctx) }()
		b.stop = sync.OnceFunc(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run: %v", err)
			}
		})
		defer b.stop()
		synctest.Wait()
		f(b)
	})
}

// pass lets time go by and returns when everything waits again.
func (b *bench) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (b *bench) wantLines(want ...string) {
	b.t.Helper()
	if have := b.kernel.lines(); !slices.Equal(have, want) {
		b.t.Errorf("the kernel has %q, want %q", have, want)
	}
}

func (b *bench) wantApplies(n int) []apply {
	b.t.Helper()
	c := b.kernel.calls()
	if len(c) != n {
		b.t.Fatalf("%d Applies, want %d: %+v", len(c), n, c)
	}
	return c
}
