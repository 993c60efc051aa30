package scenario

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// script carries out the commands of one run.
type script struct {
	ts      *testscript.TestScript // of the command being run
	w       *world.World
	objects world.Identities
	exposed world.Exposed
	stage   stage
	kernel  *kernel // the stage, unless it is the plan
	trace   func(format string, args ...any)
	begun   time.Time
	failure error // of the command that failed

	nodeApplied bool // the Node under test is as a file of the script says
}

// commands are the language beyond testscript's own.
func (s *script) commands() map[string]func(args []string, neg bool) error {
	plain := func(fn func([]string) error) func([]string, bool) error {
		return func(args []string, _ bool) error { return fn(args) }
	}
	cmds := map[string]func([]string, bool) error{
		"pod":      plain(func(a []string) error { return s.declare(world.Pod, a) }),
		"remote":   plain(func(a []string) error { return s.declare(world.Remote, a) }),
		"client":   plain(func(a []string) error { return s.declare(world.Client, a) }),
		"listen":   plain(func(a []string) error { return s.listen(a, true) }),
		"unlisten": plain(func(a []string) error { return s.listen(a, false) }),
		"node":     plain(s.node),
		"addr":     plain(s.addr),
		"config":   plain(s.config),
		"start":    func(a []string, neg bool) error { return s.stage.start(a, neg) },
		"restart":  plain(s.restart),
		"apply":    plain(s.apply),
		"delete":   plain(s.remove),
		"sync":     plain(s.sync),
		"flow":     plain(s.flow),
		"health":   plain(s.health),
		"cut":      plain(func(a []string) error { return s.link(a, false) }),
		"join":     plain(func(a []string) error { return s.link(a, true) }),
		unmapped:   plain(func(a []string) error { return world.Usagef("%s", strings.Join(a, " ")) }),
	}
	if s.kernel == nil {
		cmds[tryExec] = s.tryExec
		return cmds
	}
	maps.Copy(cmds, map[string]func([]string, bool) error{
		stopProxy:   plain(s.stop),
		"hold":      plain(s.hold),
		"held":      plain(s.held),
		"load":      plain(s.load),
		"in":        plain(s.in),
		"ipvs":      plain(s.kernel.ipvs),
		"stray":     plain(s.stray),
		"conntrack": plain(s.kernel.conntrack),
		"event":     plain(s.kernel.event),
		"metric":    plain(s.kernel.metric),
		"log":       plain(s.kernel.log),
		"api":       plain(s.kernel.api),
	})
	return cmds
}

// testscriptCommands wraps the commands for testscript: negation, the trace, and
// the words of a failure.
func (s *script) testscriptCommands() map[string]func(*testscript.TestScript, bool, []string) {
	out := map[string]func(*testscript.TestScript, bool, []string){}
	for name, run := range s.commands() {
		out[name] = func(ts *testscript.TestScript, neg bool, args []string) {
			s.ts = ts
			shown := strings.TrimSuffix(name, "-proxy") + " " + strings.Join(args, " ")
			start := time.Now()
			err := run(args, neg)
			s.trace("%7.3fs +%.3fs %s", start.Sub(s.begun).Seconds(), time.Since(start).Seconds(), shown)
			switch {
			case world.IsUsage(err):
				err = fmt.Errorf("%s: %w", strings.TrimSpace(shown), err)
			case neg && err == nil:
				err = fmt.Errorf("%s: succeeded, but must fail", strings.TrimSpace(shown))
			case neg:
				ts.Logf("%v", err)
				return
			case err != nil:
				err = fmt.Errorf("%s: %w", strings.TrimSpace(shown), err)
			default:
				return
			}
			s.failure = err
			ts.Fatalf("%v", err)
		}
	}
	return out
}

// tryExec runs a program for what it prints; how it ends does not matter.
func (s *script) tryExec(args []string, neg bool) error {
	if len(args) > 0 && args[len(args)-1] != "&" {
		if err := s.ts.Exec(args[0], args[1:]...); err != nil {
			s.ts.Logf("%v", err)
		}
	}
	if neg {
		return errors.New("this is not looked at")
	}
	return nil
}

