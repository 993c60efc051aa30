package scenario

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// silence is how long nothing must come back for a flow to count as dropped.
const silence = time.Second

// flow is one line of the script: who talks to whom, and what must come of it.
type flow struct {
	from  *host
	proto lab.Proto
	to    []target
	want  outcome

	n      int // 0: enough
	within time.Duration
	every  time.Duration // pause between flows, one at a time; 0: none
	sport  uint16
	sticky bool
}

// outcome is what follows the arrow.
type outcome struct {
	end     lab.Outcome
	servers []string // with Answered
	src     string   // "", client, node or an address
	share   map[string]float64
	within  float64 // tolerance of share
}

// parseFlow reads [FLAGS] FROM PROTO ADDR:PORT -> OUTCOME.
func (w *world) parseFlow(args []string) (*flow, error) {
	f := &flow{}
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
	if len(args) < 5 || args[3] != "->" {
		return nil, usagef("want [FLAGS] FROM PROTO ADDR:PORT -> OUTCOME")
	}
	var err error
	if f.from, err = w.host(args[0]); err != nil {
		return nil, err
	}
	if f.proto, err = lab.ParseProto(args[1]); err != nil {
		return nil, usagef("%v", err)
	}
	if f.to, err = w.targets(args[2]); err != nil {
		return nil, err
	}
	f.want, err = parseOutcome(args[4:])
	return f, err
}

func (f *flow) flag(s string) (ok bool, err error) {
	k, v, _ := strings.Cut(s, "=")
	switch k {
	case "n":
		f.n, err = strconv.Atoi(v)
		if err == nil && f.n < 1 {
			err = fmt.Errorf("want a positive number")
		}
	case "within":
		f.within, err = time.ParseDuration(v)
	case "every":
		f.every, err = time.ParseDuration(v)
	case "sport":
		f.sport, err = parsePort(v)
	case "sticky":
		f.sticky = true
	default:
		return false, nil
	}
	if err != nil {
		return false, usagef("flag %q: %v", s, err)
	}
	return true, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err
}

func parseOutcome(args []string) (outcome, error) {
	var o outcome
	switch args[0] {
	case "refused":
		o.end = lab.Refused
	case "dropped":
		o.end = lab.Dropped
	case "unreachable":
		o.end = lab.Unreachable
	default:
		o.servers = strings.Split(args[0], "|")
		if slices.Contains(o.servers, "") {
			return o, usagef("outcome %q: an empty name", args[0])
		}
	}
	for _, a := range args[1:] {
		k, v, _ := strings.Cut(a, "=")
		var err error
		switch k {
		case "src":
			o.src = v
			if _, e := netip.ParseAddr(v); e != nil && v != "client" && v != "node" {
				err = usagef("outcome %q: want client, node or an address", a)
			}
		case "share":
			err = o.parseShare(v)
		default:
			err = usagef("outcome %q: want src= or share=", a)
		}
		if err != nil {
			return o, err
		}
		if o.end != lab.Answered {
			return o, usagef("outcome %q: nobody answers", a)
		}
	}
	return o, nil
}

// parseShare reads A:0.5,B:0.5~0.1.
func (o *outcome) parseShare(s string) error {
	list, tolerance, ok := strings.Cut(s, "~")
	if !ok {
		return usagef("share %q: want A:0.5,B:0.5~TOLERANCE", s)
	}
	var err error
	if o.within, err = strconv.ParseFloat(tolerance, 64); err != nil || o.within <= 0 {
		return usagef("share %q: tolerance %q: want a positive number", s, tolerance)
	}
	o.share = map[string]float64{}
	for _, e := range strings.Split(list, ",") {
		name, v, _ := strings.Cut(e, ":")
		p, err := strconv.ParseFloat(v, 64)
		if err != nil || !slices.Contains(o.servers, name) {
			return usagef("share %q: want SERVER:SHARE of a server in the outcome", e)
		}
		o.share[name] = p
	}
	return nil
}

// unlikely bounds the probability that a check fails by chance.
const unlikely = 1e-6

