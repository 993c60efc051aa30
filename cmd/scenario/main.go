// Command scenario runs scenario files, from anywhere, against svcproxy or
// another Service proxy. docs/scenarios.md describes the language.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/svcproxy/svcproxy/internal/scenario"
	"github.com/svcproxy/svcproxy/internal/scenario/subject"
)

const usage = `Usage: scenario [flags] PATH...

Runs scenario files, or all *.txtar below folders, and prints one line for each
run: ok, FAIL with what was wrong, or skip with what is missing. The exit status
is 0 only if none failed.

Flags:
`

type options struct {
	modes           []string
	feed            string
	subject         string
	svcproxy        string
	parallel        int
	keep, trace, vv bool
	paths           []string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	ok, err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, pflag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "scenario:", err)
		os.Exit(2)
	case !ok:
		os.Exit(1)
	}
}

func parse(args []string) (*options, error) {
	o := &options{}
	fs := pflag.NewFlagSet("scenario", pflag.ContinueOnError)
	fs.StringSliceVar(&o.modes, "mode", nil, "`modes` to run in; \"plan\" evaluates flows without a kernel (default: all that the program has and the kernel supports)")
	fs.StringVar(&o.feed, "feed", "", "how objects reach the program: `files` or api (default files; api with --subject)")
	fs.StringVar(&o.subject, "subject", "", "another program under test, as a `command` in which {CONFIG}, {KUBECONFIG} and {NODE} are replaced")
	fs.StringVar(&o.svcproxy, "svcproxy", "", "a built svcproxy at `path` (default: build it)")
	fs.IntVar(&o.parallel, "parallel", 4, "`runs` at a time")
	fs.BoolVar(&o.keep, "keep", false, "leave the namespaces and files for a look")
	fs.BoolVar(&o.trace, "trace", false, "print every command with its time")
	fs.BoolVarP(&o.vv, "verbose", "v", false, "print the log of runs that fail, with what the program said")
	fs.Usage = func() { fmt.Fprint(os.Stderr, usage+fs.FlagUsages()) }
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	o.paths = fs.Args()
	switch {
	case len(o.paths) == 0:
		return nil, errors.New("no scenario given; want files or folders")
	case o.feed == "" && o.subject != "":
		o.feed = "api"
	case o.feed == "":
		o.feed = "files"
	case o.feed != "files" && o.feed != "api":
		return nil, fmt.Errorf("flag --feed: %q: want files or api", o.feed)
	}
	if o.feed == "files" && o.subject != "" && !strings.Contains(o.subject, "{MANIFESTS}") {
		return nil, errors.New("flag --feed: files with --subject needs {MANIFESTS} in the command; use --feed api")
	}
	if o.parallel < 1 {
		return nil, fmt.Errorf("flag --parallel: %d: want at least 1", o.parallel)
	}
	return o, nil
}

func run(ctx context.Context, args []string, stdout io.Writer) (ok bool, err error) {
	o, err := parse(args)
	if err != nil {
		return false, err
	}
	all, err := scenario.Find(o.paths)
	if err != nil {
		return false, err
	}
	dir, err := os.MkdirTemp("", "scenario-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	r := &scenario.Runner{FromAPI: o.feed == "api", Keep: o.keep}
	missing, err := o.prepare(ctx, r, dir)
	if err != nil {
		return false, err
	}
	p := &printer{to: stdout, verbose: o.vv}
	if o.trace {
		r.Trace = p.trace
	}
	cases := scenario.Cases(all, o.modes)
	next := make(chan scenario.Case)
	var wg sync.WaitGroup
	for range o.parallel {
		wg.Go(func() {
			for c := range next {
				res := scenario.Result{Case: c, Verdict: scenario.Skipped, Detail: missing[c.Mode]}
				if res.Detail == "" {
					res = r.Run(c)
				}
				p.result(res)
			}
		})
	}
	for _, c := range cases {
		if ctx.Err() != nil {
			break
		}
		next <- c
	}
	close(next)
	wg.Wait()
	fmt.Fprintf(stdout, "%d passed, %d failed, %d skipped\n", p.counts[scenario.Passed], p.counts[scenario.Failed], p.counts[scenario.Skipped])
	return p.counts[scenario.Failed] == 0 && ctx.Err() == nil, ctx.Err()
}

// prepare decides on program and modes; missing says, by mode, what keeps one of
// the asked ones from running.
func (o *options) prepare(ctx context.Context, r *scenario.Runner, dir string) (missing map[string]string, err error) {
	if o.subject != "" {
		if len(o.modes) == 0 {
			return nil, errors.New("flag --mode: give the modes to run with --subject")
		}
		r.Subject, err = subject.Parse(o.subject)
		return nil, err
	}
	r.Subject = subject.Subject{Name: "svcproxy"}
	if slices.Equal(o.modes, []string{scenario.PlanOnly}) {
		return nil, nil
	}
	if o.svcproxy == "" {
		if o.svcproxy, err = subject.Build(ctx, dir); err != nil {
			return nil, err
		}
	}
	if o.svcproxy, err = filepath.Abs(o.svcproxy); err != nil { // scripts run in folders of their own
		return nil, err
	}
	r.Subject = subject.Svcproxy(o.svcproxy, r.FromAPI)
	known, err := subject.Modes(ctx, o.svcproxy)
	if err != nil {
		return nil, err
	}
	missing = map[string]string{}
	asked := len(o.modes) > 0
	for _, m := range known {
		if !asked && m.Built {
			o.modes = append(o.modes, m.Name)
		}
		if !m.Supported {
			missing[m.Name] = fmt.Sprintf("mode %s: %s", m.Name, m.Missing)
		}
	}
	return missing, nil
}

// printer writes lines of several runs without mixing them.
type printer struct {
	to      io.Writer
	verbose bool

	mu     sync.Mutex // guards counts and the order of lines
	counts [3]int
}

func (p *printer) result(r scenario.Result) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counts[r.Verdict]++
	line := fmt.Sprintf("%-4s %s", r.Verdict, r.Case)
	if r.Verdict != scenario.Skipped {
		line += fmt.Sprintf(" (%.1fs)", r.Took.Seconds())
	}
	if r.Detail != "" {
		line += ": " + strings.ReplaceAll(strings.TrimSpace(r.Detail), "\n", " / ")
	}
	fmt.Fprintln(p.to, line)
	for _, k := range r.Kept {
		fmt.Fprintln(p.to, "     kept", k)
	}
	if p.verbose && r.Verdict == scenario.Failed {
		fmt.Fprintln(p.to, r.Log)
	}
}

func (p *printer) trace(c scenario.Case, line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.to, "     %s %s\n", c, line)
}
