//go:build cluster

package cluster

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// admin is a user of the API server who may do everything. It speaks plain HTTP
// and JSON, so that nothing of the proxy's own client is on this side too.
type admin struct {
	client *http.Client
	base   string
}

func mustAdmin(t *testing.T, p *plane) *admin {
	t.Helper()
	client, err := p.client(p.host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.CloseIdleConnections)
	return &admin{client: client, base: "https://" + p.addr}
}

// do sends a request and decodes the answer into out, if that is not nil.
func (a *admin) do(t *testing.T, method, path, contentType string, body []byte, out any) error {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, a.base+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	res, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, res.Status, answer)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(answer, out)
}

func (a *admin) mustDo(t *testing.T, method, path, contentType string, body []byte, out any) {
	t.Helper()
	if err := a.do(t, method, path, contentType, body, out); err != nil {
		t.Fatal(err)
	}
}

// collections are the paths of objects by kind; %s is the namespace.
var collections = map[string]string{
	"Node":          "/api/v1/nodes",
	"Service":       "/api/v1/namespaces/%s/services",
	"EndpointSlice": "/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices",

	"Pod":                      "/api/v1/namespaces/%s/pods",
	"ConfigMap":                "/api/v1/namespaces/%s/configmaps",
	"ServiceAccount":           "/api/v1/namespaces/%s/serviceaccounts",
	"DaemonSet":                "/apis/apps/v1/namespaces/%s/daemonsets",
	"ClusterRole":              "/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding":       "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
	"ServiceMonitor":           "/apis/monitoring.coreos.com/v1/namespaces/%s/servicemonitors",
}

// mustApply applies a manifest of one or more documents, as kubectl apply
// --server-side does. A status in it goes to the object's status.
func (a *admin) mustApply(t *testing.T, manifest string) {
	t.Helper()
	for _, doc := range strings.Split(manifest, "\n---\n") {
		var object map[string]any
		if err := yaml.Unmarshal([]byte(doc), &object); err != nil {
			t.Fatalf("manifest: %v\n%s", err, doc)
		}
		status := object["status"]
		delete(object, "status")
		body, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		path := mustPath(t, object)
		a.mustDo(t, http.MethodPatch, path+"?fieldManager=test&force=true", "application/apply-patch+yaml", body, nil)
		if status == nil {
			continue
		}
		body, err = json.Marshal(map[string]any{"status": status})
		if err != nil {
			t.Fatal(err)
		}
		a.mustDo(t, http.MethodPatch, path+"/status", "application/merge-patch+json", body, nil)
	}
}

func mustPath(t *testing.T, object map[string]any) string {
	t.Helper()
	kind, _ := object["kind"].(string)
	meta, _ := object["metadata"].(map[string]any)
	name, _ := meta["name"].(string)
	namespace, _ := meta["namespace"].(string)
	if namespace == "" {
		namespace = "default"
	}
	path, ok := collections[kind]
	if !ok || name == "" {
		t.Fatalf("manifest: kind %q, name %q: unknown kind or no name", kind, name)
	}
	if strings.Contains(path, "%s") {
		path = fmt.Sprintf(path, namespace)
	}
	return path + "/" + name
}
