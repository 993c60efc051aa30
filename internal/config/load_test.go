package config

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
)

// load parses args; files are by name.
func load(args []string, files map[string]string) (*Config, []string, error) {
	f := NewFlags()
	fs := pflag.NewFlagSet("svcproxy", pflag.ContinueOnError)
	fs.SetNormalizeFunc(NormalizeName)
	fs.SetOutput(new(bytes.Buffer))
	f.Register(fs)
	if err := fs.Parse(args); err != nil {
		return nil, nil, err
	}
	return f.Load(func(name string) ([]byte, error) {
		if content, ok := files[name]; ok {
			return []byte(content), nil
		}
		return nil, os.ErrNotExist
	})
}

func mustLoad(t *testing.T, args ...string) *Config {
	t.Helper()
	c, _, err := load(args, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const header = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// file loads a configuration file with the given body, and further flags.
func file(body string, args ...string) (*Config, []string, error) {
	return load(append([]string{"--config", "f"}, args...), map[string]string{"f": header + body})
}

func mustFile(t *testing.T, body string, args ...string) *Config {
	t.Helper()
	c, _, err := file(body, args...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var equalConfigs = cmp.Options{
	cmpopts.IgnoreUnexported(Config{}), cmpopts.EquateEmpty(),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func TestDefaults(t *testing.T) {
	want := &Config{
		Mode: IPTables, Preference: []string{IPTables}, ModeDefault: true,
		Client:      Client{ContentType: "application/vnd.kubernetes.protobuf", QPS: 5, Burst: 10},
		Staleness:   150 * time.Second,
		BindAddress: netip.MustParseAddr("0.0.0.0"),
		Healthz:     netip.MustParseAddrPort("0.0.0.0:10256"), Metrics: netip.MustParseAddrPort("127.0.0.1:10249"),
		SyncPeriod: 30 * time.Second, MinSyncPeriod: time.Second,
		MasqueradeBit: 14, LocalhostNodePorts: true,
		Local: Local{Mode: ClusterCIDR}, AllowExternalIPs: true,
		OOMScoreAdj:      -999,
		Conntrack:        Conntrack{MaxPerCore: 32768, Min: 131072, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour},
		ConfigSyncPeriod: 15 * time.Minute,
		HealthCheck:      HealthCheck{ProbesPerSecond: 100},
		Userspace:        UserspaceOptions{UDPTimeout: 30 * time.Second, RouteBit: 15},
	}
	if diff := cmp.Diff(want, mustLoad(t), equalConfigs); diff != "" {
		t.Errorf("flags, -want +have:\n%s", diff)
	}
	if diff := cmp.Diff(want, mustFile(t, ""), equalConfigs); diff != "" {
		t.Errorf("file, -want +have:\n%s", diff)
	}
}

// TestValues checks single settings, from flags and from a file.
func TestValues(t *testing.T) {
	tests := []struct {
		name string
		args []string // or
		body string
		have func(*Config) any
		want any
	}{
		{"healthz: bare IP gets the port", []string{"--healthz-bind-address=1.2.3.4"}, "", healthz, "1.2.3.4:10256"},
		{"healthz: bare IP gets the deprecated port", []string{"--healthz-bind-address=1.2.3.4", "--healthz-port=8000"}, "", healthz, "1.2.3.4:8000"},
		{"healthz: a port in the address wins", []string{"--healthz-bind-address=1.2.3.4:9000", "--healthz-port=8000"}, "", healthz, "1.2.3.4:9000"},
		{"healthz: IPv6", []string{"--healthz-bind-address=fd00::1"}, "", healthz, "[fd00::1]:10256"},
		{"healthz: empty keeps the default", []string{"--healthz-bind-address="}, "", healthz, "0.0.0.0:10256"},
		{"healthz: port 0 disables", []string{"--healthz-port=0"}, "", healthz, "invalid AddrPort"},
		{"metrics: port 0 disables", []string{"--metrics-port=0"}, "", metrics, "invalid AddrPort"},
		{"metrics: all interfaces", []string{"--metrics-bind-address=0.0.0.0:10249"}, "", metrics, "0.0.0.0:10249"},
		{"file: healthz of an IPv6 bind address", nil, "bindAddress: \"::\"", healthz, "[::]:10256"},
		{"file: metrics of an IPv6 bind address", nil, "bindAddress: \"fd00::5\"", metrics, "[::1]:10249"},
		{"file: bare IPs get ports", nil, "healthzBindAddress: 10.0.0.1\nmetricsBindAddress: 10.0.0.2", metrics, "10.0.0.2:10249"},
		{"file: empty is the default", nil, "healthzBindAddress: \"\"", healthz, "0.0.0.0:10256"},
		{"bind address with leading zeros", []string{"--bind-address=010.001.002.003"}, "",
			func(c *Config) any { return c.BindAddress.String() }, "10.1.2.3"},

		{"sync periods by flag", []string{"--iptables-sync-period=20s", "--iptables-min-sync-period=0", "--ipvs-sync-period=9s"}, "", periods, "20s 0s"},
		{"sync periods by flag in nftables mode", []string{"--proxy-mode=nftables", "--iptables-sync-period=20s", "--iptables-min-sync-period=2s"}, "", periods, "20s 2s"},
		{"sync periods by flag in ipvs mode", []string{"--proxy-mode=ipvs", "--iptables-sync-period=20s", "--ipvs-sync-period=9s"}, "", periods, "9s 1s"},
		{"file: sync periods of the mode's section", nil, "mode: nftables\niptables: {syncPeriod: 5s}\nnftables: {syncPeriod: 40s, minSyncPeriod: 3s}", periods, "40s 3s"},
		{"file: zero is the default", nil, "iptables: {syncPeriod: 0s, minSyncPeriod: 0s}", periods, "30s 1s"},
		{"file: zero stays for ipvs' minimum", nil, "mode: ipvs", periods, "30s 0s"},

		{"masquerade-all", []string{"--masquerade-all"}, "", masqueradeAll, true},
		{"masquerade-all in nftables mode", []string{"--masquerade-all", "--proxy-mode=nftables"}, "", masqueradeAll, true},
		{"file: masqueradeAll of ipvs is that of iptables", nil, "mode: ipvs\niptables: {masqueradeAll: true}", masqueradeAll, true},
		{"file: masqueradeAll of another mode's section", nil, "mode: nftables\niptables: {masqueradeAll: true}", masqueradeAll, false},
		{"masquerade bit", []string{"--iptables-masquerade-bit=0"}, "", masqueradeBit, 0},
		{"file: masquerade bit of nftables", nil, "mode: nftables\nnftables: {masqueradeBit: 7}\niptables: {masqueradeBit: 3}", masqueradeBit, 7},
		{"file: masquerade bit of ipvs is that of iptables", nil, "mode: ipvs\niptables: {masqueradeBit: 3}", masqueradeBit, 3},

		{"node ports: default", nil, "", nodePorts, ""},
		{"node ports: default in nftables mode", []string{"--proxy-mode=nftables"}, "", nodePorts, "primary"},
		{"node ports: keyword combined with literal CIDR", []string{"--nodeport-addresses=localhost,192.0.2.7/24"}, "", nodePorts, "localhost 192.0.2.0/24"},
		{"node ports: repeated flag", []string{"--nodeport-addresses=primary", "--nodeport-addresses=2001:db8::/64"}, "", nodePorts, "primary 2001:db8::/64"},

		{"LocalModeClusterCIDR, single-stack IPv4 cluster", []string{"--cluster-cidr=10.0.0.0/14"}, "", local, "ClusterCIDR [10.0.0.0/14] "},
		{"LocalModeClusterCIDR, single-stack IPv6 cluster", []string{"--cluster-cidr=2002:0:0:1234::/64"}, "", local, "ClusterCIDR [2002:0:0:1234::/64] "},
		{"LocalModeClusterCIDR, dual-stack IPv6-primary cluster", nil, "clusterCIDR: \"2002:0:0:1234::/64,10.0.0.0/14\"", local, "ClusterCIDR [2002:0:0:1234::/64 10.0.0.0/14] "},
		{"LocalModeClusterCIDR, no ClusterCIDR", []string{"--detect-local-mode=ClusterCIDR"}, "", local, "ClusterCIDR [] "},
		{"LocalModeNodeCIDR: clusterCIDR is not read", []string{"--detect-local-mode=NodeCIDR", "--cluster-cidr=nonsense"}, "", local, "NodeCIDR [] "},
		{"LocalModeBridgeInterface", []string{"--detect-local-mode=BridgeInterface", "--pod-bridge-interface=eth"}, "", local, "BridgeInterface [] eth"},
		{"LocalModeBridgeInterface, strange bridge name", []string{"--detect-local-mode=BridgeInterface", "--pod-bridge-interface=1234567890"}, "", local, "BridgeInterface [] 1234567890"},
		{"LocalModeInterfaceNamePrefix", nil, "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: veth}", local, "InterfaceNamePrefix [] veth"},

		{"hostname: lower-cased and trimmed", []string{"--hostname-override= Alder "}, "", hostname, "alder"},
		{"file: hostname", nil, "hostnameOverride: Birch", hostname, "birch"},
		{"gate", []string{"--feature-gates=AllowServiceExternalIPs=false"}, "", func(c *Config) any { return c.AllowExternalIPs }, false},
		{"file: gate", nil, "featureGates: {AllowServiceExternalIPs: false}", func(c *Config) any { return c.AllowExternalIPs }, false},
		{"underscores", []string{"--proxy_mode=ipvs"}, "", func(c *Config) any { return c.Mode }, IPVS},
		{"ipvs", nil, "mode: ipvs\nipvs: {scheduler: wlc, strictARP: true, excludeCIDRs: [10.1.2.3/8], tcpTimeout: 3s}",
			func(c *Config) any {
				return fmt.Sprint(c.IPVS.Scheduler, c.IPVS.StrictARP, c.IPVS.ExcludeCIDRs, c.IPVS.TCPTimeout)
			}, "wlctrue [10.0.0.0/8] 3s"},
		{"conntrack", nil, "conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpBeLiberal: true, udpTimeout: 7s}",
			func(c *Config) any { return c.Conntrack },
			Conntrack{TCPCloseWait: time.Hour, TCPBeLiberal: true, UDP: 7 * time.Second}},
		{"json logs", []string{"--logging-format=json", "-v=4"}, "", func(c *Config) any { return c.Log.JSON && c.Log.Verbosity == 4 }, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var c *Config
			if tt.body != "" {
				c = mustFile(t, tt.body, tt.args...)
			} else {
				c = mustLoad(t, tt.args...)
			}
			if diff := cmp.Diff(tt.want, tt.have(c)); diff != "" {
				t.Errorf("-want +have:\n%s", diff)
			}
		})
	}
}

func healthz(c *Config) any       { return c.Healthz.String() }
func metrics(c *Config) any       { return c.Metrics.String() }
func periods(c *Config) any       { return fmt.Sprint(c.SyncPeriod, " ", c.MinSyncPeriod) }
func masqueradeAll(c *Config) any { return c.MasqueradeAll }
func masqueradeBit(c *Config) any { return c.MasqueradeBit }
func hostname(c *Config) any      { return c.HostnameOverride }
func local(c *Config) any {
	return fmt.Sprintf("%s %v %s", c.Local.Mode, c.Local.CIDRs, c.Local.Interface)
}
func nodePorts(c *Config) any {
	var out []string
	for _, a := range c.NodePortAddresses {
		out = append(out, a.String())
	}
	return strings.Join(out, " ")
}

// With a file, only some flags keep their effect.
func TestFileDiscardsFlags(t *testing.T) {
	c := mustFile(t, "mode: ipvs\nlogging: {verbosity: 1, vmodule: [{filePattern: b, verbosity: 2}]}\nhostnameOverride: birch",
		"--proxy-mode=nftables", "--cluster-cidr=10.0.0.0/8", "--iptables-sync-period=7s", "--metrics-bind-address=9.9.9.9",
		"--healthz-port=0", "--kubeconfig=/flag", "--feature-gates=AllowServiceExternalIPs=false", "--oom-score-adj=5",
		"--hostname-override=alder", "--master=https://192.0.2.1", "-v=3", "--vmodule=a=5",
		"--manifests=/m1", "--manifests=/m2", "--service-proxy-name=other", "--staleness-limit=10s")
	want := mustFile(t, "mode: ipvs")
	want.HostnameOverride = "alder"
	want.Client.Master = "https://192.0.2.1"
	want.Log.Verbosity = 3
	want.Manifests, want.ServiceProxyName, want.Staleness = []string{"/m1", "/m2"}, "other", 10*time.Second
	if diff := cmp.Diff(want, c, equalConfigs, cmpopts.IgnoreFields(Config{}, "Log.VModule")); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
	if have := fmt.Sprint(c.Log.VModule); have != "[{a 5} {b 2}]" {
		t.Errorf("vmodule %s: the flag's patterns come first", have)
	}
}

func TestOwnDocument(t *testing.T) {
	body := "mode: iptables\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\nmanifests: [/a, /b]\nserviceProxyName: mine\nstalenessLimit: 20s\n"
	c := mustFile(t, body)
	if !slices.Equal(c.Manifests, []string{"/a", "/b"}) || c.ServiceProxyName != "mine" || c.Staleness != 20*time.Second {
		t.Errorf("have %v, %q, %v", c.Manifests, c.ServiceProxyName, c.Staleness)
	}
	if c.HealthCheck != (HealthCheck{ProbesPerSecond: 100}) {
		t.Errorf("health checks %+v without a word about them", c.HealthCheck)
	}
	h := mustFile(t, body+"healthCheck: {default: \"http,path=/ok,interval=10s\", probesPerSecond: 5}\n").HealthCheck
	if h.ProbesPerSecond != 5 || h.Default.String() != "http,path=/ok,interval=10s,timeout=1s,rise=2,fall=3" {
		t.Errorf("health checks %+v", h)
	}
	c = mustFile(t, body, "--manifests=/c", "--staleness-limit=1m")
	if !slices.Equal(c.Manifests, []string{"/c"}) || c.ServiceProxyName != "mine" || c.Staleness != time.Minute {
		t.Errorf("flags must win: have %v, %q, %v", c.Manifests, c.ServiceProxyName, c.Staleness)
	}
}

// Errors name the field, the value and what to do.
func TestErrors(t *testing.T) {
	tests := []struct {
		name string
		args []string // or
		body string
		want []string
	}{
		{"mode", []string{"--proxy-mode=kernelspace"}, "", []string{"mode", `"kernelspace"`, "userspace, iptables, ipvs, nftables"}},
		{"mode switched off", []string{"--proxy-mode=ipvs", "--feature-gates=KubeProxyIPVS=false"}, "", []string{"mode", `"ipvs"`, "KubeProxyIPVS"}},
		{"bind address flag", []string{"--bind-address=1.2.3"}, "", []string{"--bind-address", `"1.2.3"`}},
		{"healthz flag", []string{"--healthz-bind-address=1.2.3.4:0"}, "", []string{"--healthz-bind-address", `"0"`, "65535"}},
		{"gate without value", []string{"--feature-gates=Foo"}, "", []string{"Foo", "Foo=true"}},
		{"gate with nonsense", []string{"--feature-gates=Foo=maybe"}, "", []string{"Foo", "maybe"}},
		{"hostname", []string{"--hostname-override=  "}, "", []string{"--hostname-override", `"  "`}},
		{"min longer than sync", []string{"--iptables-sync-period=1s", "--iptables-min-sync-period=2s"}, "", []string{"iptables.minSyncPeriod", "2s", "1s"}},
		{"sync zero", []string{"--iptables-sync-period=0"}, "", []string{"iptables.syncPeriod", "greater than 0"}},
		{"every fault at once", nil, "bindAddress: nine\nhealthzBindAddress: 1.2.3.4:70000\nmetricsBindAddress: x\nconntrack: {maxPerCore: -1}\noomScoreAdj: 1001\niptables: {masqueradeBit: 32}\nconfigSyncPeriod: -1s",
			[]string{"bindAddress", `"nine"`, "healthzBindAddress", "70000", "metricsBindAddress", "conntrack.maxPerCore", `"-1"`, "oomScoreAdj", "iptables.masqueradeBit", `"32"`, "configSyncPeriod"}},
		{"cluster CIDR", []string{"--cluster-cidr=10.0.0.0"}, "", []string{"clusterCIDR", `"10.0.0.0"`, "192.0.2.0/24"}},
		{"two of a family", []string{"--cluster-cidr=10.0.0.0/8,11.0.0.0/8"}, "", []string{"clusterCIDR", "one IPv4 and one IPv6"}},
		{"three", []string{"--cluster-cidr=10.0.0.0/8,2002::/64,11.0.0.0/8"}, "", []string{"clusterCIDR"}},
		{"unknown LocalMode", []string{"--detect-local-mode=LocalModeNodeCIDR"}, "", []string{"detectLocalMode", "NodeCIDR"}},
		{"bridge missing", nil, "detectLocalMode: BridgeInterface", []string{"detectLocal.bridgeInterface", "must not be empty"}},
		{"prefix missing", nil, "detectLocalMode: InterfaceNamePrefix", []string{"detectLocal.interfaceNamePrefix", "must not be empty"}},
		{"name too long", nil, "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: sixteen-bytes-xx}", []string{"detectLocal.bridgeInterface", "15 bytes"}},
		{"keyword twice", nil, "nodePortAddresses: [primary, primary]", []string{"nodePortAddresses[1]", "twice"}},
		{"node-port address", nil, "nodePortAddresses: [10.0.0.0/8, 192.0.2.0/33]", []string{"nodePortAddresses[1]", "192.0.2.0/33", "localhost"}},
		{"ipvs CIDR", nil, "mode: ipvs\nipvs: {excludeCIDRs: [a]}", []string{"ipvs.excludeCIDRs[0]", `"a"`}},
		{"ipvs timeout", nil, "mode: ipvs\nipvs: {tcpTimeout: -1s}", []string{"ipvs.tcpTimeout", "-1s"}},
		{"nftables bit", nil, "mode: nftables\nnftables: {masqueradeBit: -1}", []string{"nftables.masqueradeBit"}},
		{"conntrack", nil, "conntrack: {min: -1, tcpEstablishedTimeout: -1s, udpTimeout: -2s}", []string{"conntrack.min", "conntrack.tcpEstablishedTimeout", "conntrack.udpTimeout"}},
		{"burst", nil, "clientConnection: {burst: -1}", []string{"clientConnection.burst"}},
		{"log format", []string{"--logging-format=xml"}, "", []string{"logging.format", `"xml"`, "json"}},
		{"hidden metrics", []string{"--show-hidden-metrics-for-version=one"}, "", []string{"showHiddenMetricsForVersion", "MAJOR.MINOR"}},
		{"type", nil, "clusterCIDR: [10.0.0.0/8]", []string{"configuration file f", "clusterCIDR"}},
		{"unquoted ::", nil, "bindAddress: ::", []string{"configuration file f"}},
		{"two documents of our own", nil, strings.Repeat("---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\n", 2), []string{"second SvcproxyConfiguration"}},
		{"every wrong value at once", nil,
			"bindAddressHardFail: 'true'\nconfigSyncPeriod: 15\nconntrack: {min: many, udpTimeout: fast, tcpBeLiberal: true}\nnodePortAddresses: primary\nipvs: [rr]\nportRange: 80",
			[]string{
				`bindAddressHardFail: "true" cannot be used; give true or false`, `configSyncPeriod: 15 cannot be used; give a duration`,
				`conntrack.min: "many" cannot be used; give a whole number`, `conntrack.udpTimeout: "fast" cannot be used; give a duration`,
				`nodePortAddresses: "primary" cannot be used; give a list`, `ipvs: ["rr"] cannot be used; give fields`, `portRange: 80 cannot be used; give text`,
			}},
		{"a mode after the first", nil, "mode: nftables,userspace,iptables\niptables: {syncPeriod: -1s}\nportRange: 1-70000", []string{"portRange", `"1-70000"`}},
		{"the last mode", nil, "mode: nftables,iptables\niptables: {syncPeriod: -1s}", []string{"iptables.syncPeriod", "-1s"}},
		{"of auto", nil, "mode: auto\nipvs: {tcpTimeout: -1s}", []string{"ipvs.tcpTimeout", "-1s"}},
		{"staleness", []string{"--staleness-limit=0"}, "", []string{"stalenessLimit"}},
		{"health check", nil, "mode: iptables\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\nhealthCheck: {default: \"tcp,code=200\", probesPerSecond: 0}",
			[]string{"healthCheck.default", `"tcp,code=200"`, "use http", "healthCheck.probesPerSecond", "from 1 to 100000"}},
		{"manifests", []string{"--manifests=/a", "--manifests="}, "", []string{"manifests[1]", "names no directory"}},
		{"positional flag value", []string{"--oom-score-adj=lots"}, "", []string{"--oom-score-adj", "lots"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var err error
			if tt.body != "" {
				_, _, err = file(tt.body, tt.args...)
			} else {
				_, _, err = load(tt.args, nil)
			}
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error does not say %q:\n%v", w, err)
				}
			}
		})
	}
}

// What is said of a bad file can be read.
func TestManyErrors(t *testing.T) {
	_, _, err := file("nodePortAddresses: [" + strings.Repeat("x,", 1000) + "]")
	if err == nil || !strings.Contains(err.Error(), "nodePortAddresses[0]") || !strings.Contains(err.Error(), "and 970 more") || len(err.Error()) > 10_000 {
		t.Errorf("have %v", err)
	}
}

func TestFilesThatAreNone(t *testing.T) {
	for name, content := range map[string]string{
		"empty":          "",
		"no kind":        "mode: iptables\n",
		"newer version":  "apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration\n",
		"other kind":     "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeletConfiguration\n",
		"only ours":      "apiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\n",
		"not YAML":       "{",
		"only a comment": "# nothing\n",
		"a list":         "[1, 2]\n",
		"a word":         "\"" + strings.Repeat("word ", 100) + "\"\n",
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := load([]string{"--config=f"}, map[string]string{"f": content})
			if err == nil || !strings.Contains(err.Error(), "configuration file f") || strings.Contains(err.Error(), "Go value") || len(err.Error()) > 400 {
				t.Errorf("have %v", err)
			}
		})
	}
	if _, _, err := load([]string{"--config=missing"}, nil); err == nil || !strings.Contains(err.Error(), "read configuration file") {
		t.Errorf("missing file: have %v", err)
	}
}

