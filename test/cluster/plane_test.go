//go:build cluster

package cluster

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// Tokens of the two users that the API server knows. Who is in system:masters may
// do everything; system:kube-proxy has what the API server's own role
// system:node-proxier grants, and no more.
const (
	adminToken = "admin-token"
	proxyToken = "proxy-token"
	tokenFile  = adminToken + ",admin,1,system:masters\n" + proxyToken + ",system:kube-proxy,2\n"
)

// auditPolicy records who asks for what, for the proxy only.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitManagedFields: true
rules:
- level: Metadata
  users: ["system:kube-proxy"]
- level: None
`

// plane is a control plane on one host of the lab.
type plane struct {
	host   *lab.Host
	dir    string
	addr   string // of the API server, IP:port
	etcd   *program
	server *program
}

// mustStartPlane starts etcd and the API server on host and waits until the API
// server is ready.
func mustStartPlane(t *testing.T, host *lab.Host, ip string) *plane {
	t.Helper()
	p := &plane{host: host, dir: t.TempDir(), addr: ip + ":6443"}
	mustWrite(t, p.path("tokens.csv"), tokenFile)
	mustWrite(t, p.path("audit.yaml"), auditPolicy)
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	mustWrite(t, p.path("sa.key"), string(pem.EncodeToMemory(&pem.Block{
		Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key),
	})))
	p.etcd = mustStart(t, host, p.path("etcd.log"), mustGetenv(t, "SVCPROXY_ETCD"),
		"--data-dir="+p.path("etcd"), "--unsafe-no-fsync", "--log-level=error",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380")
	p.startServer(t, ip)
	return p
}

func (p *plane) path(name string) string { return filepath.Join(p.dir, name) }

// startServer starts the API server; again after a stop it finds its certificate
// and etcd's data as it left them.
func (p *plane) startServer(t *testing.T, ip string) {
	t.Helper()
	p.server = mustStart(t, p.host, p.path("kube-apiserver.log"), mustGetenv(t, "SVCPROXY_KUBE_APISERVER"),
		"--etcd-servers=http://127.0.0.1:2379", "--service-cluster-ip-range=10.96.0.0/12",
		"--bind-address=0.0.0.0", "--secure-port=6443", "--advertise-address="+ip, "--allow-privileged=true",
		"--cert-dir="+p.path("certs"), "--token-auth-file="+p.path("tokens.csv"), "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+p.path("sa.key"), "--service-account-signing-key-file="+p.path("sa.key"),
		"--audit-policy-file="+p.path("audit.yaml"), "--audit-log-path="+p.path("audit.log"))
	eventually(t, time.Minute, func() error {
		if err := p.server.running(); err != nil {
			t.Fatal(err)
		}
		client, err := p.client(p.host)
		if err != nil {
			return err
		}
		defer client.CloseIdleConnections()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+p.addr+"/readyz", nil)
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+adminToken)
		res, err := client.Do(req)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		if res.StatusCode != http.StatusOK {
			return fmt.Errorf("GET /readyz: %s", res.Status)
		}
		return nil
	})
}

// client speaks to the API server from a host and trusts its certificate only.
func (p *plane) client(from *lab.Host) (*http.Client, error) {
	pemBytes, err := os.ReadFile(p.path("certs/apiserver.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pemBytes) {
		return nil, errors.New("the API server's certificate file has no certificate")
	}
	return &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			DialContext:     from.DialContext,
			TLSClientConfig: &tls.Config{RootCAs: roots},
		},
	}, nil
}

// kubeconfig writes the file with which the proxy finds the API server.
func (p *plane) kubeconfig(t *testing.T) string {
	t.Helper()
	file := p.path("kubeconfig")
	mustWrite(t, file, fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: c
  cluster: {server: "https://%s", certificate-authority: %q}
users:
- name: u
  user: {token: %q}
contexts:
- name: x
  context: {cluster: c, user: u}
current-context: x
`, p.addr, p.path("certs/apiserver.crt"), proxyToken))
	return file
}

// program is a running process on a host; what it prints goes to a file, whose
// end is shown if the test fails.
type program struct {
	cmd  *exec.Cmd
	log  string
	from int64         // where its own part of the log begins
	done chan struct{} // closed when it has ended; then err is set
	err  error
}

func mustStart(t *testing.T, host *lab.Host, log, path string, args ...string) *program {
	t.Helper()
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	before, err := out.Seek(0, io.SeekEnd)
	if err != nil {
		t.Fatal(err)
	}
	p := &program{cmd: exec.Command(path, args...), log: log, from: before, done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := host.Start(p.cmd); err != nil {
		t.Fatalf("start %s: %v", path, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		<-p.done
		if t.Failed() {
			t.Logf("end of %s:\n%s", filepath.Base(log), tail(log, 4000))
		}
	})
	return p
}

// running returns an error if the program has ended.
func (p *program) running() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended: %w\n%s", filepath.Base(p.cmd.Path), p.err, tail(p.log, 4000))
	default:
		return nil
	}
}

// said returns what the program has printed.
func (p *program) said() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(b[min(p.from, int64(len(b))):])
}

// mustEnd sends the program a signal and waits until it has ended; it returns what
// Wait said. A program that does not end in time fails the test.
func (p *program) mustEnd(t *testing.T, signal os.Signal) error {
	t.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil {
		t.Fatalf("signal %s: %v", p.cmd.Path, err)
	}
	select {
	case <-p.done:
		return p.err
	case <-time.After(time.Minute):
		t.Fatalf("%s did not end within a minute of %v", p.cmd.Path, signal)
		return nil
	}
}

// tail returns at most the last n bytes of a file.
func tail(file string, n int) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-n):])
}

// eventually tries check until it returns nil, and fails the test with its last
// error if that takes too long.
func eventually(t *testing.T, within time.Duration, check func() error) {
	t.Helper()
	deadline := time.After(within)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("not true within %v: %v", within, err)
		case <-tick.C:
		}
	}
}

func mustWrite(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func mustGetenv(t *testing.T, name string) string {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		t.Fatalf("%s is not set: it names the program to run, see make test-cluster", name)
	}
	return v
}
