//go:build chaos

package chaos

import (
	"flag"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	duration = flag.Duration("duration", 20*time.Second, "how long each mode is broken")
	seed     = flag.Uint64("seed", 1, "what decides about everything that happens")
	modes    = flag.String("modes", "iptables,nftables,userspace", "modes to break, with a comma between two")
	clock    = flag.Bool("clock", false, "let the clock jump; only on a machine of one's own")
	patience = flag.Duration("patience", 30*time.Second, "how long the proxy may take to be right again")
)

// action is one thing that happens to the proxy.
type action struct {
	name string
	do   func(*world)
	// breaks: rules go, so that requests may fail until they are back.
	breaks bool
}

// actions in the order in which the seed counts them.
func actions() []action {
	all := []action{
		{"kill -9", (*world).kill, false},
		{"restart", (*world).restart, false},
		{"stop and continue", (*world).freeze, false},
		{"API server restarts", (*world).restartAPI, false},
		{"watch falls silent", (*world).silence, false},
		{"connections break", (*world).disconnect, false},
		{"API is slow", (*world).slow, false},
		{"kernel calls fail", (*world).failWrites, false},
		{"rules are flushed", (*world).flush, true},
		{"an address comes or goes", (*world).changeAddress, false},
		{"a link goes and comes", (*world).cutLink, false},
		{"Services change", (*world).churn, false},
		{"Services change", (*world).churn, false},
		{"Services change", (*world).churn, false},
	}
	if *clock {
		all = append(all, action{"the clock jumps", (*world).jump, false})
	}
	return all
}

func TestChaos(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	binary := mustBuild(t)
	for _, mode := range strings.Split(*modes, ",") {
		t.Run(mode, func(t *testing.T) {
			w := mustWorld(t, binary, mode, rand.New(rand.NewPCG(*seed, 0)))
			w.suffer(*duration)
		})
	}
}

// suffer lets things happen for a time, a handful between two quiet moments.
func (w *world) suffer(d time.Duration) {
	all := actions()
	w.mustBeRight("the start")
	w.startLoad()
	rounds := 0
	for end := time.Now().Add(d); time.Now().Before(end); rounds++ {
		var round []action
		for range 1 + w.random.IntN(5) {
			round = append(round, all[w.random.IntN(len(all))])
		}
		var names []string
		for _, a := range round {
			names = append(names, a.name)
		}
		what := strings.Join(names, ", ")
		w.t.Logf("%s: round %d: %s", w.mode, rounds, what)
		// In userspace mode the process carries the connections itself.
		breaks := slices.ContainsFunc(round, func(a action) bool {
			return a.breaks || w.mode == "userspace" && (a.name == "kernel calls fail" || a.name == "kill -9" || a.name == "restart" || a.name == "stop and continue")
		})
		if breaks {
			w.endLoad(what)
		}
		for _, a := range round {
			a.do(w)
		}
		w.calm()
		w.mustBeRight(what)
		if breaks {
			w.startLoad()
		}
		if w.t.Failed() {
			w.t.Fatalf("seed %d, mode %s, round %d: %s", *seed, w.mode, rounds, what)
		}
	}
	w.endLoad("the last round")
	w.t.Logf("%s: %d rounds, seed %d", w.mode, rounds, *seed)
}