// attempts returns how many flows decide the outcome.
func (f *flow) attempts() int {
	switch {
	case f.n > 0:
		return f.n
	case f.want.end == lab.Dropped:
		return 2
	case f.want.end != lab.Answered:
		return 3
	}
	n := 20 // others that answer, or a client that does not stick, are seen by then
	if f.sticky {
		return n
	}
	for missed(f.want.servers, f.want.share, n) > unlikely {
		n++
	}
	if t := f.want.within; t > 0 {
		// The normal approximation of the binomial: z standard deviations must fit
		// into the tolerance.
		const z = 5
		for _, p := range f.want.share {
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

// sighting is how one attempt ended.
type sighting struct {
	end    lab.Outcome
	err    error
	answer lab.Answer
	local  netip.Addr
}

func (s sighting) String() string {
	if s.end == lab.Answered {
		return fmt.Sprintf("answered by %s, which saw %s", s.answer.Server, s.answer.Seen)
	}
	return fmt.Sprintf("%s (%v)", s.end, s.err)
}

// attempt opens one flow and asks once.
func attempt(h *lab.Host, d lab.Dialing) sighting {
	ctx, cancel := context.WithTimeout(context.Background(), silence)
	defer cancel()
	fl, err := h.Dial(ctx, d)
	if err != nil {
		return sighting{end: lab.OutcomeOf(err), err: err}
	}
	defer fl.Close()
	deadline, _ := ctx.Deadline()
	a, err := fl.Ask(time.Until(deadline))
	return sighting{end: lab.OutcomeOf(err), err: err, answer: a, local: fl.Local().Addr()}
}

// concurrent is how many flows of one check are open at a time.
const concurrent = 8

// check makes the attempts to one target and returns an error that names the first
// wrong one.
func (f *flow) check(h *lab.Host, t target, nodeAddrs []netip.Addr) error {
	n, workers := f.attempts(), concurrent
	d := lab.Dialing{Proto: f.proto, To: t.addr, SourcePort: f.sport}
	if f.sport != 0 || f.every != 0 {
		workers = 1 // one socket at a time can have the port
	}
	var mu sync.Mutex
	tally := tally{flow: f, total: n, counts: map[string]int{}, nodeAddrs: nodeAddrs}
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
				s := attempt(h, d)
				mu.Lock()
				tally.add(s)
				mu.Unlock()
				time.Sleep(f.every)
			}
		})
	}
	wg.Wait()
	if err := tally.result(); err != nil {
		return fmt.Errorf("%s from %s to %s: %w", f.proto, f.from.name, t.addr, err)
	}
	return nil
}

// tally collects the attempts of one check.
type tally struct {
	flow           *flow
	total, started int
	done           int
	counts         map[string]int // by server
	nodeAddrs      []netip.Addr
	err            error // the first wrong attempt
}

func (t *tally) add(s sighting) {
	t.done++
	if t.err != nil {
		return
	}
	if wrong := t.wrong(s); wrong != "" {
		t.err = fmt.Errorf("flow %d of %d %s%s", t.done, t.total, wrong, t.soFar())
		return
	}
	if s.end == lab.Answered {
		t.counts[s.answer.Server]++
	}
}

// wrong says what contradicts the expected outcome, "" if nothing does.
func (t *tally) wrong(s sighting) string {
	want := &t.flow.want
	if s.end != want.end {
		return fmt.Sprintf("was %s, want %s", s, want)
	}
	if s.end != lab.Answered {
		return ""
	}
	if !slices.Contains(want.servers, s.answer.Server) {
		return fmt.Sprintf("was %s, want %s", s, want)
	}
	if t.flow.sticky && len(t.counts) > 0 && t.counts[s.answer.Server] == 0 {
		return fmt.Sprintf("was %s, want the same server each time", s)
	}
	if !t.sawRight(s) {
		return fmt.Sprintf("was %s, want src=%s", s, want.src)
	}
	return ""
}

func (t *tally) sawRight(s sighting) bool {
	seen := s.answer.Seen.Addr().Unmap()
	switch t.flow.want.src {
	case "":
		return true
	case "client":
		return seen == s.local.Unmap()
	case "node":
		return slices.Contains(t.nodeAddrs, seen)
	}
	a, _ := netip.ParseAddr(t.flow.want.src)
	if a.Is4() && seen.Is6() { // a dual run
		a, _ = counterpart(a)
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
	var names []string
	for name := range t.counts {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (t *tally) result() error {
	if t.err != nil {
		return t.err
	}
	want := &t.flow.want
	if want.end == lab.Answered && !t.flow.sticky {
		for _, name := range want.servers {
			// With few flows, asked for by n=, not everybody can answer.
			if t.counts[name] == 0 && missed(want.servers, want.share, t.total) <= unlikely {
				return fmt.Errorf("%s answered none of %d flows%s", name, t.total, t.soFar())
			}
		}
	}
	for name, p := range want.share {
		if have := float64(t.counts[name]) / float64(t.total); math.Abs(have-p) > want.within {
			return fmt.Errorf("%s answered %.3f of %d flows, want %.3f within %.3f", name, have, t.total, p, want.within)
		}
	}
	return nil
}

func (o *outcome) String() string {
	if o.end == lab.Answered {
		return strings.Join(o.servers, "|")
	}
	return o.end.String()
}
