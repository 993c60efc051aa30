package flow

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestPulse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		at := func(ms int) time.Time { return began.Add(time.Duration(ms) * time.Millisecond) }
		takes := func(ms int) func() error {
			return func() error { time.Sleep(time.Duration(ms) * time.Millisecond); return nil }
		}
		p := &pulse{}
		p.beat(takes(100)) // to 100
		p.beat(takes(500)) // to 600
		p.beat(takes(400)) // to 1000
		for _, tt := range []struct {
			from, to int
			want     bool
		}{{0, 99, false}, {0, 100, true}, {50, 2000, true}, {700, 800, true}, {1000, 1100, true}, {1001, 1100, false}} {
			if got := p.during(Span{at(tt.from), at(tt.to)}); got != tt.want {
				t.Errorf("from %d to %d ms: behind is %t, want %t", tt.from, tt.to, got, tt.want)
			}
		}
		go p.beat(takes(1000)) // to 2000
		time.Sleep(100 * time.Millisecond)
		if p.late() || p.during(Span{at(1050), at(1100)}) {
			t.Error("behind after 100 ms of a beat")
		}
		time.Sleep(100 * time.Millisecond)
		if !p.late() || !p.during(Span{at(1050), at(1200)}) {
			t.Error("not behind after 200 ms of a beat")
		}
		time.Sleep(time.Second)
		if p.late() {
			t.Error("behind after the beat")
		}
	})
}

// What the machine is asked is answered.
func TestMachineBeats(t *testing.T) {
	if _, err := machine(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * beatEvery)
	p, _ := machine()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed != nil {
		t.Error(p.failed)
	}
}