// kube-proxy reads the first document only; files with more of them work with it.
func TestFurtherDocumentsHaveNoEffect(t *testing.T) {
	for _, document := range []string{header + "mode: ipvs\n", "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n", "mode: ipvs\n"} {
		c, warnings, err := file("mode: nftables\n---\n" + document)
		wantWarning(t, warnings, err, "document 2")
		if err == nil && c.Mode != NFTables {
			t.Errorf("after %q the mode is %q", document, c.Mode)
		}
	}
}

// With manifests alone no server can be silent.
func TestShortStalenessLimit(t *testing.T) {
	_, warnings, err := load([]string{"--staleness-limit=1m"}, nil)
	wantWarning(t, warnings, err, "stalenessLimit 1m0s")
	for _, args := range [][]string{{"--staleness-limit=90s"}, {"--staleness-limit=1s", "--manifests=/a"}} {
		if _, warnings, err := load(args, nil); err != nil || len(warnings) > 0 {
			t.Errorf("%q: %v %q", args, err, warnings)
		}
	}
}

// Settings without effect here are no reason not to start.
func TestHarmlessSettings(t *testing.T) {
	for _, args := range [][]string{
		{"--log-text-split-stream", "--log-text-info-buffer-size=4Ki"},
		{"--logging-format=json", "--vmodule=planner=4"},
		{"--log-flush-frequency=0"},
		{"--show-hidden-metrics-for-version=1.10"},
	} {
		if _, _, err := load(args, nil); err != nil {
			t.Errorf("%q: %v", args, err)
		}
	}
}

