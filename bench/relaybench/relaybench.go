// Package relaybench compares relays in user space: ours, HAProxy, a naive one in Go,
// and no relay at all, in network namespaces (client, relay, server). The processes of
// a measurement are this program in other roles; all loads are plain blocking sockets
// in threads of their own.
package relaybench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
)

const usage = `usage: bench relay [flags]

Measures relays in turn, several rounds each, and prints one table of medians and
ratios. Needs root, and haproxy where it is to be compared.

Flags:
`

var (
	clientAddr = netip.MustParseAddr("10.1.0.2")
	relayAddr  = netip.MustParseAddr("192.0.2.1")
	serverAddr = netip.MustParseAddr("10.2.0.2")
)

// bench is what a run of the command measures.
type bench struct {
	relays  []string
	loads   []string
	rounds  int
	length  time.Duration
	threads map[string]int
	idle    int
	profile string
	dir     string
	lab     *lab.Lab
	log     io.Writer
}

// result is one load on one relay.
type result struct {
	Relay, Load string
	Round       int
	figure
	CPU    float64 // seconds that the relay's process used
	RSS    float64 // KiB for each idle connection
	Kernel float64 // KiB of kernel memory for each idle connection, all hosts
}

// Run is the command.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 && args[0] == "role" {
		return role(ctx, args[1:], stdout)
	}
	b := &bench{log: stderr, threads: map[string]int{"bulk": 2, "connect": 8, "request": 1, "udp": 2, "udp-throughput": 2, "udp-segment": 2}}
	fs := flag.NewFlagSet("bench relay", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, usage)
		fs.PrintDefaults()
	}
	relays := fs.String("relays", "svcproxy,haproxy,naive,direct", "what is compared, the first with each of the others")
	loads := fs.String("loads", "bulk,connect,request,udp,udp-throughput,udp-segment,idle", "what is measured")
	fs.IntVar(&b.rounds, "rounds", 5, "rounds of each; the table has medians")
	fs.DurationVar(&b.length, "length", 3*time.Second, "length of each load")
	fs.IntVar(&b.idle, "idle", 7000, "idle connections; two descriptors each of three quarters of what the process may have")
	fs.StringVar(&b.profile, "profile", "", "write CPU profiles of our relay to this `DIRECTORY`")
	soak := fs.Duration("soak", 0, "instead of comparing: mixed load for this long while endpoints change")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	b.relays, b.loads = strings.Split(*relays, ","), strings.Split(*loads, ",")
	if err := lab.Supported(); err != nil {
		return fmt.Errorf("network namespaces: %w", err)
	}
	if *soak > 0 {
		return runSoak(ctx, *soak, stdout)
	}
	if err := b.build(); err != nil {
		return err
	}
	defer b.close()
	results, err := b.measure(ctx)
	if err != nil {
		return err
	}
	_, err = io.WriteString(stdout, b.table(results))
	return err
}

