package scenario

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/subject"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// PlanOnly is the mode that evaluates flows on the plan, without a kernel.
const PlanOnly = "plan"

// Runner runs scenarios against one program.
type Runner struct {
	Subject subject.Subject
	FromAPI bool // objects over the Kubernetes API; else from files
	// Keep leaves the namespaces and files of each run; the result names them.
	Keep bool
	// Trace receives every command with its time, nil: nobody.
	Trace func(c Case, line string)
}

// Case is one run of a scenario.
type Case struct {
	*Scenario
	Mode     string
	Families world.Families
}

// String names the case: "clusterip/iptables/dual".
func (c Case) String() string {
	s := c.Name + "/" + c.Mode
	if c.Families != world.AsWritten {
		s += "/" + c.Families.String()
	}
	return s
}

// Cases lists the runs of scenarios in modes.
func Cases(all []*Scenario, modes []string) []Case {
	var out []Case
	for _, s := range all {
		for _, m := range modes {
			for _, f := range s.Families {
				out = append(out, Case{s, m, f})
			}
		}
	}
	return out
}

// Verdict is how a case ended.
type Verdict uint8

const (
	Passed Verdict = iota
	Failed
	Skipped
)

func (v Verdict) String() string { return [...]string{"ok", "FAIL", "skip"}[v] }

// Result is the outcome of one case.
type Result struct {
	Case
	Verdict Verdict
	// Detail is what failed and what was seen, or what is missing; one line or more.
	Detail string
	// Log is the script's log, with what the proxy printed if it failed.
	Log  string
	Took time.Duration
	Kept []string // namespaces and folders left by Keep
}

// Run runs one case. Cases may run at the same time.
func (r *Runner) Run(c Case) Result {
	start := time.Now()
	res := Result{Case: c}
	if c.Mode != PlanOnly && os.Geteuid() != 0 {
		res.Verdict, res.Detail = Skipped, "needs root: network namespaces"
		return res
	}
	if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil && c.Mode != PlanOnly && c.Families >= world.Only6 {
		res.Verdict, res.Detail = Skipped, "needs IPv6 in the kernel"
		return res
	}
	if c.API && !r.FromAPI && c.Mode != PlanOnly {
		res.Verdict, res.Detail = Skipped, "needs the objects served over the API (--feed api)"
		return res
	}
	if err := r.run(c, &res); err != nil {
		res.Verdict, res.Detail = Failed, err.Error()
	}
	res.Took = time.Since(start)
	return res
}

func (r *Runner) run(c Case, res *Result) (err error) {
	dir, err := os.MkdirTemp("", "scenario-")
	if err != nil {
		return fmt.Errorf("make a folder for the run: %w", err)
	}
	if r.Keep {
		res.Kept = append(res.Kept, dir)
	} else {
		defer os.RemoveAll(dir)
	}
	file := filepath.Join(dir, c.Name+".txtar")
	if err := os.WriteFile(file, txtar.Format(c.script(c.Families, c.Mode == PlanOnly)), 0o644); err != nil {
		return err
	}
	s, err := r.newScript(c, dir)
	if err != nil {
		return err
	}
	t := &recorder{}
	t.run(func() {
		testscript.RunT(t, testscript.Params{
			Files:       []string{file},
			Cmds:        s.testscriptCommands(),
			Condition:   func(cond string) (bool, error) { return r.condition(c, cond) },
			WorkdirRoot: dir,
			Setup: func(e *testscript.Env) error {
				if len(r.Subject.Command) > 0 {
					e.Setenv("SUBJECT", r.Subject.Command[0])
				}
				e.Setenv("CONFIG", filepath.Join(dir, subject.ConfigDir, subject.SettingsName))
				return nil
			},
		})
	})
	s.report(t, res)
	if s.kernel != nil && s.kernel.proxy != nil && res.Verdict == Passed {
		if err := s.kernel.alive(); err != nil { // nobody has noticed
			return errors.Join(err, s.stage.close())
		}
	}
	if r.Keep && s.kernel != nil && s.kernel.net != nil {
		names, err := s.kernel.net.Keep(fmt.Sprintf("%s-%d-", strings.ReplaceAll(c.String(), "/", "-"), os.Getpid()))
		res.Kept = append(res.Kept, names...)
		if err != nil {
			return err
		}
	}
	return s.stage.close()
}

