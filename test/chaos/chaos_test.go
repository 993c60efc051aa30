//go:build chaos

package chaos

import (
	"flag"
	"math/rand/v2"
	"os"
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
	legacy   = flag.Bool("legacy", false, "have iptables mode use the kernel's older store")
	program  = flag.String("program", "", "svcproxy, built with the tag faults; without, it is built")
)

// action is one thing that happens to the proxy. One that takes rules away says so
// itself, see world.lose.
type action struct {
	name string
	do   func(*world)
}

// actions in the order in which the seed counts them.
func actions() []action {
	all := []action{
		{"kill -9", (*world).kill},
		{"restart", (*world).restart},
		{"a successor comes", (*world).succeed},
		{"stop and continue", (*world).freeze},
		{"API server restarts", (*world).restartAPI},
		{"watch falls silent", (*world).silence},
		{"connections break", (*world).disconnect},
		{"API is slow", (*world).slow},
		{"kernel calls fail", (*world).failWrites},
		{"rules are flushed", (*world).flush},
		{"an address comes or goes", (*world).changeAddress},
		{"a link goes and comes", (*world).cutLink},
		{"Services change", (*world).churn},
		{"Services change", (*world).churn},
		{"Services change", (*world).churn},
	}
	if *clock {
		all = append(all, action{"the clock jumps", (*world).jump})
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
	rounds := 0
	for end := time.Now().Add(d); time.Now().Before(end); rounds++ {
		var round []action
		var names []string
		for range 1 + w.random.IntN(5) {
			a := all[w.random.IntN(len(all))]
			round, names = append(round, a), append(names, a.name)
		}
		what := strings.Join(names, ", ")
		w.t.Logf("%s: round %d: %s", w.mode, rounds, what)
		w.startLoad()
		for _, a := range round {
			a.do(w)
		}
		w.calm()
		w.mustBeRight(what)
		w.endLoad(what)
		if w.t.Failed() {
			w.t.Fatalf("seed %d, mode %s, round %d: %s", *seed, w.mode, rounds, what)
		}
	}
	if w.counted == 0 {
		w.t.Error("no request was sent while rules were in place")
	}
	w.t.Logf("%s: %d rounds, seed %d; %d requests while rules were in place, none of which failed; they were not for %v",
		w.mode, rounds, *seed, w.counted, w.gone.Round(time.Millisecond))
}