func (b *bench) build() (err error) {
	if b.dir, err = os.MkdirTemp("", "svcproxy-bench-"); err != nil {
		return err
	}
	b.lab, err = lab.Build(lab.Topology{
		Hosts: []lab.HostSpec{{Name: "relay", Forwards: true, Addrs: []netip.Addr{relayAddr}}},
		Leaves: []lab.LeafSpec{
			{Name: "client", Behind: "relay", Interface: "client", Addrs: []netip.Addr{clientAddr}, From: []netip.Addr{relayAddr}},
			{Name: "server", Behind: "relay", Interface: "server", Addrs: []netip.Addr{serverAddr}, From: []netip.Addr{relayAddr}},
		},
	})
	if err != nil {
		return err
	}
	for _, host := range []string{"client", "relay", "server"} {
		for key, value := range map[string]string{
			"ipv4/ip_local_port_range": "1025 65000",
			"ipv4/tcp_tw_reuse":        "1",
			"ipv4/tcp_max_syn_backlog": "65535",
			"core/somaxconn":           "65535",
			// Without losses it does what Cubic does, and a namespace may choose it. Where the
			// host's is BBR, pacing each hop is what would be measured.
			"ipv4/tcp_congestion_control": "reno",
		} {
			if err := b.lab.Host(host).Sysctl(key, value); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) close() {
	if b.lab != nil {
		_ = b.lab.Close()
	}
	_ = os.RemoveAll(b.dir)
}

// process is a role that runs.
type process struct {
	cmd *exec.Cmd
	out *bufio.Reader
}

// start runs this program in a role, or another one, on a host, and waits for
// "ready", or not for a load, which says nothing before it has ended.
func (b *bench) start(host string, args ...string) (*process, error) {
	var cmd *exec.Cmd
	if args[0] == "haproxy" {
		config := filepath.Join(b.dir, "haproxy.cfg")
		if err := os.WriteFile(config, []byte(haproxyConfig(relayAddr, serverAddr)), 0o600); err != nil {
			return nil, err
		}
		cmd = exec.Command("haproxy", "-db", "-f", config)
	} else {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		cmd = exec.Command(self, append([]string{"relay", "role"}, args...)...)
		if args[0] == "load" {
			// A signal would interrupt a call that has a timeout.
			cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1")
		}
		if args[0] == "svcproxy" && b.profile != "" {
			cmd.Env = append(os.Environ(), profileVariable+"="+b.profile)
		}
	}
	cmd.Stderr = b.log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := b.lab.Host(host).Start(cmd); err != nil {
		return nil, fmt.Errorf("starting %v: %w", args, err)
	}
	p := &process{cmd, bufio.NewReader(out)}
	if args[0] != "haproxy" && args[0] != "load" {
		if line, err := p.out.ReadString('\n'); line != "ready\n" {
			p.stop()
			return nil, fmt.Errorf("%v is not ready: %q, %w", args, line, err)
		}
	}
	return p, nil
}

func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	t := time.AfterFunc(5*time.Second, func() { _ = p.cmd.Process.Kill() })
	defer t.Stop()
	_ = p.cmd.Wait()
}

// measure runs every load on every relay, rounds times, in an order that rotates.
func (b *bench) measure(ctx context.Context) ([]result, error) {
	var results []result
	for round := range b.rounds {
		for _, load := range b.loads {
			for i := range b.relays {
				relay := b.relays[(i+round)%len(b.relays)]
				if relay == "haproxy" && strings.HasPrefix(load, "udp") || load == "idle" && round > 0 {
					continue
				}
				if ctx.Err() != nil {
					return nil, ctx.Err()
				}
				r, err := b.once(relay, load)
				if err != nil {
					return nil, fmt.Errorf("%s on %s: %w", load, relay, err)
				}
				r.Round = round
				results = append(results, r)
				fmt.Fprintf(b.log, "round %d: %-8s %-8s rate %12.0f  p50 %7.1f µs  failed %d  cpu %.2f s  %.1f KiB RSS %.1f KiB in the kernel each\n",
					round+1, load, relay, r.Rate, r.P50, r.Failed, r.CPU, r.RSS, r.Kernel)
			}
		}
	}
	return results, nil
}

// once measures one load on one relay, with fresh processes.
func (b *bench) once(relay, load string) (result, error) {
	r := result{Relay: relay, Load: load}
	server, err := b.start("server", "server", serverAddr.String())
	if err != nil {
		return r, err
	}
	defer server.stop()
	to := serverAddr
	var p *process
	if relay != "direct" {
		to = relayAddr
		if p, err = b.start("relay", relay, relayAddr.String(), serverAddr.String()); err != nil {
			return r, err
		}
		defer p.stop()
	}
	// One connection through it: everybody is there and has learnt the routes.
	if err := b.await(to); err != nil {
		return r, err
	}
	if load == "idle" {
		return b.idleOnce(r, p, to)
	}
	before, err := p.cpu()
	if err != nil {
		return r, err
	}
	c, err := b.start("client", "load", load, to.String(), fmt.Sprint(b.threads[load]), b.length.String())
	if err != nil {
		return r, err
	}
	decodeErr := json.NewDecoder(c.out).Decode(&r.figure)
	if err := errors.Join(decodeErr, c.cmd.Wait()); err != nil {
		return r, err
	}
	after, err := p.cpu()
	r.CPU = after - before
	return r, err
}

// await connects until it is answered.
func (b *bench) await(to netip.Addr) error {
	end := time.Now().Add(10 * time.Second)
	for {
		c, err := b.lab.Host("client").DialContext(context.Background(), "tcp", netip.AddrPortFrom(to, echoPort).String())
		if err == nil {
			_ = c.SetDeadline(time.Now().Add(time.Second))
			_, err = c.Write([]byte("x"))
			if err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			c.Close()
		}
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// idleOnce opens idle connections and looks at the memory.
func (b *bench) idleOnce(r result, p *process, to netip.Addr) (result, error) {
	rss, err := p.rss()
	if err != nil {
		return r, err
	}
	slab, err := slabKiB()
	if err != nil {
		return r, err
	}
	n := b.idle
	if r.Relay == "naive" {
		n /= 3 // it keeps its pipes: six descriptors each
	}
	c, err := b.start("client", "load", "idle", to.String(), fmt.Sprint(n), "0s")
	if err != nil {
		return r, err
	}
	defer func() {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}()
	if line, err := c.out.ReadString('\n'); line != "ready\n" {
		return r, fmt.Errorf("opening idle connections: %q: %w", line, err)
	}
	time.Sleep(3 * time.Second) // what is free is given back
	rss2, err := p.rss()
	if err != nil {
		return r, err
	}
	slab2, err := slabKiB()
	r.RSS, r.Kernel, r.Done = (rss2-rss)/float64(n), (slab2-slab)/float64(n), float64(n)
	return r, err
}

// table returns the medians, in Markdown, and next to each other relay the ratio of
// the first to it.
func (b *bench) table(results []result) string {
	var s strings.Builder
	fmt.Fprintf(&s, "medians of %d rounds of %s\n\n| measure |", b.rounds, b.length)
	for i, r := range b.relays {
		fmt.Fprintf(&s, " %s |", r)
		if i > 0 {
			fmt.Fprintf(&s, " %s / %s |", b.relays[0], r)
		}
	}
	s.WriteString("\n|---|" + strings.Repeat("---|", 2*len(b.relays)-1) + "\n")
	for _, m := range []struct {
		load, name string
		value      func(result) float64
	}{
		{"bulk", "bulk, Gbit/s", func(r result) float64 { return r.Rate * 8 / 1e9 }},
		{"bulk", "CPU of the relay per GB, s", func(r result) float64 { return r.CPU / (r.Done / 1e9) }},
		{"connect", "connections per s", func(r result) float64 { return r.Rate }},
		{"connect", "connect and answer p50, µs", func(r result) float64 { return r.P50 }},
		{"connect", "CPU of the relay per connection, µs", func(r result) float64 { return r.CPU / r.Done * 1e6 }},
		{"connect", "failed connections", func(r result) float64 { return float64(r.Failed) }},
		{"request", "64-byte request p50, µs", func(r result) float64 { return r.P50 }},
		{"request", "64-byte request p99, µs", func(r result) float64 { return r.P99 }},
		{"udp", "datagrams per s", func(r result) float64 { return r.Rate }},
		{"udp", "CPU of the relay per datagram, µs", func(r result) float64 { return r.CPU / r.Done * 1e6 }},
		{"udp-throughput", "datagrams per s with a loss of at most 1 %", func(r result) float64 { return r.Rate }},
		{"udp-throughput", "CPU of the relay per datagram, µs", func(r result) float64 { return r.CPU / r.Done * 1e6 }},
		{"udp-segment", "the same, sent with UDP_SEGMENT", func(r result) float64 { return r.Rate }},
		{"udp-segment", "CPU of the relay per datagram, µs", func(r result) float64 { return r.CPU / r.Done * 1e6 }},
		{"idle", "RSS of the relay per idle connection, KiB", func(r result) float64 { return r.RSS }},
		{"idle", "kernel memory per idle connection, all hosts, KiB", func(r result) float64 { return r.Kernel }},
	} {
		if !slices.Contains(b.loads, m.load) {
			continue
		}
		fmt.Fprintf(&s, "| %s |", m.name)
		var first float64
		for i, relay := range b.relays {
			var values []float64
			for _, r := range results {
				if r.Relay == relay && r.Load == m.load {
					values = append(values, m.value(r))
				}
			}
			if len(values) == 0 {
				s.WriteString(strings.Repeat(" |", min(i+1, 2)))
				continue
			}
			slices.Sort(values)
			v := values[len(values)/2]
			fmt.Fprintf(&s, " %.4g |", v)
			switch {
			case i == 0:
				first = v
			case v == 0:
				s.WriteString(" |")
			default:
				fmt.Fprintf(&s, " %.2f |", first/v)
			}
		}
		s.WriteByte('\n')
	}
	return s.String()
}
