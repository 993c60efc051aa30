// Command bench measures Service proxies as black boxes and compares them in one
// run: a node, two pods and a client made of network namespaces, and a synthetic
// cluster of N Services with M endpoints each, served over the Kubernetes API.
// Every figure is what packets or the operating system saw; see README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/svcproxy/svcproxy/bench/relaybench"
	"github.com/svcproxy/svcproxy/internal/lab"
)

const usage = `usage: bench compare [flags]

Measures the subject and the others in turn, several rounds each, and prints one
table of medians and ratios. Needs root.

A command is split at spaces; {CONFIG} in it is replaced by a file with a
KubeProxyConfiguration, {KUBECONFIG} by a kubeconfig file, {NODE} by the node's name.

Flags:
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
		stop()
		os.Exit(1)
	}
}

// subject is a program to be measured.
type subject struct {
	name string
	args []string
}

// plan is what a run of the command measures.
type plan struct {
	subjects  []subject // the first is compared with each of the others
	rounds    int
	services  []int // sizes of the cluster
	endpoints int   // of each Service
	mode      string
	iptables  string // which iptables comes first in PATH: legacy, nft or "" for the machine's
	changes   int
	churn     int // slices changed per second
	churnFor  time.Duration
	damages   int           // how often others break the rules in each way
	timeout   time.Duration // for the first sync and for each change
	out       string        // file for the single results, a line of JSON each
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 && args[0] == "relay" {
		return relaybench.Run(ctx, args[1:], stdout, stderr)
	}
	if len(args) == 0 || args[0] != "compare" {
		fmt.Fprint(stderr, usage)
		return errors.New("the commands are compare and relay")
	}
	p, err := parse(ctx, args[1:], stderr)
	if err != nil {
		return err
	}
	if err := lab.Supported(); err != nil {
		return fmt.Errorf("network namespaces: %w", err)
	}
	results, err := p.measure(ctx, stderr)
	if err != nil {
		return err
	}
	_, err = io.WriteString(stdout, p.table(results)+repairTable(results))
	return err
}

func parse(ctx context.Context, args []string, stderr io.Writer) (*plan, error) {
	p := &plan{}
	fs := flag.NewFlagSet("bench compare", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, usage)
		fs.PrintDefaults()
	}
	subjectFlag := fs.String("subject", "svcproxy=bin/svcproxy --config {CONFIG}", "the program to be compared, `NAME=COMMAND`")
	var others []string
	fs.Func("against", "another program, `NAME[=COMMAND]`; repeatable. Without a command scripts/tools builds NAME", func(v string) error {
		others = append(others, v)
		return nil
	})
	fs.IntVar(&p.rounds, "rounds", 3, "rounds of each program; the table has medians")
	services := fs.String("services", "5000", "Services in the cluster; several sizes with commas between")
	fs.IntVar(&p.endpoints, "endpoints", 10, "endpoints of each Service")
	fs.StringVar(&p.mode, "mode", "iptables", "mode in the configuration file")
	fs.StringVar(&p.iptables, "iptables", "legacy", "iptables `VARIANT` that comes first in PATH: legacy, nft, or empty for the machine's")
	fs.IntVar(&p.changes, "changes", 20, "single changes that are timed")
	fs.IntVar(&p.churn, "churn", 100, "slices changed per second in the churn phase")
	fs.DurationVar(&p.churnFor, "churn-for", 10*time.Second, "length of the churn phase")
	fs.IntVar(&p.damages, "damages", 0, "how often the rules are broken by hand, in each of several ways; svcproxy in nftables mode only")
	fs.DurationVar(&p.timeout, "timeout", 10*time.Minute, "limit for the first sync and for each change")
	fs.StringVar(&p.out, "out", "", "append each single result to this `FILE`, a line of JSON each")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	for _, field := range strings.Split(*services, ",") {
		n, err := strconv.Atoi(field)
		if err != nil || n < probes {
			return nil, fmt.Errorf("--services %q: each size is a number from %d", *services, probes)
		}
		p.services = append(p.services, n)
	}
	if p.rounds < 1 || p.endpoints < 1 || p.changes < 1 || p.churn < 0 || p.churnFor < 0 {
		return nil, errors.New("--rounds, --endpoints and --changes are at least 1, --churn and --churn-for not negative")
	}
	for _, v := range append([]string{*subjectFlag}, others...) {
		s, err := parseSubject(ctx, v, stderr)
		if err != nil {
			return nil, err
		}
		p.subjects = append(p.subjects, s)
	}
	return p, nil
}

func parseSubject(ctx context.Context, v string, stderr io.Writer) (subject, error) {
	name, command, ok := strings.Cut(v, "=")
	if !ok {
		build := exec.CommandContext(ctx, "scripts/tools", name)
		build.Stderr = stderr
		out, err := build.Output()
		if err != nil {
			return subject{}, fmt.Errorf("build %s with scripts/tools, from the top of the repository: %w; or give NAME=COMMAND", name, err)
		}
		command = strings.TrimSpace(string(out)) + " --config {CONFIG}"
	}
	s := subject{name, strings.Fields(command)}
	if len(s.args) == 0 || name == "" {
		return subject{}, fmt.Errorf("%q: want NAME=COMMAND", v)
	}
	if _, err := exec.LookPath(s.args[0]); err != nil {
		return subject{}, fmt.Errorf("program %s: %w (make build makes bin/svcproxy)", name, err)
	}
	return s, nil
}

// measure runs every program at every size, in turn, so that a change of the
// machine's load hits all of them.
func (p *plan) measure(ctx context.Context, stderr io.Writer) ([]result, error) {
	var results []result
	for round := range p.rounds {
		for _, size := range p.services {
			for i := range p.subjects {
				s := p.subjects[(i+round)%len(p.subjects)]
				fmt.Fprintf(stderr, "round %d of %d, %d Services: %s\n", round+1, p.rounds, size, s.name)
				r, err := p.once(ctx, s, size)
				if err != nil {
					return nil, fmt.Errorf("%s at %d Services: %w", s.name, size, err)
				}
				results = append(results, r)
				line, err := r.line()
				if err != nil {
					return nil, err
				}
				fmt.Fprint(stderr, line)
				if err := appendTo(p.out, line); err != nil {
					return nil, err
				}
			}
		}
	}
	return results, nil
}

func appendTo(path, line string) error {
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(line)
	return errors.Join(err, f.Close())
}
