package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
)

// The network: pods a and b serve, pod c asks; all routed by the node.
const (
	nodeName = "node1"
	nodeAddr = "192.0.2.1"
	podA     = "10.244.1.2"
	podB     = "10.244.2.2"
	podC     = "10.244.9.2"
	podPort  = 8080
)

// world is one node with its cluster, for one run of one program.
type world struct {
	lab    *lab.Lab
	node   *lab.Host
	client *lab.Host
	server *apiserver.Server
	api    string // host and port of the API server, on the node
	dir    string // configuration and log
}

func newWorld() (w *world, err error) {
	w = &world{}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.dir, err = os.MkdirTemp("", "svcproxy-bench-"); err != nil {
		return w, err
	}
	node := netip.MustParseAddr(nodeAddr)
	t := lab.Topology{Hosts: []lab.HostSpec{{Name: "node", Forwards: true, OwnRun: true, Addrs: []netip.Addr{node}}}}
	for name, addr := range map[string]string{"a": podA, "b": podB, "c": podC} {
		t.Leaves = append(t.Leaves, lab.LeafSpec{
			Name: name, Behind: "node", Interface: "pod-" + name, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, From: []netip.Addr{node},
		})
	}
	if w.lab, err = lab.Build(t); err != nil {
		return w, err
	}
	w.node, w.client = w.lab.Host("node"), w.lab.Host("c")
	// Thousands of connections a second to one address need the ports.
	if err := w.client.Sysctl("ipv4/ip_local_port_range", "1025 65000"); err != nil {
		return w, err
	}
	for name, addr := range map[string]string{"a": podA, "b": podB} {
		if err := serveName(w.lab.Host(name), name, addr); err != nil {
			return w, fmt.Errorf("pod %s: %w", name, err)
		}
	}
	l, err := w.node.Listen("127.0.0.1:0")
	if err != nil {
		return w, fmt.Errorf("API server: %w", err)
	}
	w.api = l.Addr().String()
	w.server = apiserver.New(apiserver.Options{})
	w.server.Start(l)
	return w, nil
}

func (w *world) close() error {
	var errs []error
	if w.server != nil {
		errs = append(errs, w.server.Stop())
	}
	if w.lab != nil {
		errs = append(errs, w.lab.Close())
	}
	if w.dir != "" {
		errs = append(errs, os.RemoveAll(w.dir))
	}
	return errors.Join(errs...)
}

// serveName answers every connection with the pod's name, and ends with the
// process.
func serveName(h *lab.Host, name, addr string) error {
	l, err := h.Listen(net.JoinHostPort(addr, fmt.Sprint(podPort)))
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				// The client may be gone already; it counts what it gets.
				_, _ = io.WriteString(c, name+"\n")
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}()
		}
	}()
	return nil
}

// program is the subject while it runs.
type program struct {
	cmd   *exec.Cmd
	log   string
	ended chan struct{} // closed when it has
}

// start runs the subject on the node.
func (w *world) start(s subject, p *plan) (*program, error) {
	kubeconfig, config := filepath.Join(w.dir, "kubeconfig"), filepath.Join(w.dir, "config.yaml")
	if err := apiserver.WriteKubeconfig(kubeconfig, w.api); err != nil {
		return nil, err
	}
	text := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: %s
clusterCIDR: 10.244.0.0/16
clientConnection: {kubeconfig: %s}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, p.mode, nodeName, kubeconfig)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	path, err := w.path(p.iptables)
	if err != nil {
		return nil, err
	}
	replace := strings.NewReplacer("{CONFIG}", config, "{KUBECONFIG}", kubeconfig, "{NODE}", nodeName)
	args := make([]string, len(s.args))
	for i, a := range s.args {
		args[i] = replace.Replace(a)
	}
	pr := &program{cmd: exec.Command(args[0], args[1:]...), log: filepath.Join(w.dir, "log"), ended: make(chan struct{})}
	log, err := os.Create(pr.log)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }() // the program has its own descriptor
	pr.cmd.Stdout, pr.cmd.Stderr = log, log
	pr.cmd.Env = append(os.Environ(), "PATH="+path)
	if err := w.node.Start(pr.cmd); err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	go func() {
		defer close(pr.ended)
		_ = pr.cmd.Wait() // how it ended is seen in ProcessState
	}()
	return pr, nil
}

// path returns PATH with the wanted iptables in front.
func (w *world) path(variant string) (string, error) {
	if variant == "" {
		return os.Getenv("PATH"), nil
	}
	dir := filepath.Join(w.dir, "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	multi, err := exec.LookPath("xtables-" + variant + "-multi")
	if err != nil {
		return "", fmt.Errorf("--iptables %s: %w", variant, err)
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, verb := range []string{"", "-save", "-restore"} {
			if err := os.Symlink(multi, filepath.Join(dir, family+verb)); err != nil && !errors.Is(err, os.ErrExist) {
				return "", err
			}
		}
	}
	return dir + ":" + os.Getenv("PATH"), nil
}

// stop asks the program to end, and makes it.
func (pr *program) stop() {
	_ = pr.cmd.Process.Signal(syscall.SIGTERM) // it may have ended already
	select {
	case <-pr.ended:
	case <-time.After(20 * time.Second):
		_ = pr.cmd.Process.Kill()
		<-pr.ended
	}
}

// tail returns the end of the log, to say why.
func (pr *program) tail() string {
	b, err := os.ReadFile(pr.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// alive returns an error once the program or the run has ended.
func (pr *program) alive(ctx context.Context) error {
	select {
	case <-pr.ended:
		return fmt.Errorf("the program ended: %v; its log ends with\n%s", pr.cmd.ProcessState, pr.tail())
	case <-ctx.Done():
		return ctx.Err()
	default:
		return nil
	}
}