func (s *script) declare(r world.Role, args []string) error {
	h, err := s.w.Declare(r, args)
	if err != nil {
		return err
	}
	return s.stage.declared(h)
}

func (s *script) listen(args []string, on bool) error {
	if len(args) != 2 {
		return world.Usagef("want NAME PROTO:PORT")
	}
	h, err := s.w.Host(args[0])
	if err != nil {
		return err
	}
	svc, err := world.ParseServer(args[1])
	if err != nil {
		return err
	}
	if !on && !h.Serves[svc] {
		return world.Usagef("host %s does not listen on %s", h.Name, args[1])
	}
	if h.Serves[svc] = on; !on {
		delete(h.Serves, svc)
	}
	return s.stage.listen(h, svc, on)
}

func (s *script) node(args []string) error {
	set, err := s.w.ParseNodeSettings(args)
	if err != nil {
		return err
	}
	if s.kernel != nil && s.kernel.proxy != nil && (set.Name != nil || set.Addrs != nil) {
		return world.Usagef("the proxy runs; want zone= or podcidr=, or the commands addr add and addr del")
	}
	if set.Name != nil {
		if err := s.removeObject(world.Key{Kind: "Node", Name: s.w.NodeName}); err != nil {
			return err
		}
		s.w.NodeName = *set.Name
	}
	if set.Zone != nil {
		s.w.Zone = *set.Zone
	}
	if set.PodCIDRs != nil {
		s.w.PodCIDRs = set.PodCIDRs
	}
	if set.Addrs != nil {
		old := s.w.Node().Addrs
		s.w.Node().Addrs = set.Addrs
		if err := s.stage.nodeAddrs(old); err != nil {
			return err
		}
	}
	return s.putObject(s.w.NodeObject())
}

func (s *script) addr(args []string) error {
	if len(args) != 2 || args[0] != "add" && args[0] != "del" {
		return world.Usagef("want add A or del A")
	}
	addrs, err := world.ParseAddrs(args[1])
	if err != nil {
		return err
	}
	if s.w.Families == world.Dual {
		addrs = s.w.Families.Pair(addrs)
	}
	n := s.w.Node()
	before := s.w.NodeObject()
	for _, a := range addrs {
		has := slices.Contains(n.Addrs, a)
		switch {
		case args[0] == "add" && has:
			return world.Usagef("the node has the address %s already", a)
		case args[0] == "add":
			n.Addrs = append(n.Addrs, a)
		case !has:
			return world.Usagef("the node has no address %s", a)
		default:
			n.Addrs = slices.DeleteFunc(slices.Clone(n.Addrs), func(o netip.Addr) bool { return o == a })
		}
		if err := s.stage.addr(a, args[0] == "add"); err != nil {
			return err
		}
	}
	// The kubelet reports another address where that which it reported has gone.
	if after := s.w.NodeObject(); !s.nodeApplied && !reflect.DeepEqual(before, after) {
		return s.putObject(after)
	}
	return nil
}

func (s *script) config(args []string) error {
	if len(args) != 1 {
		return world.Usagef("want one FILE")
	}
	return s.stage.config([]byte(s.ts.ReadFile(args[0])))
}

func (s *script) stop(args []string) error {
	kill, rest := killFlag(args)
	if len(rest) > 0 {
		return world.Usagef("want [-kill]")
	}
	return s.kernel.stopProxy(kill)
}

func (s *script) restart(args []string) error {
	kill, rest := killFlag(args)
	beside := slices.Contains(rest, "-beside")
	rest = slices.DeleteFunc(rest, func(a string) bool { return a == "-beside" })
	mode := ""
	if len(rest) == 1 && strings.HasPrefix(rest[0], "mode=") {
		mode = strings.TrimPrefix(rest[0], "mode=")
		if !slices.Contains(knownModes, mode) {
			return world.Usagef("mode %q: want one of %s", mode, strings.Join(knownModes, ", "))
		}
		rest = nil
	}
	if len(rest) > 0 {
		return world.Usagef("want [-kill | -beside] [mode=M]")
	}
	return s.stage.restart(restarting{kill: kill, beside: beside, mode: mode})
}

