//go:build cluster

package cluster

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write deploy/svcproxy.yaml anew from the chart")

// manifests is the file that people apply who do not use the chart.
const manifests = "../../deploy/svcproxy.yaml"

// preamble says in that file where it comes from.
const preamble = `# The chart in deploy/chart with its defaults, for kubectl apply. "make manifests" writes
# it anew. Before it is applied: replace API_SERVER_HOST by the address at which the nodes
# reach the API server before any Service works, and the image by yours.
`

// monitors lets the API server know ServiceMonitors, as the Prometheus operator does.
const monitors = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: servicemonitors.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: ServiceMonitor, plural: servicemonitors, singular: servicemonitor}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}`

// mustRender renders the chart.
func mustRender(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command(mustGetenv(t, "SVCPROXY_HELM"), append([]string{"template", "svcproxy", "../../deploy/chart", "--namespace", "kube-system"}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, stderr.String())
	}
	return stdout.String()
}

// TestManifestsAreTheChart keeps the plain manifests at what the chart renders.
func TestManifestsAreTheChart(t *testing.T) {
	want := preamble + mustRender(t, "--set", "apiServer.host=API_SERVER_HOST")
	if *update {
		if err := os.WriteFile(manifests, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(manifests)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Error("deploy/svcproxy.yaml is not what the chart renders; \"make manifests\" writes it anew")
	}
}

// TestChartRefusesWhatCannotWork shows that what is missing is named.
func TestChartRefusesWhatCannotWork(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"", "set apiServer.host"},
		{"--set apiServer.host=192.0.2.1 --set serviceMonitor.enabled=true", "set config.metricsBindAddress"},
		{"--set apiServer.host=192.0.2.1 --set serviceMonitor.enabled=true --set config.metricsBindAddress=", "set config.metricsBindAddress"},
		{"--set apiServer.host=192.0.2.1 --set serviceMonitor.enabled=true --set config.metricsBindAddress=[::1]:10249", "set config.metricsBindAddress"},
	} {
		cmd := exec.Command(mustGetenv(t, "SVCPROXY_HELM"), append([]string{"template", "svcproxy", "../../deploy/chart"}, strings.Fields(c.args)...)...)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%q: %v, want %q in\n%s", c.args, err, c.want, out)
		}
	}
}

// TestChartFollowsTheServers shows that kubelet and Prometheus ask where the configuration
// says that the proxy answers: a probe of another port ends it again and again.
func TestChartFollowsTheServers(t *testing.T) {
	for _, c := range []struct{ health, metrics, probe, port string }{
		{"0.0.0.0:20256", "0.0.0.0:20249", "port: 20256}", "port: 20249,"},
		{"", "0.0.0.0", "port: 10256}", "port: 10249,"},
		{"127.0.0.1:10256", "192.0.2.1", `port: 10256, host: "127.0.0.1"}`, "port: 10249,"},
		{"192.0.2.1", "2001:db8::1", `port: 10256, host: "192.0.2.1"}`, "port: 10249,"},
		{"[::]:20256", "[::]:20249", "port: 20256}", "port: 20249,"},
		{"[2001:db8::1]:20256", "[2001:db8::1]:20249", `port: 20256, host: "2001:db8::1"}`, "port: 20249,"},
		{"2001:db8::1", "::", `port: 10256, host: "2001:db8::1"}`, "port: 10249,"},
	} {
		have := mustRender(t, "--set", "apiServer.host=192.0.2.1", "--set", "serviceMonitor.enabled=true",
			"--set-string", "config.healthzBindAddress="+c.health, "--set-string", "config.metricsBindAddress="+c.metrics)
		for _, want := range []string{"httpGet: {path: /livez, " + c.probe, "httpGet: {path: /readyz, " + c.probe, "- {name: metrics, " + c.port} {
			if !strings.Contains(have, want) {
				t.Errorf("health %q, metrics %q: %q is not in\n%s", c.health, c.metrics, want, have)
			}
		}
	}
}

// TestDeploy has the real API server judge the manifests, installs the chart, and runs
// the proxy as the DaemonSet would: with the chart's configuration, and with the rights
// of its service account.
func TestDeploy(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	binary := mustBuild(t)
	w := mustPlane(t)
	w.admin.mustApply(t, monitors)
	plain, err := os.ReadFile(manifests)
	if err != nil {
		t.Fatal(err)
	}
	everything := mustRender(t, "--set", "apiServer.host="+planeIP, "--set", "config.metricsBindAddress=0.0.0.0:10249",
		"--set", "serviceMonitor.enabled=true", "--set", "image.digest=sha256:"+strings.Repeat("0", 64),
		"--set", "config.mode=nftables", "--set", "podLabels.a=b", "--set", "serviceMonitor.labels.a=b",
		"--set", "imagePullSecrets[0].name=x", "--set", "extraArgs[0]=-v=2")
	eventually(t, 20*time.Second, func() error { // the kind has to be established
		return w.admin.do(t, http.MethodGet, "/apis/monitoring.coreos.com/v1/servicemonitors", "", nil, nil)
	})
	for name, text := range map[string]string{"plain manifests": string(plain), "chart": everything} {
		t.Run("dry run of the "+name, func(t *testing.T) {
			for _, doc := range documents(text) {
				if err := w.admin.apply(t, doc, "dryRun=All&fieldValidation=Strict&"); err != nil {
					t.Errorf("%v\n%s", err, doc)
				}
			}
		})
	}
	for _, doc := range documents(everything) {
		if err := w.admin.apply(t, doc, "fieldValidation=Strict&"); err != nil {
			t.Fatal(err)
		}
	}

	var config struct{ Data map[string]string }
	w.admin.mustDo(t, http.MethodGet, "/api/v1/namespaces/kube-system/configmaps/svcproxy", "", nil, &config)
	mustWrite(t, w.plane.path("chart.yaml"), config.Data["config.yaml"])
	var token struct{ Status struct{ Token string } }
	w.admin.mustDo(t, http.MethodPost, "/api/v1/namespaces/kube-system/serviceaccounts/svcproxy/token", "application/json",
		[]byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"expirationSeconds":3600}}`), &token)
	kubeconfig := strings.Replace(mustRead(t, w.plane.kubeconfig(t)), proxyToken, token.Status.Token, 1)
	mustWrite(t, w.plane.path("chart-kubeconfig"), kubeconfig)
	mustWrite(t, w.plane.path("chart.yaml"), strings.Replace(config.Data["config.yaml"], `kubeconfig: ""`, "kubeconfig: "+w.plane.path("chart-kubeconfig"), 1))
	w.proxy = mustStart(t, w.lab.Host("node1"), w.plane.path("svcproxy.log"), binary,
		"--config="+w.plane.path("chart.yaml"), "--hostname-override=node1")
	w.mustFlow(t, reference("httpd-1", "httpd-2", "httpd-3")...)
	w.mustBeReady(t)
	eventually(t, 20*time.Second, func() error { return w.hasEvent(t, "Node", "node1", "Starting") })
	if said := w.proxy.said(); strings.Contains(said, "forbidden") || strings.Contains(said, "configuration: ") {
		t.Errorf("the proxy says\n%s", said)
	}
	w.mustMayNothingElse(t, token.Status.Token)
}

