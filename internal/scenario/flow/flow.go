// Package flow is what a script says of traffic and how it is put to the test: flows
// that are opened and counted, flows that are held open, and load in the background.
package flow

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// Silence is how long nothing must come back for a flow to count as dropped.
const Silence = time.Second

// Spec is one line of the script: who talks to whom, and what must come of it.
type Spec struct {
	From  *world.Host
	Proto lab.Proto
	To    []world.Target
	Want  Outcome

	Within time.Duration // retry for so long; 0: once
	Sport  uint16        // source port; 0: any
	Sticky bool          // one server answers all

	// PassesOn reports whether an address is a Service's outside of Service ranges, at a
	// port that no Service has: the node sends on what comes for it.
	PassesOn func(netip.AddrPort) bool

	n     int           // 0: enough
	every time.Duration // pause between flows, one at a time; 0: none
}

// Outcome is what follows the arrow.
type Outcome struct {
	End     lab.Outcome
	Servers []string // with Answered
	Src     string   // "", client, node or an address
	Share   map[string]float64
	Within  float64 // tolerance of share
}

// Parse reads [FLAGS] FROM PROTO ADDR:PORT -> OUTCOME.
func Parse(w *world.World, args []string) (*Spec, error) {
	f := &Spec{}
	for len(args) > 0 {
		ok, err := f.flag(args[0])
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		args = args[1:]
	}
	if len(args) > 0 && strings.Contains(args[0], "=") {
		return nil, world.Usagef("flag %q: want n=, within=, sport=, every= or sticky", args[0])
	}
	if len(args) < 5 || args[3] != "->" {
		return nil, world.Usagef("want [FLAGS] FROM PROTO ADDR:PORT -> OUTCOME")
	}
	var err error
	if f.From, err = w.Host(args[0]); err != nil {
		return nil, err
	}
	if f.Proto, err = lab.ParseProto(args[1]); err != nil {
		return nil, world.Usagef("%v", err)
	}
	if f.To, err = w.Targets(args[2]); err != nil {
		return nil, err
	}
	if f.Within == 0 && f.To[0].Addr.Addr().IsLoopback() {
		f.Within = Settle // what serves there follows a sync in the background
	}
	f.Want, err = parseOutcome(args[4:])
	return f, err
}

func (f *Spec) flag(s string) (ok bool, err error) {
	k, v, valued := strings.Cut(s, "=")
	switch k {
	case "n":
		f.n, err = strconv.Atoi(v)
		if err == nil && f.n < 1 {
			err = fmt.Errorf("want a positive number")
		}
	case "within":
		f.Within, err = time.ParseDuration(v)
	case "every":
		f.every, err = time.ParseDuration(v)
	case "sport":
		f.Sport, err = ParsePort(v)
	case "sticky":
		if f.Sticky = true; valued {
			err = fmt.Errorf("it has no value")
		}
	default:
		return false, nil
	}
	if err != nil {
		return false, world.Usagef("flag %q: %v", s, err)
	}
	return true, nil
}

// ParsePort reads a port number.
func ParsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err
}

func parseOutcome(args []string) (Outcome, error) {
	var o Outcome
	switch args[0] {
	case "refused":
		o.End = lab.Refused
	case "dropped":
		o.End = lab.Dropped
	case "unreachable":
		o.End = lab.Unreachable
	default:
		o.Servers = strings.Split(args[0], "|")
		if slices.Contains(o.Servers, "") {
			return o, world.Usagef("outcome %q: an empty name", args[0])
		}
	}
	for _, a := range args[1:] {
		k, v, _ := strings.Cut(a, "=")
		var err error
		switch k {
		case "src":
			o.Src = v
			if _, e := netip.ParseAddr(v); e != nil && v != "client" && v != "node" {
				err = world.Usagef("outcome %q: want client, node or an address", a)
			}
		case "share":
			err = o.parseShare(v)
		default:
			err = world.Usagef("outcome %q: want src= or share=", a)
		}
		if err != nil {
			return o, err
		}
		if o.End != lab.Answered {
			return o, world.Usagef("outcome %q: nobody answers", a)
		}
	}
	return o, nil
}

