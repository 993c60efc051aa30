// Package demo shows a Service proxy at work: it builds a node, its pods, pods of
// other nodes, a client pod and an outside host out of network namespaces, runs
// the proxy on the node as a process of its own, sends real requests to every
// Service, compares the answers with the plan, shows what the kernel holds, and
// takes everything down again. Nothing outside its namespaces is touched.
//
// It needs root. One node; IPv4 and IPv6; endpoints answer with their name, they
// are no real web or DNS servers.
package demo

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// Reference returns the example that the demo serves unless told otherwise, as
// Kubernetes manifests in YAML: the cluster's API server, DNS, and a web service
// on three nodes.
func Reference() []byte { return bytes.Clone(reference) }

//go:embed reference.yaml
var reference []byte

// NodeName is the name of the node's Node object.
const NodeName = "node-1"

const (
	readyURL = "http://127.0.0.1:10256/readyz" // on the node
	patience = 20 * time.Second                // for the proxy to start
)

// Demo is one showing.
type Demo struct {
	Mode string     // the proxy's; decides how the kernel's state is listed
	Plan *plan.Plan // what the proxy should do, for a node with NodeAddrs
	// Program and Args start the proxy. Its health server must have the default
	// address.
	Program string
	Args    []string
	Out     io.Writer // what is shown, in lines
}

// Supported returns nil if demos can run here, else what is missing.
func Supported() error {
	if err := lab.Supported(); err != nil {
		return fmt.Errorf("the demo needs network namespaces: %w; run it as root", err)
	}
	return nil
}

// Run shows it and reports whether everything was answered as planned. When it
// returns, also because ctx ended, the network and the proxy are gone.
func (d Demo) Run(ctx context.Context) (passed bool, err error) {
	d.say("Building a node, %d endpoints, a client pod and an outside host from network namespaces.", len(endpointsOf(d.Plan)))
	network, err := build(d.Plan)
	if err != nil {
		return false, err
	}
	passed, err = d.show(ctx, network)
	if closing := network.Close(); closing != nil {
		return false, errors.Join(err, fmt.Errorf("take the network down: %w", closing))
	}
	d.say("\nThe network and the proxy are gone again.")
	return passed, err
}

// show runs the proxy in the network and sends the requests.
func (d Demo) show(ctx context.Context, network *lab.Lab) (passed bool, err error) {
	node := network.Host(nodeHost)
	p, err := d.start(ctx, node)
	if err != nil {
		return false, err
	}
	defer p.end()
	if err := p.awaitReady(ctx, node); err != nil {
		return false, fmt.Errorf("%w; it said:\n%s", err, p.said.String())
	}
	d.say("svcproxy runs on the node in %s mode; everything was programmed %d ms after its start.\n",
		d.Mode, time.Since(p.started).Milliseconds())

	requests := requestsOf(d.Plan)
	good := 0
	d.say("%-30s %-26s %-8s %s", "SERVICE PORT", "REQUESTS TO", "FROM", "WHO ANSWERED")
	for _, r := range requests {
		have := r.send(ctx, network)
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		fault := r.judge(have)
		if fault == "" {
			good++
		} else {
			fault = "   WRONG: " + fault
		}
		d.say("%-30s %-26s %-8s %s%s", r.id, r.to.String()+"/"+strings.ToLower(r.id.Protocol.String()), r.from, have, fault)
	}
	if err := d.showKernel(node); err != nil {
		return false, err
	}
	if good < len(requests) {
		p.end()
		d.say("\n%d of %d kinds of request went as planned. The proxy said:\n%s", good, len(requests), p.said.String())
		return false, nil
	}
	d.say("\nAll %d kinds of request went as planned.", good)
	return true, nil
}

func (d Demo) say(format string, args ...any) { fmt.Fprintf(d.Out, format+"\n", args...) }

// process is the running proxy.
type process struct {
	cmd     *exec.Cmd
	said    *bytes.Buffer // may be read once done is closed
	done    chan struct{} // closed when the process is gone
	started time.Time
}

func (d Demo) start(ctx context.Context, node *lab.Host) (*process, error) {
	p := &process{said: &bytes.Buffer{}, done: make(chan struct{}), started: time.Now()}
	p.cmd = exec.CommandContext(ctx, d.Program, d.Args...)
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

// end asks the process to end and waits for it.
func (p *process) end() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may be gone already
	<-p.done
}

// awaitReady waits until everything is in the kernel. After an error the process
// is gone.
func (p *process) awaitReady(ctx context.Context, node *lab.Host) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	client := http.Client{Transport: &http.Transport{DialContext: node.DialContext, DisableKeepAlives: true}}
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, readyURL, nil)
		if err != nil {
			p.end()
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
			return fmt.Errorf("the proxy did not get ready within %v", patience)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// target is the address that clients of a frontend use.
func target(f plan.Frontend, family plan.Family) netip.AddrPort {
	if f.Kind == plan.NodePort {
		return netip.AddrPortFrom(nodeAddr(family), f.Port)
	}
	return netip.AddrPortFrom(f.Addr, f.Port)
}