// mustMayNothingElse asks the API server what the service account may do.
func (w *world) mustMayNothingElse(t *testing.T, token string) {
	t.Helper()
	client, err := w.plane.client(w.plane.host)
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	body := `{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectRulesReview","spec":{"namespace":"default"}}`
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+w.plane.addr+"/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/json")
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var review struct {
		Status struct {
			ResourceRules []struct{ Verbs, APIGroups, Resources []string }
		}
	}
	if err := json.NewDecoder(res.Body).Decode(&review); err != nil {
		t.Fatal(err)
	}
	if len(review.Status.ResourceRules) == 0 {
		t.Fatal("the service account may do nothing at all")
	}
	for _, r := range review.Status.ResourceRules {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					switch {
					case strings.HasPrefix(group, "auth"), resource == "clustertrustbundles": // as every service account may
					case group == "events.k8s.io" && resource == "events" && verb == "create":
					case (verb == "list" || verb == "watch") && strings.Contains(" services nodes endpointslices servicecidrs ", " "+resource+" "):
					default:
						t.Errorf("the service account may %s %s of %q", verb, resource, group)
					}
				}
			}
		}
	}
}

// documents splits a manifest, without the empty ones.
func documents(text string) []string {
	var out []string
	for _, doc := range strings.Split("\n"+text, "\n---\n") {
		var object map[string]any
		if err := yaml.Unmarshal([]byte(doc), &object); err == nil && len(object) == 0 {
			continue
		}
		out = append(out, doc)
	}
	return out
}

func mustRead(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// apply applies one document on the server's side.
func (a *admin) apply(t *testing.T, doc, query string) error {
	t.Helper()
	var object map[string]any
	if err := yaml.Unmarshal([]byte(doc), &object); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	return a.do(t, http.MethodPatch, mustPath(t, object)+"?"+query+"fieldManager=test&force=true", "application/apply-patch+yaml", body, nil)
}