func (r *Runner) newScript(c Case, dir string) (*script, error) {
	s := &script{w: world.New(c.Families), begun: time.Now(), trace: func(string, ...any) {}}
	if r.Trace != nil {
		s.trace = func(format string, args ...any) { r.Trace(c, fmt.Sprintf(format, args...)) }
	}
	if c.Mode == PlanOnly {
		s.stage = newEvaluation(s.w)
	} else {
		k, err := newKernel(s.w, r.Subject, c.Mode, r.FromAPI, dir)
		if err != nil {
			return nil, err
		}
		s.stage, s.kernel = k, k
	}
	for _, o := range s.w.GivenObjects() {
		if err := s.putObject(o); err != nil {
			return nil, errors.Join(err, s.stage.close())
		}
	}
	return s, nil
}

// report turns what testscript saw into the result.
func (s *script) report(t *recorder, res *Result) {
	res.Log = t.log.String()
	switch {
	case t.skipped:
		res.Verdict, res.Detail = Skipped, t.reason
	case t.failed:
		res.Verdict = Failed
		if s.failure != nil {
			res.Detail = s.failure.Error()
		}
		if line := t.failure(); s.failure == nil {
			res.Detail = line
		} else if at, _, ok := strings.Cut(line, ": "); ok {
			res.Detail = at + ": " + res.Detail // file and line
		}
		if s.kernel != nil {
			res.Log += "\nthe proxy said:\n" + s.kernel.out.String()
		}
	}
}

// knownModes are those that a script may ask about: the program's, and those that a
// kube-proxy has.
var knownModes = []string{"iptables", "nftables", "ipvs", "userspace", "ebpf", "kernelspace"}

// condition decides what is in brackets, beyond testscript's own.
func (r *Runner) condition(c Case, cond string) (bool, error) {
	kind, v, _ := strings.Cut(cond, ":")
	switch kind {
	case "mode":
		if v == c.Mode || v == PlanOnly || slices.Contains(knownModes, v) {
			return c.Mode == v, nil
		}
	case "subject":
		return r.Subject.Name == v, nil
	case "feed":
		return r.FromAPI == (v == "api"), nil
	case "family":
		switch v {
		case "4":
			return c.Families != world.Only6, nil
		case "6":
			_, err := os.Stat("/proc/sys/net/ipv6")
			return c.Families != world.Only4 && err == nil, nil
		case "dual":
			return c.Families == world.Dual, nil
		}
	case "kernel":
		switch v {
		case "ipvs":
			return hasIPVS(), nil
		case "sctp":
			return lab.HasSCTP() || c.Mode == PlanOnly, nil
		}
	}
	return false, fmt.Errorf("unknown condition %q", cond)
}

// hasIPVS reports whether the kernel has ip_vs, built in, loaded or loadable.
func hasIPVS() bool {
	for _, f := range []string{"/proc/net/ip_vs", "/sys/module/ip_vs"} {
		if _, err := os.Stat(f); err == nil {
			return true
		}
	}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return false
	}
	dep, err := os.ReadFile(filepath.Join("/lib/modules", strings.TrimSpace(string(release)), "modules.dep"))
	return err == nil && strings.Contains(string(dep), "/ip_vs.ko")
}

// recorder is testscript's T: it runs one script and keeps what it says.
type recorder struct {
	mu      sync.Mutex
	log     strings.Builder
	failed  bool
	skipped bool
	reason  string
}

// run calls f on a goroutine of its own, which FailNow and Skip end.
func (t *recorder) run(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				t.Log(fmt.Sprintf("FAIL: panic: %v", p))
				t.failed = true
			}
		}()
		f()
	}()
	<-done
}

func (t *recorder) Run(_ string, f func(testscript.T)) { t.run(func() { f(t) }) }
func (t *recorder) Parallel()                          {}
func (t *recorder) Verbose() bool                      { return false }

func (t *recorder) Log(args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	fmt.Fprintln(&t.log, args...)
}

func (t *recorder) FailNow() {
	t.failed = true
	runtime.Goexit()
}

func (t *recorder) Fatal(args ...any) {
	t.Log(append([]any{"FAIL:"}, args...)...)
	t.FailNow()
}

func (t *recorder) Skip(args ...any) {
	t.skipped, t.reason = true, strings.TrimSpace(fmt.Sprint(args...))
	runtime.Goexit()
}

// failure is testscript's own line about it.
func (t *recorder) failure() string {
	lines := strings.Split(t.log.String(), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if l, ok := strings.CutPrefix(lines[i], "FAIL: "); ok {
			file, rest, _ := strings.Cut(l, ": ")
			return filepath.Base(file) + ": " + rest
		}
	}
	return "failed"
}