func TestAFileInJSON(t *testing.T) {
	c, warnings, err := load([]string{"--config=f"}, map[string]string{
		"f": `{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration","mode":"ipvs","clusterCIDR":"10.0.0.0/8"}`})
	if err != nil || len(warnings) > 0 {
		t.Fatal(err, warnings)
	}
	if c.Mode != IPVS || len(c.Local.CIDRs) != 1 {
		t.Errorf("have %q, %v", c.Mode, c.Local.CIDRs)
	}
}

// What is retired or unknown is accepted with exactly one warning that names it.
func TestRetired(t *testing.T) {
	flags := [][2]string{
		{"proxy-port-range", "0-0"}, {"udp-timeout", "250ms"}, {"resource-container", "/kube-proxy"},
		{"boot-id-file", "/proc/x"}, {"machine-id-file", "/etc/machine-id"}, {"log-dir", "/var/log"},
		{"log-file", "x"}, {"stderrthreshold", "2"}, {"source-vip", "1.2.3.4"}, {"network-name", "n"},
		{"cleanup-ipvs", "true"}, {"cleanup-iptables", "false"}, {"logtostderr", "true"}, {"alsologtostderr", "true"},
		{"enable-dsr", "true"}, {"windows-service", "false"},
		{"proxy_port_range", "1-2"},
	}
	for _, f := range flags {
		t.Run(f[0], func(t *testing.T) {
			_, warnings, err := load([]string{"--" + f[0] + "=" + f[1]}, nil)
			wantWarning(t, warnings, err, "--"+strings.ReplaceAll(f[0], "_", "-"))
		})
	}
	for body, name := range map[string]string{
		"portRange: 1-2":                                  "portRange",
		"udpIdleTimeout: 250ms":                           "udpIdleTimeout",
		"resourceContainer: /kube-proxy":                  "resourceContainer",
		"clusterCidr: 10.0.0.0/8":                         "clusterCidr",
		"iptables: {masquerade: 3}":                       "iptables.masquerade",
		"mode: iptables\nmode: ipvs":                      "mode",
		"winkernel: {networkName: x}":                     "winkernel",
		"featureGates: {SupportIPVSProxyMode: true}":      "SupportIPVSProxyMode",
		"featureGates: {NFTablesProxyMode: true}":         "NFTablesProxyMode",
		"featureGates: {NeverHeardOf: true}":              "NeverHeardOf",
		"logging: {options: {json: {splitStream: true}}}": "split",
	} {
		t.Run(name, func(t *testing.T) {
			_, warnings, err := file(body)
			wantWarning(t, warnings, err, name)
		})
	}
	_, warnings, err := load([]string{"--feature-gates=SupportIPVSProxyMode=true,AllowServiceExternalIPs=true", "--proxy-mode=ipvs"}, nil)
	wantWarning(t, warnings, err, "SupportIPVSProxyMode")
}

