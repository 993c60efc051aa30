package config

import (
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// Flags is the command line of the proxy. Register it, let the flag set parse,
// then Load as often as the configuration file changes.
type Flags struct {
	// ConfigFile names the configuration file. With it every other flag is
	// ignored but those that Load lists.
	ConfigFile string
	// WriteConfigTo: write the resulting configuration to this file and exit.
	WriteConfigTo string
	Cleanup       bool   // remove the rules of every mode and exit
	InitOnly      bool   // do what needs full privileges and exit
	Version       string // "true", "raw", or the version to report; "" not asked

	proxy    v1alpha1.KubeProxyConfiguration // what flags alone say
	own      OwnConfiguration
	gates    gateFlag
	master   string
	hostname string

	healthzPort, metricsPort      int32
	iptablesSync, iptablesMinSync time.Duration
	ipvsSync, ipvsMinSync         time.Duration
	stalenessLimit                time.Duration
	udpTimeout                    time.Duration

	set *pflag.FlagSet
}

// NewFlags returns the command line with every default in place.
func NewFlags() *Flags {
	f := &Flags{
		healthzPort: healthzPort, metricsPort: metricsPort,
		iptablesSync: defaultSync, iptablesMinSync: defaultMinSync,
		ipvsSync: defaultSync, ipvsMinSync: defaultMinSync,
		stalenessLimit: defaultStaleness,
	}
	setDefaults(&f.proxy)
	f.gates.values = map[string]bool{}
	return f
}

// NormalizeName lets flags be written with underscores, as kube-proxy does.
func NormalizeName(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}

// Register adds all flags to fs.
func (f *Flags) Register(fs *pflag.FlagSet) {
	f.set = fs
	f.registerActions(fs)
	f.registerClient(fs)
	f.registerServers(fs)
	f.registerSync(fs)
	f.registerNode(fs)
	f.registerLogging(fs)
	registerRetired(fs)
}

// Values returns all flags with their values, for people to look at.
func (f *Flags) Values() map[string]string {
	out := map[string]string{}
	f.set.VisitAll(func(o *pflag.Flag) { out[o.Name] = o.Value.String() })
	return out
}

func (f *Flags) registerActions(fs *pflag.FlagSet) {
	fs.StringVar(&f.ConfigFile, "config", "", "configuration `file` (KubeProxyConfiguration, YAML or JSON); followed live. Flags other than --hostname-override, --master, --manifests, --service-proxy-name, --staleness-limit, the logging flags and the flags that end the program are ignored with it")
	fs.StringVar(&f.WriteConfigTo, "write-config-to", "", "write the resulting configuration to this `file` and exit")
	fs.BoolVar(&f.Cleanup, "cleanup", false, "remove the rules of every mode and exit; needs no API server")
	fs.BoolVar(&f.InitOnly, "init-only", false, "do what needs full root privileges and exit; the proxy can then run with CAP_NET_ADMIN and CAP_NET_RAW only")
	fs.StringVar(&f.Version, "version", "", "print the version and exit; =raw for all of it, =vX.Y.Z reports that version instead")
	fs.Lookup("version").NoOptDefVal = "true"

	fs.StringArrayVar(&f.own.Manifests, "manifests", nil, "`directory` of Services, EndpointSlices and Nodes to serve, followed live; may be given more than once. Without --kubeconfig and --master no API server is asked then")
	fs.StringVar(&f.own.ServiceProxyName, "service-proxy-name", "", "serve only Services whose label service.kubernetes.io/service-proxy-name has this value, instead of those without the label")
	fs.DurationVar(&f.stalenessLimit, "staleness-limit", f.stalenessLimit, "a watch that stays silent for longer is opened anew, and /healthz says that the view is old")
}

func (f *Flags) registerClient(fs *pflag.FlagSet) {
	c := &f.proxy.ClientConnection
	fs.StringVar(&c.Kubeconfig, "kubeconfig", c.Kubeconfig, "kubeconfig `file` for the API server; in-cluster configuration without it")
	fs.StringVar(&f.master, "master", "", "`URL` of the API server, instead of the kubeconfig's")
	fs.StringVar(&c.ContentType, "kube-api-content-type", c.ContentType, "content type of requests to the API server")
	fs.Int32Var(&c.Burst, "kube-api-burst", c.Burst, "requests to the API server that may come at once")
	fs.Float32Var(&c.QPS, "kube-api-qps", c.QPS, "requests to the API server per second")
	fs.DurationVar(&f.proxy.ConfigSyncPeriod.Duration, "config-sync-period", f.proxy.ConfigSyncPeriod.Duration, "how often kube-proxy refreshes its view of the API server; greater than 0")
	fs.Var(&f.gates, "feature-gates", "`name=bool,...`; only AllowServiceExternalIPs and KubeProxyIPVS have an effect, any other is named in a warning")
}

func (f *Flags) registerServers(fs *pflag.FlagSet) {
	c := &f.proxy
	fs.Var(ipFlag{&c.BindAddress}, "bind-address", "the node's primary address, instead of the Node object's; nothing is bound to it")
	fs.Var(ipPortFlag{&c.HealthzBindAddress}, "healthz-bind-address", "IP address, or IP:port, of the health server")
	fs.Var(ipPortFlag{&c.MetricsBindAddress}, "metrics-bind-address", "IP address, or IP:port, of the metrics server")
	fs.BoolVar(&c.BindAddressHardFail, "bind-address-hard-fail", false, "exit if the health or the metrics server cannot listen, instead of trying again")
	fs.BoolVar(&c.EnableProfiling, "profiling", false, "serve /debug/pprof on the metrics server")
	fs.StringVar(&c.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", "", "accepted; svcproxy hides no metrics")
	fs.Int32Var(&f.healthzPort, "healthz-port", f.healthzPort, "port of the health server, 0 for none")
	fs.Int32Var(&f.metricsPort, "metrics-port", f.metricsPort, "port of the metrics server, 0 for none")
	deprecate(fs, "healthz-port", "use --healthz-bind-address")
	deprecate(fs, "metrics-port", "use --metrics-bind-address")
}

func (f *Flags) registerSync(fs *pflag.FlagSet) {
	c := &f.proxy
	fs.StringVar((*string)(&c.Mode), "proxy-mode", "", "`mode`: "+strings.Join(Modes[:], ", ")+"; default iptables. Several, in the order of preference, or auto: the first that this host can do is chosen, once. \"svcproxy modes\" tells which of them this host can do")
	fs.Int32Var(c.IPTables.MasqueradeBit, "iptables-masquerade-bit", defaultMasqBit, "bit of the packet mark that asks for source NAT, 0 to 31")
	fs.BoolVar(&c.IPTables.MasqueradeAll, "masquerade-all", false, "source NAT for all traffic to cluster IPs")
	fs.BoolVar(c.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", true, "let node ports answer on loopback where the node-port addresses cover it")
	fs.DurationVar(&f.iptablesSync, "iptables-sync-period", f.iptablesSync, "the period of checks and clean-up in any mode but ipvs; greater than 0")
	fs.DurationVar(&f.iptablesMinSync, "iptables-min-sync-period", f.iptablesMinSync, "the least time between two syncs in any mode but ipvs; 0 for none. The removal of an endpoint never waits for it")
	fs.DurationVar(&f.ipvsSync, "ipvs-sync-period", f.ipvsSync, "the period of checks and clean-up in ipvs mode; greater than 0")
	fs.DurationVar(&f.ipvsMinSync, "ipvs-min-sync-period", f.ipvsMinSync, "the least time between two syncs in ipvs mode; 0 for none")
	fs.StringVar(&c.IPVS.Scheduler, "ipvs-scheduler", "", "the kernel's scheduler in ipvs mode; default rr")
	fs.StringSliceVar(&c.IPVS.ExcludeCIDRs, "ipvs-exclude-cidrs", nil, "virtual servers in these `CIDRs` are never touched in ipvs mode")
	fs.BoolVar(&c.IPVS.StrictARP, "ipvs-strict-arp", false, "in ipvs mode set arp_ignore to 1 and arp_announce to 2")
	fs.StringVar(&c.PortRange, "proxy-port-range", "", "`ports` on which userspace mode listens: first-last, first+more, one port; 0-0 or nothing leaves the choice to the kernel")
	fs.DurationVar(&f.udpTimeout, "udp-timeout", 0, "the time without a datagram after which userspace mode ends a UDP flow; 0 for 30s")
	fs.DurationVar(&c.IPVS.TCPTimeout.Duration, "ipvs-tcp-timeout", 0, "idle timeout of TCP connections in ipvs mode; 0 leaves the kernel's")
	fs.DurationVar(&c.IPVS.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", 0, "timeout of TCP connections after a FIN in ipvs mode; 0 leaves the kernel's")
	fs.DurationVar(&c.IPVS.UDPTimeout.Duration, "ipvs-udp-timeout", 0, "timeout of UDP flows in ipvs mode; 0 leaves the kernel's")
}

func (f *Flags) registerNode(fs *pflag.FlagSet) {
	c, ct := &f.proxy, &f.proxy.Conntrack
	fs.StringVar(&f.hostname, "hostname-override", "", "name of the Node object, instead of the host's name")
	fs.StringVar((*string)(&c.DetectLocalMode), "detect-local-mode", "", "`how` this node's pods are recognised: ClusterCIDR (default), NodeCIDR, BridgeInterface, InterfaceNamePrefix")
	fs.StringVar(&c.ClusterCIDR, "cluster-cidr", "", "the pods' `CIDR`, or one of each family with a comma between, for --detect-local-mode ClusterCIDR")
	fs.StringVar(&c.DetectLocal.BridgeInterface, "pod-bridge-interface", "", "the pods' bridge, for --detect-local-mode BridgeInterface")
	fs.StringVar(&c.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", "", "the beginning of the pods' interfaces' names, for --detect-local-mode InterfaceNamePrefix")
	fs.StringSliceVar(&c.NodePortAddresses, "nodeport-addresses", nil, "`CIDRs` of the addresses that accept node ports, or the words primary, localhost, all; default all, in nftables mode primary")
	fs.Int32Var(c.OOMScoreAdj, "oom-score-adj", defaultOOMScore, "the process's oom_score_adj, -1000 to 1000")
	fs.Int32Var(ct.MaxPerCore, "conntrack-max-per-core", *ct.MaxPerCore, "connections to track per CPU; 0 leaves the limit and ignores --conntrack-min")
	fs.Int32Var(ct.Min, "conntrack-min", *ct.Min, "connections to track at least")
	fs.DurationVar(&ct.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", ct.TCPEstablishedTimeout.Duration, "idle timeout of established TCP connections; 0 leaves the kernel's")
	fs.DurationVar(&ct.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", ct.TCPCloseWaitTimeout.Duration, "timeout of TCP connections in CLOSE_WAIT; 0 leaves the kernel's")
	fs.BoolVar(&ct.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "track TCP segments that are outside the window too")
	fs.DurationVar(&ct.UDPTimeout.Duration, "conntrack-udp-timeout", 0, "idle timeout of UDP flows that nobody answered; 0 leaves the kernel's")
	fs.DurationVar(&ct.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", 0, "idle timeout of UDP flows; 0 leaves the kernel's")
}

func (f *Flags) registerLogging(fs *pflag.FlagSet) {
	registerLogging(fs, &f.proxy.Logging)
}

// registerLogging is apart so that flags can be laid over a file's settings.
func registerLogging(fs *pflag.FlagSet, l *logsapi.LoggingConfiguration) {
	fs.VarP(logsapi.VerbosityLevelPflag(&l.Verbosity), "v", "v", "how much is logged: 0 is normal, 4 is for debugging")
	fs.Var(logsapi.VModuleConfigurationPflag(&l.VModule), "vmodule", "`file=N,...`: another -v for single source files (a pattern, without .go)")
	fs.StringVar(&l.Format, "logging-format", l.Format, "text or json")
	fs.DurationVar(&l.FlushFrequency.Duration.Duration, "log-flush-frequency", l.FlushFrequency.Duration.Duration, "accepted; nothing is held back")
	fs.BoolVar(&l.Options.Text.SplitStream, "log-text-split-stream", l.Options.Text.SplitStream, "accepted; logs go to standard error")
	fs.Var(&l.Options.Text.InfoBufferSize, "log-text-info-buffer-size", "accepted; nothing is held back")
	fs.BoolVar(&l.Options.JSON.SplitStream, "log-json-split-stream", l.Options.JSON.SplitStream, "accepted; logs go to standard error")
	fs.Var(&l.Options.JSON.InfoBufferSize, "log-json-info-buffer-size", "accepted; nothing is held back")
}

// deprecate hides a registered flag and lets pflag warn when it is used.
func deprecate(fs *pflag.FlagSet, name, advice string) {
	f := fs.Lookup(name)
	f.Deprecated, f.Hidden = advice, true
}

// fromFlags returns the configuration that flags alone make, without a file.
func (f *Flags) fromFlags() *v1alpha1.KubeProxyConfiguration {
	c := f.proxy.DeepCopy()
	c.FeatureGates = f.gates.copy()
	c.HealthzBindAddress = f.serverAddress(c.HealthzBindAddress, f.healthzPort)
	c.MetricsBindAddress = f.serverAddress(c.MetricsBindAddress, f.metricsPort)
	if len(preferred(string(c.Mode))) > 1 { // which one counts is not known yet
		c.NFTables.MasqueradeAll = c.IPTables.MasqueradeAll
		setPeriods(c, IPVS, f.ipvsSync, f.ipvsMinSync)
		setPeriods(c, NFTables, f.iptablesSync, f.iptablesMinSync)
	} else if c.Mode == NFTables {
		c.NFTables.MasqueradeAll, c.IPTables.MasqueradeAll = c.IPTables.MasqueradeAll, false
	}
	sync, minSync := f.iptablesSync, f.iptablesMinSync
	if c.Mode == IPVS {
		sync, minSync = f.ipvsSync, f.ipvsMinSync
	}
	setPeriods(c, string(c.Mode), sync, minSync)
	return c
}

// serverAddress applies a deprecated port flag: 0 disables the server, and an
// address without a port gets it.
func (f *Flags) serverAddress(address string, port int32) string {
	if port == 0 {
		return ""
	}
	return withPort(address, int(port))
}

// setPeriods writes the sync periods into the section of a mode.
func setPeriods(c *v1alpha1.KubeProxyConfiguration, mode string, sync, minSync time.Duration) {
	s, m := metav1.Duration{Duration: sync}, metav1.Duration{Duration: minSync}
	switch mode {
	case IPVS:
		c.IPVS.SyncPeriod, c.IPVS.MinSyncPeriod = s, m
	case NFTables:
		c.NFTables.SyncPeriod, c.NFTables.MinSyncPeriod = s, m
	default:
		c.IPTables.SyncPeriod, c.IPTables.MinSyncPeriod = s, m
	}
}
