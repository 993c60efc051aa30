package flow

import (
	"io"
	"net"
	"sync"
	"time"
)

// pulse tells whether the machine of the test keeps up: again and again it asks a server
// of its own over loopback, with no proxy between. When that takes long, so does every
// request of a load, whatever the proxy does.
type pulse struct {
	mu     sync.Mutex // guards all below
	since  time.Time  // of the beat under way
	slow   []Span     // the beats that took long
	failed error      // of the last beat
}

const (
	beatEvery = 50 * time.Millisecond
	beatLimit = 150 * time.Millisecond // it takes less than 1 ms on a machine at rest
)

// machine is the pulse of this process, which goes on once it has begun.
var machine = sync.OnceValues(func() (*pulse, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c) // it is the asker who notices
				c.Close()
			}()
		}
	}()
	p := &pulse{}
	go func() {
		for {
			p.beat(func() error { return echo(l.Addr().String()) })
			time.Sleep(beatEvery)
		}
	}()
	return p, nil
})

// echo asks a server over a new connection.
func echo(addr string) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	b := []byte{1}
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err = io.ReadFull(c, b)
	return err
}

// beat asks once. What fails counts for as long as it took.
func (p *pulse) beat(ask func() error) {
	began := time.Now()
	p.mu.Lock()
	p.since = began
	p.mu.Unlock()
	err := ask()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = err
	p.since = time.Time{}
	if now := time.Now(); now.Sub(began) > beatLimit {
		p.slow = append(p.slow, Span{began, now})
	}
}

// late reports whether the machine is behind right now.
func (p *pulse) late() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.since.IsZero() && time.Since(p.since) > beatLimit
}

// during reports whether the machine was behind at a time in s.
func (p *pulse) during(s Span) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.slow) - 1; i >= 0 && !p.slow[i].To.Before(s.From); i-- {
		if p.slow[i].overlaps(s) {
			return true
		}
	}
	return !p.since.IsZero() && time.Since(p.since) > beatLimit && !s.To.Before(p.since)
}
