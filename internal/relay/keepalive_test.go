package relay

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// TCP asks both sides of an idle connection whether they are still there.
func TestIdleSidesAreAskedFor(t *testing.T) {
	r := mustStart(t, Options{KeepAlive: 2 * time.Second})
	s := r.NewService("default/web")
	endpoint := mustServe(t, echo)
	s.Update(servicePort(endpoint))
	ln := mustListen(t, r, plan.TCP, s)
	c := mustDial(t, ln.Addr())
	if _, err := c.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	// asked reports whether the kernel has such a timer for a socket, by the ends of its
	// local and its remote address as /proc has them.
	asked := func(local, remote string) bool {
		table, err := os.ReadFile("/proc/thread-self/net/tcp")
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(strings.Split(string(table), "\n"), func(line string) bool {
			const timer, keepAlive = 5, "02:"
			f := strings.Fields(line)
			return len(f) > timer && strings.HasSuffix(f[1], local) && strings.HasSuffix(f[2], remote) && strings.HasPrefix(f[timer], keepAlive)
		})
	}
	port := func(p uint16) string { return fmt.Sprintf(":%04X", p) }
	deadline := time.Now().Add(20 * time.Second)
	for _, side := range []struct{ name, local, remote string }{{"client", port(ln.Addr().Port()), ""}, {"endpoint", "", port(endpoint.Port())}} {
		for !asked(side.local, side.remote) {
			if time.Now().After(deadline) {
				t.Fatalf("the %s is not asked for", side.name)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
}