// parseShare reads A:0.5,B:0.5~0.1.
func (o *Outcome) parseShare(s string) error {
	list, tolerance, ok := strings.Cut(s, "~")
	if !ok {
		return world.Usagef("share %q: want A:0.5,B:0.5~TOLERANCE", s)
	}
	var err error
	if o.Within, err = strconv.ParseFloat(tolerance, 64); err != nil || o.Within <= 0 {
		return world.Usagef("share %q: tolerance %q: want a positive number", s, tolerance)
	}
	o.Share = map[string]float64{}
	for _, e := range strings.Split(list, ",") {
		name, v, _ := strings.Cut(e, ":")
		p, err := strconv.ParseFloat(v, 64)
		if err != nil || !slices.Contains(o.Servers, name) {
			return world.Usagef("share %q: want SERVER:SHARE of a server in the outcome", e)
		}
		o.Share[name] = p
	}
	return nil
}

// unlikely bounds the probability that a check fails by chance.
const unlikely = 1e-6

// attempts returns how many flows decide the outcome.
func (f *Spec) attempts() int {
	switch {
	case f.n > 0:
		return f.n
	case f.Want.End == lab.Dropped:
		return 2
	case f.Want.End != lab.Answered:
		return 3
	}
	n := 20 // others that answer, or a client that does not stick, are seen by then
	if f.Sticky {
		return n
	}
	for missed(f.Want.Servers, f.Want.Share, n) > unlikely {
		n++
	}
	if t := f.Want.Within; t > 0 {
		// The normal approximation of the binomial: z standard deviations must fit
		// into the tolerance.
		const z = 5
		for _, p := range f.Want.Share {
			n = max(n, int(math.Ceil(z*z*p*(1-p)/(t*t))))
		}
	}
	return n
}

// missed bounds the probability that one of the servers does not answer any of n
// flows, if they answer with the given or with equal shares.
func missed(servers []string, share map[string]float64, n int) float64 {
	sum := 0.0
	for _, s := range servers {
		p, ok := share[s]
		if !ok {
			p = 1 / float64(len(servers))
		}
		sum += math.Pow(1-p, float64(n))
	}
	return sum
}

// Sighting is how one attempt ended.
type Sighting struct {
	End    lab.Outcome
	Answer lab.Answer // with Answered
	err    error
	local  netip.Addr // the caller's own address
}

func (s Sighting) String() string {
	if s.End == lab.Answered {
		return fmt.Sprintf("answered by %s, which saw %s", s.Answer.Server, s.Answer.Seen)
	}
	return fmt.Sprintf("%s (%v)", s.End, s.err)
}

// Attempt opens one flow and asks once; nothing within wait counts as dropped.
func Attempt(h *lab.Host, d lab.Dialing, wait time.Duration) Sighting {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	fl, err := h.Dial(ctx, d)
	if err != nil {
		return Sighting{End: lab.OutcomeOf(err), err: err}
	}
	defer fl.Close()
	deadline, _ := ctx.Deadline()
	a, err := fl.Ask(time.Until(deadline))
	return Sighting{End: lab.OutcomeOf(err), err: err, Answer: a, local: fl.Local().Addr()}
}

// wait is how long one attempt waits: where silence is expected, a slow machine is not
// given more of it.
func (f *Spec) wait() time.Duration {
	if f.Want.End == lab.Dropped {
		return Silence
	}
	return Patient(Silence)
}

// concurrent is how many flows of one check are open at a time.
const concurrent = 8

// Check makes the attempts to one target and returns an error that names the first
// wrong one.
func (f *Spec) Check(h *lab.Host, t world.Target, nodeAddrs []netip.Addr) error {
	n, workers := f.attempts(), concurrent
	d := lab.Dialing{Proto: f.Proto, To: t.Addr, SourcePort: f.Sport}
	if f.Sport != 0 || f.every != 0 {
		workers = 1 // one socket at a time can have the port
	}
	var mu sync.Mutex
	tally := tally{flow: f, to: t, total: n, counts: map[string]int{}, nodeAddrs: nodeAddrs}
	var wg sync.WaitGroup
	for range min(workers, n) {
		wg.Go(func() {
			for {
				mu.Lock()
				if tally.started == n || tally.err != nil {
					mu.Unlock()
					return
				}
				tally.started++
				mu.Unlock()
				s := Attempt(h, d, f.wait())
				mu.Lock()
				tally.add(s)
				mu.Unlock()
				time.Sleep(f.every)
			}
		})
	}
	wg.Wait()
	if err := tally.result(); err != nil {
		return fmt.Errorf("%s from %s to %s: %w", f.Proto, f.From.Name, t.Addr, err)
	}
	return nil
}

