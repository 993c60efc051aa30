package app

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The demo shows the whole program at work: real packets, and nothing left behind.
func TestDemo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	before := namedNamespaces(t)
	var out, errs bytes.Buffer
	env := demoEnv(&out, &errs)
	if status := Main(t.Context(), env); status != exitOK {
		t.Fatalf("status %d\n%s%s", status, out.String(), errs.String())
	}
	have := out.String()
	for _, want := range []string{
		"DEMO: PASS", "httpd-svc-1", "httpd-svc-2", "httpd-svc-3", "kube-dns-1", "172.16.65.181:30001/tcp", "10.96.0.10:53/udp",
		"KUBE-SVC-IYRDZZKXS5EOQ6Q6", "KUBE-SEP-RXZQI7N2WC2D3KSY", "The network and the proxy are gone again.",
	} {
		if !strings.Contains(have, want) {
			t.Errorf("output lacks %q:\n%s", want, have)
		}
	}
	if after := namedNamespaces(t); !slices.Equal(before, after) {
		t.Errorf("namespaces before %v, after %v", before, after)
	}
}

func TestDemoInterrupted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	ctx, cancel := context.WithCancel(t.Context())
	out := &cancelOn{word: "WHO ANSWERED", cancel: cancel}
	var errs bytes.Buffer
	if status := Main(ctx, demoEnv(out, &errs)); status != exitFailed {
		t.Errorf("status %d", status)
	}
	for _, want := range []string{"The network and the proxy are gone again.", "DEMO: interrupted"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s%s", want, out.String(), errs.String())
		}
	}
}

// demoEnv runs the demo; the proxy in it is this test program, see TestMain.
func demoEnv(out, errs io.Writer) Env {
	return Env{
		Args: []string{"demo"}, Stdout: out, Stderr: errs, Getenv: os.Getenv, Hostname: os.Hostname,
		Executable: func() (string, error) { return exec.LookPath("svcproxy") }, ReadFile: os.ReadFile,
	}
}

// cancelOn cancels once a word was written.
type cancelOn struct {
	bytes.Buffer
	word   string
	cancel func()
}

func (c *cancelOn) Write(p []byte) (int, error) {
	if strings.Contains(string(p), c.word) {
		c.cancel()
	}
	return c.Buffer.Write(p)
}

func namedNamespaces(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/run/netns")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "demo") {
			out = append(out, e.Name())
		}
	}
	return out
}