func wantWarning(t *testing.T, warnings []string, err error, name string) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], name) {
		t.Errorf("want one warning about %s, have %q", name, warnings)
	}
}

func TestEveryModeIsAName(t *testing.T) {
	for _, m := range Modes {
		if c := mustLoad(t, "--proxy-mode="+m); c.Mode != m || c.ModeDefault {
			t.Errorf("%s: have %q, default %t", m, c.Mode, c.ModeDefault)
		}
	}
}

// kubeadmFile is what kubeadm puts into the ConfigMap kube-proxy.
const kubeadmFile = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
`

// A cluster's own file gives the defaults, without a word.
func TestKubeadmFile(t *testing.T) {
	have, warnings, err := load([]string{"--config=f", "--hostname-override=node-1"}, map[string]string{"f": kubeadmFile})
	if err != nil || len(warnings) > 0 {
		t.Fatal(err, warnings)
	}
	want := mustLoad(t, "--cluster-cidr=10.244.0.0/16", "--kubeconfig=/var/lib/kube-proxy/kubeconfig.conf", "--hostname-override=node-1")
	if diff := cmp.Diff(want, have, equalConfigs); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
}

// Whatever is in a file, loading it ends with a configuration or an error, and what
// loads is written so that it loads again.
func FuzzFile(f *testing.F) {
	f.Add(kubeadmFile)
	f.Add(header + "mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0/8]}\n")
	f.Add(header + "nodePortAddresses: [primary, \"::1/128\"]\n---\napiVersion: svcproxy.io/v1alpha1\nkind: SvcproxyConfiguration\nmanifests: [/a]\n")
	f.Add(header + "logging: {vmodule: [{filePattern: a, verbosity: 1}]}\nfeatureGates: {A: true}\n")
	f.Fuzz(func(t *testing.T, content string) {
		c, _, err := load([]string{"--config=f"}, map[string]string{"f": content})
		if err != nil {
			return
		}
		var b bytes.Buffer
		if _, err := c.WriteTo(&b); err != nil {
			t.Fatal(err)
		}
		again, _, err := load([]string{"--config=f"}, map[string]string{"f": b.String()})
		if err != nil {
			t.Fatalf("%v in:\n%s", err, b.String())
		}
		again.ModeDefault = c.ModeDefault
		if diff := cmp.Diff(c, again, equalConfigs); diff != "" {
			t.Errorf("-first +second:\n%s", diff)
		}
	})
}
