package flow

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// Held is a flow that is kept open: it sends at a fixed pace whether or not
// answers come, and remembers the last sign of the other side.
type Held struct {
	name   string
	target world.Target
	flow   *lab.Flow
	stop   context.CancelFunc

	mu    sync.Mutex // guards all below
	last  Sighting
	at    time.Time // of last
	ended bool      // nothing more can come
}

// DefaultPace is how often a held flow sends without every=.
const DefaultPace = 100 * time.Millisecond

// Hold opens a flow and keeps it.
func Hold(name string, h *lab.Host, d lab.Dialing, t world.Target, every time.Duration) (*Held, error) {
	ctx, cancel := context.WithTimeout(context.Background(), Patient(Silence))
	defer cancel()
	fl, err := h.Dial(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", t.Addr, err)
	}
	if d.Proto != lab.UDP {
		if _, err := fl.Ask(Patient(Silence)); err != nil {
			fl.Close()
			return nil, fmt.Errorf("open %s: no answer: %w", t.Addr, err)
		}
	}
	run, stop := context.WithCancel(context.Background())
	k := &Held{name: name, target: t, flow: fl, stop: stop, at: time.Now()}
	go k.send(run, every)
	go k.receive(run)
	return k, nil
}

// Close ends the flow.
func (k *Held) Close() {
	k.stop()
	k.flow.Close()
}

func (k *Held) send(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		// An error of a datagram is an ICMP answer to an earlier one.
		if err := k.flow.Send(); err != nil && !k.sign(Sighting{End: lab.OutcomeOf(err), err: err}) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (k *Held) receive(ctx context.Context) {
	for ctx.Err() == nil {
		a, err := k.flow.Receive()
		if !k.sign(Sighting{End: lab.OutcomeOf(err), err: err, Answer: a}) {
			return
		}
	}
}

// sign records what was seen and reports whether more can come.
func (k *Held) sign(s Sighting) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ended {
		return false
	}
	if s.End == lab.Dropped { // a datagram that the sender's own filter ate: silence
		return true
	}
	k.last, k.at = s, time.Now()
	k.ended = s.End != lab.Answered && (k.flow.Proto() != lab.UDP || s.End == lab.Broken)
	return !k.ended
}

// now says who answers, or how it ended, as far as signs after since tell. ok is
// false while there is nothing to say yet.
func (k *Held) now(since time.Time) (s Sighting, silent, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.ended:
		return k.last, false, true
	case k.at.After(since):
		return k.last, time.Since(k.at) >= Silence, true
	case time.Since(since) >= Silence:
		return k.last, true, true
	}
	return k.last, false, false
}

// Settle bounds the wait for something that follows a sync.
const Settle = 5 * time.Second

// Expect waits until the flow is as wanted: a server's name or several, reset or
// silent.
func (k *Held) Expect(want string) error {
	since := time.Now()
	var have string
	err := Eventually(Settle, func() error {
		over := k.isOver() // asked first: it may end while we look
		s, silent, ok := k.now(since)
		switch {
		case !ok:
			have = "undecided"
		case silent:
			have = "silent"
		case s.End == lab.Answered:
			have = s.Answer.Server
		case s.End == lab.Refused, s.End == lab.Closed: // the other side has ended it, by RST or by FIN
			have = "reset"
		default:
			have = s.End.String()
		}
		if ok && slices.Contains(strings.Split(want, "|"), have) {
			return nil
		}
		if over {
			return Final(fmt.Errorf("ended: %s (%v)", have, s.err))
		}
		return fmt.Errorf("is answered by %s", have)
	})
	if err != nil {
		return fmt.Errorf("flow %s to %s %w, want %s", k.name, k.target.Addr, err, want)
	}
	return nil
}

func (k *Held) isOver() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.ended
}

// finalError ends a wait before its time.
type finalError struct{ error }

// Final marks an error that waiting does not mend.
func Final(err error) error { return finalError{err} }

func (e finalError) Unwrap() error { return e.error }

// Patient is d on this machine: $SCENARIO_PATIENCE times as long, for one that is slow
// as an emulated one is.
func Patient(d time.Duration) time.Duration {
	n, err := strconv.Atoi(os.Getenv("SCENARIO_PATIENCE"))
	if err != nil {
		return d
	}
	return time.Duration(max(n, 1)) * d
}

// Eventually calls check until it returns nil, for at most d, see Patient; it returns
// the last error.
func Eventually(d time.Duration, check func() error) error {
	return Until(time.Now().Add(Patient(d)), check)
}

// Until calls check until it returns nil, and at the deadline for the last time; it
// returns the last error.
func Until(deadline time.Time, check func() error) error {
	for {
		err := check()
		var f finalError
		if err == nil || errors.As(err, &f) || world.IsUsage(err) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}
