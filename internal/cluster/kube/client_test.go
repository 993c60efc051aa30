package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNewClient(t *testing.T) {
	dir := t.TempDir()
	broken := filepath.Join(dir, "broken")
	if err := os.WriteFile(broken, []byte("clusters: 7"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for _, tc := range []struct {
		name string
		c    Connection
		want string // part of the error, "" for none
	}{
		{"master alone", Connection{Master: "http://192.0.2.1:8080"}, ""},
		{"content types", Connection{Master: "http://192.0.2.1", ContentType: "application/json", AcceptContentTypes: "application/cbor,application/json"}, ""},
		{"nothing", Connection{}, "--kubeconfig"},
		{"missing file", Connection{Kubeconfig: filepath.Join(dir, "none")}, filepath.Join(dir, "none")},
		{"broken file", Connection{Kubeconfig: broken}, broken},
		{"content type", Connection{Master: "http://192.0.2.1", ContentType: "application/xml"}, `clientConnection.contentType "application/xml"`},
		{"accept", Connection{Master: "http://192.0.2.1", AcceptContentTypes: "application/cbor"}, `clientConnection.acceptContentTypes "application/cbor"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			k, err := NewClient(tc.c)
			if tc.want == "" {
				if err != nil || !strings.HasPrefix(k.Host(), "http://192.0.2.1") {
					t.Errorf("client %v, error %v", k, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %s", err, tc.want)
			}
		})
	}
}
