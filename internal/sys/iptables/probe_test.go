package iptables

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// host is an imagined host for a Finder.
type host struct {
	programs []string          // paths
	prints   map[string]string // by "program arguments"
	legacy   string            // the legacy store's tables, one a line
	ipv6     bool
	fails    error // of what prints nothing; nil: some error
}

func (h host) finder(t *testing.T, path string) *Finder {
	t.Helper()
	proc := t.TempDir()
	net := filepath.Join(proc, "thread-self/net")
	if err := os.MkdirAll(net, 0o755); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"ip_tables_names": h.legacy}
	if h.ipv6 {
		files["if_inet6"] = ""
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(net, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return &Finder{
		Path: path, Proc: proc,
		Exists: func(p string) bool { return slices.Contains(h.programs, p) },
		Ours:   func(_ Table, c string) bool { return strings.HasPrefix(c, "KUBE-SVC") },
		Run: func(_ context.Context, _ int, program string, args ...string) ([]byte, error) {
			out, ok := h.prints[program+" "+strings.Join(args, " ")]
			if !ok {
				return nil, cmp.Or(h.fails, errors.New("it fails"))
			}
			return []byte(out), nil
		},
	}
}

// installed lists the programs of a directory.
func installed(dir string, names ...string) []string {
	var out []string
	for _, n := range names {
		out = append(out, dir+"/iptables"+n, dir+"/iptables"+n+"-save", dir+"/iptables"+n+"-restore")
	}
	return out
}

const usable = "-P POSTROUTING ACCEPT\n"

func TestStoreChoice(t *testing.T) {
	debian := installed("/usr/sbin", "", "-legacy", "-nft")
	nat := func(h map[string]string) map[string]string {
		for _, s := range []string{"", "-legacy", "-nft"} {
			h["/usr/sbin/iptables"+s+" -w 5 -t nat -S POSTROUTING"] = usable
			h["/first/iptables"+s+" -w 5 -t nat -S POSTROUTING"] = usable
		}
		return h
	}
	for name, c := range map[string]struct {
		host
		path  string
		want  Store
		other bool
	}{
		"nothing says otherwise": {host{programs: debian, prints: nat(map[string]string{})}, "/usr/sbin", NFT, true},
		"kubelet's hint in legacy": {host{programs: debian, legacy: "mangle\n", prints: nat(map[string]string{
			"/usr/sbin/iptables-legacy-save -t mangle": "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n",
			"/usr/sbin/iptables-nft-save -t nat":       "*nat\n-A POSTROUTING -j FOREIGN\nCOMMIT\n",
		})}, "/usr/sbin", Legacy, true},
		"others' rules in legacy": {host{programs: debian, legacy: "nat\nfilter\n", prints: nat(map[string]string{
			"/usr/sbin/iptables-legacy-save -t nat": "*nat\n-A POSTROUTING -j FOREIGN\nCOMMIT\n",
			"/usr/sbin/iptables-nft-save -t nat":    "*nat\n-A KUBE-SVC-A -j RETURN\n-A KUBE-SVC-A -j RETURN\nCOMMIT\n",
		})}, "/usr/sbin", Legacy, true},
		"our rules in legacy": {host{programs: debian, legacy: "nat\n", prints: nat(map[string]string{
			"/usr/sbin/iptables-legacy-save -t nat": "*nat\n-A KUBE-SVC-A -j RETURN\nCOMMIT\n",
		})}, "/usr/sbin", Legacy, true},
		"one store installed": {host{programs: installed("/usr/sbin", "-legacy"), prints: nat(map[string]string{})}, "/usr/sbin", Legacy, false},
		"plain comes first": {host{programs: append(installed("/first", ""), debian...), prints: nat(map[string]string{
			"/first/iptables-restore --version": "iptables-restore v1.8.9 (legacy)\n",
		})}, "/first:/usr/sbin", Legacy, true},
		"plain only": {host{programs: installed("/usr/sbin", ""), prints: nat(map[string]string{
			"/usr/sbin/iptables-restore --version": "iptables-restore v1.8.9 (nf_tables)\n",
		})}, "/bin:/usr/sbin", NFT, false},
		"not in PATH": {host{programs: debian, prints: nat(map[string]string{})}, "/bin", NFT, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := c.finder(t, c.path).Find(t.Context(), IPv4)
			if err != nil {
				t.Fatal(err)
			}
			if got.Use.Store() != c.want || (got.Other != nil) != c.other {
				t.Errorf("store %s, other %v (%s); want %s, other %v", got.Use.Store(), got.Other, got.Why, c.want, c.other)
			}
			if got.Other != nil && got.Other.Store() == got.Use.Store() {
				t.Error("the other store is the same")
			}
		})
	}
}

func TestUnsupported(t *testing.T) {
	for name, c := range map[string]struct {
		host
		family Family
		says   string
	}{
		"no programs": {host{}, IPv4, "install the package iptables"},
		"no IPv6":     {host{}, IPv6, "no IPv6"},
		"no nat":      {host{programs: installed("/usr/sbin", "-nft")}, IPv4, "no table nat"},
		"no rights":   {host{programs: installed("/usr/sbin", "-nft"), fails: errors.New("exit status 4: Permission denied (you must be root)")}, IPv4, "CAP_NET_ADMIN"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.finder(t, "/usr/sbin").Find(t.Context(), c.family)
			if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("Find: %v, want ErrUnsupported and %q", err, c.says)
			}
		})
	}
}
