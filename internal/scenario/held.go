package scenario

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// held is a flow that is kept open: it sends at a fixed pace whether or not
// answers come, and remembers the last sign of the other side.
type held struct {
	name   string
	target target
	flow   *lab.Flow
	stop   context.CancelFunc

	mu    sync.Mutex // guards all below
	last  sighting
	at    time.Time // of last
	ended bool      // nothing more can come
}

// defaultPace is how often a held flow sends without every=.
const defaultPace = 100 * time.Millisecond

// hold opens a flow and keeps it.
func hold(name string, h *lab.Host, d lab.Dialing, t target, every time.Duration) (*held, error) {
	ctx, cancel := context.WithTimeout(context.Background(), silence)
	defer cancel()
	fl, err := h.Dial(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", t.addr, err)
	}
	if d.Proto != lab.UDP {
		if _, err := fl.Ask(silence); err != nil {
			fl.Close()
			return nil, fmt.Errorf("open %s: no answer: %w", t.addr, err)
		}
	}
	run, stop := context.WithCancel(context.Background())
	k := &held{name: name, target: t, flow: fl, stop: stop, at: time.Now()}
	go k.send(run, every)
	go k.receive(run)
	return k, nil
}

func (k *held) close() {
	k.stop()
	k.flow.Close()
}

func (k *held) send(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		// An error of a datagram is an ICMP answer to an earlier one.
		if err := k.flow.Send(); err != nil && !k.sign(sighting{end: lab.OutcomeOf(err), err: err}) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (k *held) receive(ctx context.Context) {
	for ctx.Err() == nil {
		a, err := k.flow.Receive()
		if !k.sign(sighting{end: lab.OutcomeOf(err), err: err, answer: a}) {
			return
		}
	}
}

// sign records what was seen and reports whether more can come.
func (k *held) sign(s sighting) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ended {
		return false
	}
	if s.end == lab.Dropped { // a datagram that the sender's own filter ate: silence
		return true
	}
	k.last, k.at = s, time.Now()
	k.ended = s.end != lab.Answered && (k.flow.Proto() != lab.UDP || s.end == lab.Broken)
	return !k.ended
}

// now says who answers, or how it ended, as far as signs after since tell. ok is
// false while there is nothing to say yet.
func (k *held) now(since time.Time) (s sighting, silent, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.ended:
		return k.last, false, true
	case k.at.After(since):
		return k.last, time.Since(k.at) >= silence, true
	case time.Since(since) >= silence:
		return k.last, true, true
	}
	return k.last, false, false
}

// settle bounds the wait for something that follows a sync.
const settle = 5 * time.Second

// expect waits until the flow is as wanted: a server's name or several, reset or
// silent.
func (k *held) expect(want string) error {
	since := time.Now()
	var have string
	err := eventually(settle, func() error {
		s, silent, ok := k.now(since)
		switch {
		case !ok:
			have = "undecided"
		case silent:
			have = "silent"
		case s.end == lab.Answered:
			have = s.answer.Server
		case s.end == lab.Refused:
			have = "reset"
		default:
			have = s.end.String()
		}
		if ok && slices.Contains(strings.Split(want, "|"), have) {
			return nil
		}
		if k.isOver() {
			return final(fmt.Errorf("ended: %s (%v)", have, s.err))
		}
		return fmt.Errorf("is answered by %s", have)
	})
	if err != nil {
		return fmt.Errorf("flow %s to %s %w, want %s", k.name, k.target.addr, err, want)
	}
	return nil
}

func (k *held) isOver() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.ended
}

// finalError ends a wait before its time.
type finalError struct{ error }

func final(err error) error { return finalError{err} }

func (e finalError) Unwrap() error { return e.error }

// eventually calls check until it returns nil, for at most d; it returns the last
// error.
func eventually(d time.Duration, check func() error) error {
	deadline := time.Now().Add(d)
	for {
		err := check()
		var f finalError
		if err == nil || errors.As(err, &f) || isUsage(err) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// load is a stream of requests in the background.
type load struct {
	name string
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu       sync.Mutex // guards all below
	answered int
	errors   []string
}

// startLoad sends rate requests a second, each over a connection of its own.
func startLoad(name string, h *lab.Host, d lab.Dialing, rate float64) *load {
	ctx, stop := context.WithCancel(context.Background())
	l := &load{name: name, stop: stop}
	l.wg.Go(func() {
		tick := time.NewTicker(time.Duration(float64(time.Second) / rate))
		defer tick.Stop()
		for {
			l.wg.Go(func() { l.request(h, d) })
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return l
}

func (l *load) request(h *lab.Host, d lab.Dialing) {
	start := time.Now()
	s := attempt(h, d)
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.end == lab.Answered {
		l.answered++
		return
	}
	l.errors = append(l.errors, fmt.Sprintf("to %s at %s: %s", d.To, start.Format("15:04:05.000"), s))
}

// expect ends the stream and compares its errors.
func (l *load) expect(want int) error {
	l.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.errors) != want {
		first := ""
		if len(l.errors) > 0 {
			first = "; first " + l.errors[0]
		}
		return fmt.Errorf("load %s: %d errors in %d requests, want %d%s",
			l.name, len(l.errors), l.answered+len(l.errors), want, first)
	}
	if l.answered == 0 && want == 0 {
		return fmt.Errorf("load %s: no request was sent", l.name)
	}
	return nil
}

func (l *load) close() {
	l.stop()
	l.wg.Wait()
}

// parseRate reads rate=R, requests per second.
func parseRate(s string) (float64, error) {
	v, ok := strings.CutPrefix(s, "rate=")
	r, err := strconv.ParseFloat(v, 64)
	if !ok || err != nil || r <= 0 {
		return 0, usagef("%q: want rate=REQUESTS per second", s)
	}
	return r, nil
}
