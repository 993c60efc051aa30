package app

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// referenceManifests are the demo's own Services.
//
//go:embed reference.yaml
var referenceManifests []byte

const (
	demoNodeName  = "node-1"
	demoHealthURL = "http://127.0.0.1:10256/readyz"
	demoPatience  = 20 * time.Second // for the proxy to start
)

// demo is one run of "svcproxy demo".
type demo struct {
	env       Env
	mode      string
	manifests string // directory; "": the reference example
}

func newDemo(env Env) *cobra.Command {
	d := demo{env: env}
	cmd := &cobra.Command{
		Use:   "demo [flags]",
		Short: "Build a small network, serve an example in it and send real requests",
		Long: `demo builds a node, its pods, other nodes' pods, a client and an outside host out
of network namespaces, runs the proxy on the node, sends real requests to every
Service, says who answered and what the kernel holds, and takes everything down
again. Nothing outside its namespaces is touched. It needs root.

The node is called node-1 and has the addresses 172.16.65.181, 172.17.0.1, 10.244.0.0
and 10.244.0.1; pods are recognised by the range 10.244.0.0/16.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return d.run(cmd.Context()) },
	}
	cmd.Flags().StringVar(&d.mode, "mode", config.IPTables, "proxy `mode`")
	cmd.Flags().StringVar(&d.manifests, "manifests", "", "`directory` of Services and EndpointSlices to serve instead of the example")
	return cmd
}

func (d demo) run(ctx context.Context) error {
	if _, err := modeNamed(d.mode); err != nil {
		return err
	}
	if err := lab.Supported(); err != nil {
		return fmt.Errorf("the demo needs network namespaces: %w; run it as root", err)
	}
	if d.manifests == "" {
		dir, err := writeReference()
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		d.manifests = dir
	}
	p, err := d.plan(ctx)
	if err != nil {
		return err
	}
	d.say("Building a node, %d endpoints, a client pod and an outside host from network namespaces.", len(demoEndpoints(p)))
	network, err := buildDemo(p)
	if err != nil {
		return err
	}
	err = d.show(ctx, network, p)
	if closing := network.Close(); closing != nil {
		err = errors.Join(err, fmt.Errorf("take the network down: %w", closing))
	} else {
		d.say("\nThe network and the proxy are gone again.")
	}
	if ctx.Err() != nil {
		d.say("DEMO: interrupted")
		return exitStatus(exitFailed)
	}
	return err
}

// show runs the proxy in the network and sends the requests.
func (d demo) show(ctx context.Context, network *lab.Lab, p *plan.Plan) error {
	node := network.Host(demoNode)
	proxy, err := d.startProxy(ctx, node)
	if err != nil {
		return err
	}
	defer proxy.end()
	if err := proxy.awaitReady(ctx, node); err != nil {
		return fmt.Errorf("%w; it said:\n%s", err, proxy.said.String())
	}
	d.say("svcproxy runs on the node in %s mode and has programmed everything after %d ms.\n",
		d.mode, time.Since(proxy.started).Milliseconds())

	requests := demoRequests(p)
	good := 0
	d.say("%-34s %-22s %-8s %s", "SERVICE PORT", "REQUEST TO", "FROM", "WHO ANSWERED")
	for _, r := range requests {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		have := r.send(ctx, network)
		fault := r.judge(have)
		if fault == "" {
			good++
		} else {
			fault = "   WRONG: " + fault
		}
		d.say("%-34s %-22s %-8s %s%s", r.id, r.to.String()+"/"+strings.ToLower(r.id.Protocol.String()), r.from, have, fault)
	}
	if err := d.showKernel(node, p); err != nil {
		return err
	}
	if good < len(requests) {
		d.say("\nDEMO: FAIL, %d of %d kinds of request went as planned. The proxy said:\n%s", good, len(requests), proxy.said.String())
		return exitStatus(exitFailed)
	}
	d.say("\nDEMO: PASS, all %d kinds of request went as planned.", good)
	return nil
}

func (d demo) say(format string, args ...any) { fmt.Fprintf(d.env.Stdout, format+"\n", args...) }

// writeReference puts the reference example into a directory of its own.
func writeReference() (string, error) {
	dir, err := os.MkdirTemp("", "svcproxy-demo-")
	if err != nil {
		return "", fmt.Errorf("make a directory for the example: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "reference.yaml"), referenceManifests, 0o644); err != nil {
		return "", fmt.Errorf("write the example: %w", errors.Join(err, os.RemoveAll(dir)))
	}
	return dir, nil
}

// demoFlags are the proxy's, for the node of the demo. Connection tracking sizes
// belong to the whole host and are left alone.
func (d demo) flags() []string {
	return []string{
		"--manifests=" + d.manifests, "--proxy-mode=" + d.mode, "--hostname-override=" + demoNodeName,
		"--cluster-cidr=" + podRange().String(), "--iptables-min-sync-period=0", "--ipvs-min-sync-period=0",
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
		"--oom-score-adj=0",
	}
}

// plan computes what the proxy should do, which is what answers are judged by.
func (d demo) plan(ctx context.Context) (*plan.Plan, error) {
	c, _, err := loadConfig(d.env, d.flags())
	if err != nil {
		return nil, err
	}
	s, err := survey(ctx, d.env, c, surveyOptions{node: demoNodeName, addrs: nodeAddrs(), families: plan.Families[:]})
	if err != nil {
		return nil, err
	}
	u := s.planner.Update()
	if len(u.Plan.Services) == 0 {
		return nil, fmt.Errorf("no Service in %s can be served; \"svcproxy plan --why --manifests %s\" says why", d.manifests, d.manifests)
	}
	return u.Plan, nil
}

// demoProxy is the running proxy.
type demoProxy struct {
	cmd     *exec.Cmd
	said    *bytes.Buffer // read it after end only, or once the process is gone
	done    chan struct{} // closed when the process is gone
	started time.Time
}

// startProxy runs this program as the proxy of the node.
func (d demo) startProxy(ctx context.Context, node *lab.Host) (*demoProxy, error) {
	program, err := d.env.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program's file: %w", err)
	}
	p := &demoProxy{said: &bytes.Buffer{}, done: make(chan struct{}), started: time.Now()}
	p.cmd = exec.CommandContext(ctx, program, append([]string{"run"}, d.flags()...)...)
	p.cmd.Stdout, p.cmd.Stderr = io.Discard, p.said
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = 5 * time.Second
	if err := node.Start(p.cmd); err != nil {
		return nil, fmt.Errorf("start the proxy: %w", err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in what it said
		close(p.done)
	}()
	return p, nil
}

// end asks the proxy to end and waits for it.
func (p *demoProxy) end() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may be gone already
	<-p.done
}

// awaitReady waits until everything is in the kernel. On an error the proxy has
// ended.
func (p *demoProxy) awaitReady(ctx context.Context, node *lab.Host) error {
	ctx, cancel := context.WithTimeout(ctx, demoPatience)
	defer cancel()
	client := http.Client{Transport: &http.Transport{DialContext: node.DialContext, DisableKeepAlives: true}}
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, demoHealthURL, nil)
		if err != nil {
			return err
		}
		if r, err := client.Do(request); err == nil {
			_ = r.Body.Close()
			if r.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-p.done:
			return errors.New("the proxy ended")
		case <-ctx.Done():
			p.end()
			return fmt.Errorf("the proxy was not ready after %v", demoPatience)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// demoTarget is an address that clients of a frontend use.
func demoTarget(f plan.Frontend, family plan.Family) netip.AddrPort {
	if f.Kind == plan.NodePort {
		return netip.AddrPortFrom(nodeAddr(family), f.Port)
	}
	return netip.AddrPortFrom(f.Addr, f.Port)
}
