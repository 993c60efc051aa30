package relay

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

func TestStreamsSpreadOverTheLoops(t *testing.T) {
	r := mustStart(t, Options{Loops: 3})
	s := r.NewService("default/web")
	s.Update(servicePort(mustServe(t, echo)))
	ln := mustListen(t, r, plan.TCP, s)
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // 4 MiB
	var clients sync.WaitGroup
	var open []*net.TCPConn
	for range 6 {
		c := mustDial(t, ln.Addr())
		open = append(open, c)
		clients.Go(func() {
			go func() { _, _ = c.Write(data) }()
			got := make([]byte, len(data))
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, data) {
				t.Errorf("other bytes came back, err %v", err)
			}
		})
	}
	clients.Wait()
	eventually(t, "each loop has two of six streams", func() bool {
		for _, l := range r.loops {
			if l.conns.streams.Load() != 2 || l.conns.n.Load() != 2 {
				return false
			}
		}
		return true
	})
	for _, c := range open { // all loops still serve what they were given
		mustExchange(t, c, "and on")
		_ = c.CloseWrite()
		if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
			t.Errorf("at the end: %d bytes, err %v", len(rest), err)
		}
	}
	eventually(t, "all have ended", func() bool { return s.Figures().Open == 0 && r.open.Load() == 0 })
	for _, l := range r.loops {
		if n := l.conns.streams.Load(); n != 0 {
			t.Errorf("%d streams are left", n)
		}
	}
}

// TestShutdownWhileStreamsMove ends a relay while connections are between its loops.
func TestShutdownWhileStreamsMove(t *testing.T) {
	for range 20 {
		r := mustStart(t, Options{Loops: 4})
		s := r.NewService("default/web")
		s.Update(servicePort(mustServe(t, echo)))
		ln := mustListen(t, r, plan.TCP, s)
		for range 8 {
			c := mustDial(t, ln.Addr())
			go func() {
				go func() { _, _ = io.Copy(io.Discard, c) }()
				for data := make([]byte, 1<<20); ; {
					if _, err := c.Write(data); err != nil {
						return
					}
				}
			}()
		}
		eventually(t, "bytes flow", func() bool { return s.Figures().ToClient > 1<<20 })
		ctx, cancel := contextThatEnds(t, time.Millisecond)
		_ = r.Shutdown(ctx) // resets them
		cancel()
		if n, used := r.open.Load(), r.limit.used.Load(); n != 0 || used != 0 {
			t.Fatalf("%d connections and %d descriptors are left", n, used)
		}
	}
}
