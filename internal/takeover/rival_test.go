package takeover

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// mustProc makes a folder like /proc, with self in network namespace 1.
func mustProc(t *testing.T, processes ...[3]string) string {
	t.Helper()
	dir := t.TempDir()
	for _, p := range append(processes, [3]string{"self", "svcproxy", "net:[1]"}) {
		pid := filepath.Join(dir, p[0])
		if err := os.MkdirAll(filepath.Join(pid, "ns"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(pid, "comm"), []byte(p[1]+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if p[2] == "" {
			continue
		}
		if err := os.Symlink(p[2], filepath.Join(pid, "ns/net")); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// answering is a client for which every address is a server with these pages.
func answering(t *testing.T, pages map[string]string) *http.Client {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page, ok := pages[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(page))
	}))
	t.Cleanup(s.Close)
	return &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, s.Listener.Addr().String())
	}}}
}

func TestProgrammed(t *testing.T) {
	const done, queued = "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"
	for metrics, want := range map[string]bool{
		"": false,
		"# HELP " + done + " x\n" + done + " 0\n":        false,
		done + " 1.7e+09\n" + queued + " 1.7e+09\n":      true,
		done + "{ip_family=\"IPv4\"} 1.7e+09\nother 0\n": true,
		queued + " 3\n": false,
		done + "{ip_family=\"IPv6\"} 1\n" + queued + "{ip_family=\"IPv4\"} 1\n":     false,
		done + "{ip_family=\"IPv4\"} 0\n" + queued + "{ip_family=\"IPv4\"} 1\n":     false,
		done + "{ip_family=\"IPv4\"} 2\n" + queued + "{ip_family=\"IPv4\"} 1e+09\n": true,
	} {
		f := Finder{Proc: mustProc(t), Client: answering(t, map[string]string{"/metrics": metrics})}
		if have := f.Programmed(t.Context()); have != want {
			t.Errorf("%q: have %v", metrics, have)
		}
	}
}

func TestFind(t *testing.T) {
	silent := &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return nil, os.ErrDeadlineExceeded
	}}}
	kubeProxy := map[string]string{"/proxyMode": "ipvs"}
	ourselves := map[string]string{"/proxyMode": "nftables", "/status": "{}"}
	for _, c := range []struct {
		name   string
		finder Finder
		want   string
	}{
		{"nobody", Finder{Proc: mustProc(t), Client: silent}, ""},
		{"a process", Finder{Proc: mustProc(t, [3]string{"12", "kube-proxy", "net:[1]"}), Client: silent}, "process 12"},
		{"one on another node of the same host", Finder{Proc: mustProc(t, [3]string{"12", "kube-proxy", "net:[2]"}), Client: silent}, ""},
		{"one that has ended", Finder{Proc: mustProc(t, [3]string{"12", "kube-proxy", ""}), Client: silent}, ""},
		{"another program", Finder{Proc: mustProc(t, [3]string{"12", "kube-router", "net:[1]"}), Client: silent}, ""},
		{"ourselves", Finder{Proc: mustProc(t), Client: answering(t, ourselves)}, ""},
		{"one in another program", Finder{Proc: mustProc(t), Client: answering(t, kubeProxy)}, "it answers on 127.0.0.1:10249, in mode ipvs"},
		{"one that is seen both ways", Finder{Proc: mustProc(t, [3]string{"12", "kube-proxy", "net:[1]"}), Client: answering(t, kubeProxy)}, "process 12 in mode ipvs"},
		{"another server", Finder{Proc: mustProc(t), Client: answering(t, map[string]string{"/proxyMode": "<html>"})}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			have := ""
			if r := c.finder.Find(t.Context()); r != nil {
				have = r.String()
			}
			if have != c.want {
				t.Errorf("want %q, have %q", c.want, have)
			}
		})
	}
}

// A clean-up says who would write everything again.
func TestUnfit(t *testing.T) {
	kubeProxy := map[string]string{"/proxyMode": "ipvs"}
	ourselves := map[string]string{"/proxyMode": "nftables", "/status": "{}"}
	for _, c := range []struct {
		pages           map[string]string
		kubeProxy, kept bool
		want            string
	}{
		{nil, false, false, ""},
		{map[string]string{"/status": "fine"}, false, false, ""},
		{kubeProxy, false, false, "a kube-proxy runs"},
		{kubeProxy, true, false, "a kube-proxy runs"},
		{kubeProxy, false, true, ""},
		{ourselves, false, false, "a svcproxy runs on this node (it answers on 127.0.0.1:10249, in mode nftables)"},
		{ourselves, false, true, "a svcproxy runs"},
		{ourselves, true, false, ""},
	} {
		f := Finder{Proc: mustProc(t), Client: answering(t, c.pages)}
		if have := f.Unfit(t.Context(), c.kubeProxy, c.kept); (c.want == "") != (have == "") || !strings.HasPrefix(have, c.want) {
			t.Errorf("%v, kubeProxy %v, kept %v: want %q, have %q", c.pages, c.kubeProxy, c.kept, c.want, have)
		}
	}
}