// restarting says how a proxy is restarted.
type restarting struct {
	kill   bool
	beside bool   // the next process comes first
	mode   string // of the next process; "": as before
}

func killFlag(args []string) (bool, []string) {
	rest := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return a == "-kill" || a == "--kill" })
	return len(rest) < len(args), rest
}

func (s *script) apply(args []string) error {
	if len(args) == 0 {
		return world.Usagef("want FILE...")
	}
	for _, file := range args {
		objs, err := world.Decode([]byte(s.ts.ReadFile(file)), s.w.Families)
		if err != nil {
			return world.Usagef("%s: %v", file, err)
		}
		for _, o := range objs {
			s.nodeApplied = s.nodeApplied || world.KeyOf(o) == world.Key{Kind: "Node", Name: s.w.NodeName}
			if err := s.putObject(o); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
	}
	return nil
}

func (s *script) remove(args []string) error {
	if len(args) != 2 {
		return world.Usagef("want KIND NS/NAME")
	}
	_, gvk, err := world.NewObject(args[0])
	if err != nil {
		return world.Usagef("%v", err)
	}
	k := world.Key{Kind: gvk.Kind, Name: args[1]}
	if ns, name, ok := strings.Cut(args[1], "/"); ok {
		k.Namespace, k.Name = ns, name
	} else if !world.ClusterScoped(k.Kind) {
		k.Namespace = "default"
	}
	if !s.objects.Has(k) {
		return world.Usagef("there is no %s", k)
	}
	if err := s.removeObject(k); err != nil {
		return err
	}
	if twin := (world.Key{Kind: k.Kind, Namespace: k.Namespace, Name: k.Name + world.TwinSuffix}); s.w.Families == world.Dual && s.objects.Has(twin) {
		return s.removeObject(twin)
	}
	return nil
}

func (s *script) putObject(o world.Object) error {
	s.objects.Stamp(o)
	s.exposed.Put(o)
	return s.stage.put(o)
}

func (s *script) removeObject(k world.Key) error {
	s.objects.Forget(k)
	s.exposed.Forget(k)
	return s.stage.remove(k)
}

func (s *script) sync(args []string) error {
	within := 2 * flow.Settle
	for _, a := range args {
		v, ok := strings.CutPrefix(a, "within=")
		var err error
		if within, err = time.ParseDuration(v); !ok || err != nil {
			return world.Usagef("%q: want within=D", a)
		}
	}
	return s.stage.sync(within)
}

func (s *script) flow(args []string) error {
	f, err := flow.Parse(s.w, args)
	if err != nil {
		return err
	}
	f.PassesOn = s.exposed.Beside
	return s.stage.flow(f)
}

func (s *script) health(args []string) error {
	c, err := parseHealth(s.w, args)
	if err != nil {
		return err
	}
	return s.stage.health(c)
}

func (s *script) link(args []string, up bool) error {
	if len(args) != 1 {
		return world.Usagef("want NAME")
	}
	h, err := s.w.Host(args[0])
	if err != nil {
		return err
	}
	if h.Role == world.Router {
		return world.Usagef("host %s has no link of its own", h.Name)
	}
	h = h.Space()
	h.Cut = !up
	return s.stage.link(h)
}

// in runs a program; what it prints is for stdout, stderr and cmp.
func (s *script) in(args []string) error {
	if len(args) < 2 {
		return world.Usagef("want HOST COMMAND...")
	}
	h, err := s.w.Host(args[0])
	if err != nil {
		return err
	}
	env := []string{"PATH=" + s.ts.Getenv("PATH"), "HOME=" + s.ts.Getenv("HOME"), "WORK=" + s.ts.Getenv("WORK")}
	stdout, stderr, err := s.kernel.run(h, s.ts.MkAbs("."), env, args[1:])
	s.ts.Stdout().Write(stdout)
	s.ts.Stderr().Write(stderr)
	return err
}
