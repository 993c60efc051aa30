package scenario

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// script carries out the commands of one run.
type script struct {
	ts      *testscript.TestScript // of the command being run
	w       *world
	objects objects
	stage   stage
	kernel  *kernel // the stage, unless it is the plan
	trace   func(format string, args ...any)
	begun   time.Time
	failure error // of the command that failed
}

// commands are the language beyond testscript's own.
func (s *script) commands() map[string]func(args []string, neg bool) error {
	plain := func(fn func([]string) error) func([]string, bool) error {
		return func(args []string, _ bool) error { return fn(args) }
	}
	cmds := map[string]func([]string, bool) error{
		"pod":      plain(func(a []string) error { return s.declare(pod, a) }),
		"remote":   plain(func(a []string) error { return s.declare(remote, a) }),
		"client":   plain(func(a []string) error { return s.declare(client, a) }),
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
	}
	if s.kernel == nil {
		return cmds
	}
	maps.Copy(cmds, map[string]func([]string, bool) error{
		stopProxy:   plain(s.stop),
		"cut":       plain(func(a []string) error { return s.link(a, false) }),
		"join":      plain(func(a []string) error { return s.link(a, true) }),
		"hold":      plain(s.hold),
		"held":      plain(s.held),
		"load":      plain(s.load),
		"in":        plain(s.in),
		"ipvs":      plain(s.kernel.ipvs),
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
			case isUsage(err):
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

func (s *script) declare(r role, args []string) error {
	h, err := s.w.declare(r, args)
	if err != nil {
		return err
	}
	return s.stage.declared(h)
}

func (s *script) listen(args []string, on bool) error {
	if len(args) != 2 {
		return usagef("want NAME PROTO:PORT")
	}
	h, err := s.w.host(args[0])
	if err != nil {
		return err
	}
	svc, err := parseService(args[1])
	if err != nil {
		return err
	}
	h.serves[svc] = on
	if !on {
		delete(h.serves, svc)
	}
	return s.stage.listen(h, svc, on)
}

func (s *script) node(args []string) error {
	set, err := parseSettings(args)
	if err != nil {
		return err
	}
	if set.name != nil {
		if err := s.removeObject(key{"Node", "", s.w.nodeName}); err != nil {
			return err
		}
		s.w.nodeName = *set.name
	}
	if set.zone != nil {
		s.w.zone = *set.zone
	}
	if set.podCIDRs != nil {
		s.w.podCIDRs = set.podCIDRs
	}
	if set.addrs != nil {
		old := s.w.node().addrs
		s.w.node().addrs = set.addrs
		if err := s.stage.nodeAddrs(old); err != nil {
			return err
		}
	}
	return s.putObject(s.w.nodeObject())
}

func (s *script) addr(args []string) error {
	if len(args) != 2 || args[0] != "add" && args[0] != "del" {
		return usagef("want add A or del A")
	}
	addrs, err := parseAddrs(args[1])
	if err != nil {
		return err
	}
	if s.w.families == Dual {
		if addrs, err = pair(addrs); err != nil {
			return err
		}
	}
	n := s.w.node()
	for _, a := range addrs {
		has := slices.Contains(n.addrs, a)
		switch {
		case args[0] == "add" && has:
			return usagef("the node has the address %s already", a)
		case args[0] == "add":
			n.addrs = append(n.addrs, a)
		case !has:
			return usagef("the node has no address %s", a)
		default:
			n.addrs = slices.DeleteFunc(slices.Clone(n.addrs), func(o netip.Addr) bool { return o == a })
		}
		if err := s.stage.addr(a, args[0] == "add"); err != nil {
			return err
		}
	}
	return nil
}

func (s *script) config(args []string) error {
	if len(args) != 1 {
		return usagef("want one FILE")
	}
	return s.stage.config([]byte(s.ts.ReadFile(args[0])))
}

func (s *script) stop(args []string) error {
	kill, rest := killFlag(args)
	if len(rest) > 0 {
		return usagef("want [-kill]")
	}
	return s.kernel.stopProxy(kill)
}

func (s *script) restart(args []string) error {
	kill, rest := killFlag(args)
	mode := ""
	if len(rest) == 1 && strings.HasPrefix(rest[0], "mode=") {
		mode, rest = strings.TrimPrefix(rest[0], "mode="), nil
	}
	if len(rest) > 0 {
		return usagef("want [-kill] [mode=M]")
	}
	return s.stage.restart(kill, mode)
}

func killFlag(args []string) (bool, []string) {
	rest := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return a == "-kill" || a == "--kill" })
	return len(rest) < len(args), rest
}

func (s *script) apply(args []string) error {
	if len(args) == 0 {
		return usagef("want FILE...")
	}
	for _, file := range args {
		objs, err := decode([]byte(s.ts.ReadFile(file)), s.w.families)
		if err != nil {
			return usagef("%s: %v", file, err)
		}
		for _, o := range objs {
			if err := s.putObject(o); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
	}
	return nil
}

func (s *script) remove(args []string) error {
	if len(args) != 2 {
		return usagef("want KIND NS/NAME")
	}
	_, gvk, err := newObject(args[0])
	if err != nil {
		return usagef("%v", err)
	}
	k := key{kind: gvk.Kind, name: args[1]}
	if ns, name, ok := strings.Cut(args[1], "/"); ok {
		k.namespace, k.name = ns, name
	} else if !clusterScoped(k.kind) {
		k.namespace = "default"
	}
	if !s.objects.has(k) {
		return usagef("there is no %s", k)
	}
	if err := s.removeObject(k); err != nil {
		return err
	}
	if twin := (key{k.kind, k.namespace, k.name + twinSuffix}); s.w.families == Dual && s.objects.has(twin) {
		return s.removeObject(twin)
	}
	return nil
}

func (s *script) putObject(o object) error {
	s.objects.stamp(o)
	return s.stage.put(o)
}

func (s *script) removeObject(k key) error {
	s.objects.forget(k)
	return s.stage.remove(k)
}

func (s *script) sync(args []string) error {
	within := 2 * settle
	for _, a := range args {
		v, ok := strings.CutPrefix(a, "within=")
		var err error
		if within, err = time.ParseDuration(v); !ok || err != nil {
			return usagef("%q: want within=D", a)
		}
	}
	return s.stage.sync(within)
}

func (s *script) flow(args []string) error {
	f, err := s.w.parseFlow(args)
	if err != nil {
		return err
	}
	return s.stage.flow(f)
}

func (s *script) health(args []string) error {
	c, err := s.w.parseHealth(args)
	if err != nil {
		return err
	}
	return s.stage.health(c)
}

func (s *script) link(args []string, up bool) error {
	if len(args) != 1 {
		return usagef("want NAME")
	}
	h, err := s.w.host(args[0])
	if err != nil {
		return err
	}
	if h.role == router {
		return usagef("host %s has no link of its own", h.name)
	}
	n, err := s.kernel.labHost(h)
	if err != nil {
		return err
	}
	if up {
		return n.Join(uplink)
	}
	return n.Cut(uplink)
}

// dialing reads FROM PROTO ADDR:PORT.
func (s *script) dialing(args []string) (*lab.Host, lab.Dialing, []target, error) {
	h, err := s.w.host(args[0])
	if err != nil {
		return nil, lab.Dialing{}, nil, err
	}
	proto, err := lab.ParseProto(args[1])
	if err != nil {
		return nil, lab.Dialing{}, nil, usagef("%v", err)
	}
	to, err := s.w.targets(args[2])
	if err != nil {
		return nil, lab.Dialing{}, nil, err
	}
	n, err := s.kernel.labHost(h)
	return n, lab.Dialing{Proto: proto}, to, err
}

func (s *script) hold(args []string) error {
	if len(args) < 4 {
		return usagef("want NAME FROM PROTO ADDR:PORT [sport=P] [every=D]")
	}
	h, d, to, err := s.dialing(args[1:4])
	if err != nil {
		return err
	}
	every := defaultPace
	for _, a := range args[4:] {
		k, v, _ := strings.Cut(a, "=")
		switch k {
		case "sport":
			d.SourcePort, err = parsePort(v)
		case "every":
			every, err = time.ParseDuration(v)
		default:
			err = fmt.Errorf("want sport= or every=")
		}
		if err != nil || every <= 0 {
			return usagef("%q: %v", a, err)
		}
	}
	name := args[0]
	for _, old := range s.kernel.held[name] {
		old.close()
	}
	delete(s.kernel.held, name)
	for _, t := range to {
		d.To = t.addr
		k, err := hold(name, h, d, t, every)
		if err != nil {
			return err
		}
		s.kernel.held[name] = append(s.kernel.held[name], k)
	}
	return nil
}

func (s *script) held(args []string) error {
	if len(args) != 3 || args[1] != "->" {
		return usagef("want NAME -> A, reset or silent")
	}
	all := s.kernel.held[args[0]]
	if len(all) == 0 {
		return usagef("there is no flow %q: open it with hold", args[0])
	}
	for _, k := range all {
		if err := k.expect(args[2]); err != nil {
			return err
		}
	}
	return nil
}

func (s *script) load(args []string) error {
	if len(args) == 2 {
		v, ok := strings.CutPrefix(args[1], "errors=")
		n, err := parsePort(v)
		all := s.kernel.loads[args[0]]
		if !ok || err != nil {
			return usagef("%q: want errors=N", args[1])
		}
		if len(all) == 0 {
			return usagef("there is no load %q", args[0])
		}
		for _, l := range all {
			if err := l.expect(int(n)); err != nil {
				return err
			}
		}
		return nil
	}
	if len(args) != 5 {
		return usagef("want NAME FROM PROTO ADDR:PORT rate=R, or NAME errors=N")
	}
	h, d, to, err := s.dialing(args[1:4])
	if err != nil {
		return err
	}
	rate, err := parseRate(args[4])
	if err != nil {
		return err
	}
	if len(s.kernel.loads[args[0]]) > 0 {
		return usagef("there is a load %q already", args[0])
	}
	for _, t := range to {
		d.To = t.addr
		s.kernel.loads[args[0]] = append(s.kernel.loads[args[0]], startLoad(args[0], h, d, rate))
	}
	return nil
}

// in runs a program; what it prints is for stdout, stderr and cmp.
func (s *script) in(args []string) error {
	if len(args) < 2 {
		return usagef("want HOST COMMAND...")
	}
	h, err := s.w.host(args[0])
	if err != nil {
		return err
	}
	env := []string{"PATH=" + s.ts.Getenv("PATH"), "HOME=" + s.ts.Getenv("HOME"), "WORK=" + s.ts.Getenv("WORK")}
	stdout, stderr, err := s.kernel.run(h, s.ts.MkAbs("."), env, args[1:])
	s.ts.Stdout().Write(stdout)
	s.ts.Stderr().Write(stderr)
	return err
}