// Meets reports whether a flow to a target may end so. A client for whom the next
// router has no way to an external address at a port that no Service has is refused as
// well as by the node.
func (f *Spec) Meets(end lab.Outcome, t world.Target) bool {
	return end == f.Want.End ||
		f.Want.End == lab.Refused && end == lab.Unreachable && f.PassesOn != nil && f.PassesOn(t.Addr)
}

// tally collects the attempts of one check.
type tally struct {
	flow           *Spec
	to             world.Target
	total, started int
	done           int
	counts         map[string]int // by server
	nodeAddrs      []netip.Addr
	err            error // the first wrong attempt
}

func (t *tally) add(s Sighting) {
	t.done++
	if t.err != nil {
		return
	}
	if wrong := t.wrong(s); wrong != "" {
		t.err = fmt.Errorf("flow %d of %d %s%s", t.done, t.total, wrong, t.soFar())
		return
	}
	if s.End == lab.Answered {
		t.counts[s.Answer.Server]++
	}
}

// wrong says what contradicts the expected outcome, "" if nothing does.
func (t *tally) wrong(s Sighting) string {
	want := &t.flow.Want
	if !t.flow.Meets(s.End, t.to) {
		return fmt.Sprintf("was %s, want %s", s, want)
	}
	if s.End != lab.Answered {
		return ""
	}
	if !slices.Contains(want.Servers, s.Answer.Server) {
		return fmt.Sprintf("was %s, want %s", s, want)
	}
	if t.flow.Sticky && len(t.counts) > 0 && t.counts[s.Answer.Server] == 0 {
		return fmt.Sprintf("was %s, want the same server each time", s)
	}
	if !t.sawRight(s) {
		return fmt.Sprintf("was %s, want src=%s", s, want.Src)
	}
	return ""
}

func (t *tally) sawRight(s Sighting) bool {
	seen := s.Answer.Seen.Addr().Unmap()
	switch t.flow.Want.Src {
	case "":
		return true
	case "client":
		return seen == s.local.Unmap()
	case "node":
		return slices.Contains(t.nodeAddrs, seen)
	}
	a, _ := netip.ParseAddr(t.flow.Want.Src)
	if a.Is4() && seen.Is6() { // a dual run
		a = world.Counterpart(a)
	}
	return seen == a
}

func (t *tally) soFar() string {
	if len(t.counts) == 0 {
		return ""
	}
	var parts []string
	for _, name := range t.names() {
		parts = append(parts, fmt.Sprintf("%s %d", name, t.counts[name]))
	}
	return " (so far: " + strings.Join(parts, ", ") + ")"
}

func (t *tally) names() []string {
	return slices.Sorted(maps.Keys(t.counts))
}

func (t *tally) result() error {
	if t.err != nil {
		return t.err
	}
	want := &t.flow.Want
	if want.End == lab.Answered && !t.flow.Sticky {
		for _, name := range want.Servers {
			// With few flows, asked for by n=, not everybody can answer.
			if t.counts[name] == 0 && missed(want.Servers, want.Share, t.total) <= unlikely {
				return fmt.Errorf("%s answered none of %d flows%s", name, t.total, t.soFar())
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want.Share)) {
		p := want.Share[name]
		if have := float64(t.counts[name]) / float64(t.total); math.Abs(have-p) > want.Within {
			return fmt.Errorf("%s answered %.3f of %d flows, want %.3f within %.3f", name, have, t.total, p, want.Within)
		}
	}
	return nil
}

func (o *Outcome) String() string {
	if o.End == lab.Answered {
		return strings.Join(o.Servers, "|")
	}
	return o.End.String()
}
