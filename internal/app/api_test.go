package app

import (
	"bytes"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/svcproxy/svcproxy/internal/lab/apiserver"
	"github.com/svcproxy/svcproxy/internal/sys/host"
)

// startAPI serves the manifests over the Kubernetes API and returns the server and
// a kubeconfig file for it.
func startAPI(t *testing.T, manifests ...string) (*apiserver.Server, string) {
	t.Helper()
	s := apiserver.New(apiserver.Options{})
	for _, m := range manifests {
		put(t, s, m)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.Start(l)
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := apiserver.WriteKubeconfig(kubeconfig, l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	return s, kubeconfig
}

// put stores the objects of a manifest; like kubectl it fills in the namespace.
func put(t *testing.T, s *apiserver.Server, manifest string) {
	t.Helper()
	for document := range strings.SplitSeq(manifest, "---\n") {
		var o apiserver.Object
		switch {
		case strings.Contains(document, "kind: Service\n"):
			o = &corev1.Service{}
		case strings.Contains(document, "kind: EndpointSlice\n"):
			o = &discoveryv1.EndpointSlice{}
		default:
			o = &corev1.Node{}
		}
		if err := yaml.UnmarshalStrict([]byte(document), o); err != nil {
			t.Fatal(err)
		}
		if _, isNode := o.(*corev1.Node); !isNode {
			o.SetNamespace("default")
		}
		if err := s.Put(o); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPlanFromAPI(t *testing.T) {
	headless := "apiVersion: v1\nkind: Service\nmetadata: {name: headless}\nspec: {clusterIP: None, ports: [{port: 80}]}\n"
	_, kubeconfig := startAPI(t, nodeManifest, webManifest, headless)
	var out, errs bytes.Buffer
	env := Env{
		Args:   []string{"plan", "--kubeconfig", kubeconfig, "--hostname-override=alder", "--addresses=192.0.2.11", "--why"},
		Stdout: &out, Stderr: &errs, ReadFile: os.ReadFile, Getenv: os.Getenv,
	}
	if status := Main(t.Context(), env); status != exitOK {
		t.Fatalf("status %d\n%s%s", status, out.String(), errs.String())
	}
	for _, want := range []string{"service default/web TCP IPv4", "endpoint 10.61.1.5:8080", "Service default/headless", "Headless"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s", want, out.String())
		}
	}
}

// A plan for a Node that does not exist is not what the proxy would do.
func TestPlanWithoutItsNode(t *testing.T) {
	_, kubeconfig := startAPI(t, nodeManifest, webManifest)
	for name, want := range map[string]bool{"alder": false, "birch": true} {
		var out, errs bytes.Buffer
		env := Env{
			Args:   []string{"plan", "--kubeconfig", kubeconfig, "--hostname-override=" + name, "--addresses=192.0.2.11"},
			Stdout: &out, Stderr: &errs, ReadFile: os.ReadFile, Getenv: os.Getenv,
		}
		if status := Main(t.Context(), env); status != exitOK {
			t.Fatalf("status %d\n%s", status, errs.String())
		}
		if have := strings.Contains(errs.String(), `would write nothing yet, but wait: there is no Node named "birch"`); have != want {
			t.Errorf("node %s: %s", name, errs.String())
		}
	}
}

// The whole proxy over an API server: it waits for its Node, serves, reports
// events, and follows changes.
func TestProxyFromAPI(t *testing.T) {
	api, kubeconfig := startAPI(t, webManifest)
	f := startFixture(t, "clientConnection: {kubeconfig: "+kubeconfig+"}\n", nil)
	eventually(t, "the missing Node in the status", func() bool {
		return strings.Contains(strings.Join(f.status(t).Loop.Waiting, " "), `no Node named "alder"`)
	})
	if code, body := get(f.healthz + "/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "--hostname-override") {
		t.Errorf("/healthz without a Node: %d %s", code, body)
	}
	if f.backend.text() != "" {
		t.Error("something was programmed")
	}

	put(t, api, nodeManifest)
	f.awaitReady(t)
	if have := f.backend.text(); !strings.Contains(have, "endpoint 10.61.1.5:8080") {
		t.Errorf("plan:\n%s", have)
	}
	if code, body := get(f.healthz + "/healthz"); code != http.StatusOK {
		t.Errorf("/healthz: %d %s", code, body)
	}
	eventually(t, "the event Starting in the API", func() bool {
		return slices.ContainsFunc(api.Events(), func(e apiserver.Event) bool {
			return e.Reason == "Starting" && e.Object.Kind == "Node" && e.Object.Name == "alder" && e.Type == "Normal"
		})
	})

	if _, body := get(f.metric + "/metrics"); !strings.Contains(body, `rest_client_requests_total{code="200",`) {
		t.Errorf("requests to the API server are not counted:\n%s", body)
	}

	put(t, api, strings.ReplaceAll(webManifest, "10.61.1.5", "10.61.1.6"))
	eventually(t, "the changed endpoint", func() bool { return strings.Contains(f.backend.text(), "10.61.1.6:8080") })
	put(t, api, strings.Replace(nodeManifest, "name: alder}", "name: alder}\nspec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}", 1))
	eventually(t, "/healthz of a node that is to be deleted", func() bool {
		code, _ := get(f.healthz + "/healthz")
		return code == http.StatusServiceUnavailable
	})
	if code, _ := get(f.healthz + "/livez"); code != http.StatusOK {
		t.Errorf("/livez: %d", code)
	}
}

// A kubeconfig that cannot be read ends the program; an API server that does not
// answer does not.
func TestUnusableAPI(t *testing.T) {
	var errs bytes.Buffer
	env := Env{
		Args:   []string{"plan", "--kubeconfig=" + t.TempDir() + "/none", "--hostname-override=alder"},
		Stderr: &errs, ReadFile: os.ReadFile, Host: &host.Fake{}, Getenv: os.Getenv,
	}
	if status := Main(t.Context(), env); status != exitFailed || !strings.Contains(errs.String(), "none") {
		t.Errorf("status %d: %s", status, errs.String())
	}
	f := startFixture(t, "clientConnection: {kubeconfig: "+deadKubeconfig(t)+"}\n", nil)
	eventually(t, "what is awaited", func() bool {
		return strings.Contains(strings.Join(f.status(t).Loop.Waiting, " "), "API server Service")
	})
	if code, body := get(f.healthz + "/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "not known yet") || strings.Contains(body, "--hostname-override") {
		t.Errorf("/healthz blames the Node's name: %d %s", code, body)
	}
}

// deadKubeconfig leads to a port that nobody listens on.
func deadKubeconfig(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := apiserver.WriteKubeconfig(path, freeAddress(t)); err != nil {
		t.Fatal(err)
	}
	return path
}
