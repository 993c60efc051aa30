package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// InvalidError lists the faults of a configuration, each with the field's path in
// the file, the value, and what to do.
type InvalidError struct{ Faults field.ErrorList }

func (e *InvalidError) Error() string {
	const enough = 30 // to begin with
	var faults []string
	for i, f := range e.Faults {
		if i == enough {
			faults = append(faults, fmt.Sprintf("and %d more", len(e.Faults)-enough))
			break
		}
		faults = append(faults, f.Error())
	}
	return "invalid configuration: " + strings.Join(faults, "; ")
}

// resolver collects every fault on the way from a file's fields to typed values.
type resolver struct{ errs field.ErrorList }

// resolve parses and validates a configuration whose defaults are applied. mode is the
// one that was chosen of several, "" for the first.
func resolve(p *v1alpha1.KubeProxyConfiguration, own OwnConfiguration, master, mode string) (*Config, error) {
	r := &resolver{}
	preference := preferred(string(p.Mode))
	if mode == "" {
		mode = preference[0]
	}
	c := &Config{
		Mode: mode, Preference: preference,
		HostnameOverride: strings.ToLower(strings.TrimSpace(p.HostnameOverride)),
		Client: Client{
			Kubeconfig: p.ClientConnection.Kubeconfig, Master: master,
			AcceptContentTypes: p.ClientConnection.AcceptContentTypes,
			ContentType:        p.ClientConnection.ContentType,
			QPS:                p.ClientConnection.QPS, Burst: int(p.ClientConnection.Burst),
		},
		Manifests: own.Manifests, ServiceProxyName: own.ServiceProxyName,
		Staleness:           own.StalenessLimit.Duration,
		BindAddressHardFail: p.BindAddressHardFail, Profiling: p.EnableProfiling,
		LocalhostNodePorts: *p.IPTables.LocalhostNodePorts,
		AllowExternalIPs:   gate(p.FeatureGates, gateExternalIPs, true),
		OOMScoreAdj:        int(*p.OOMScoreAdj),
		ConfigSyncPeriod:   p.ConfigSyncPeriod.Duration,
		proxy:              *p, own: own,
	}
	r.servers(c, p)
	r.mode(c, p)
	r.node(c, p)
	r.conntrack(c, p)
	r.logging(c, p)
	c.HealthCheck = r.healthCheck(&own.HealthCheck)
	c.ExternalAddresses = r.externalAddresses(&own.ExternalAddresses)
	r.ownIPVS(&own.IPVS, &c.IPVS)
	c.Userspace = r.userspace(c.Mode, &own.Userspace, p.PortRange, c.MasqueradeBit)
	r.atLeast("clientConnection.burst", p.ClientConnection.Burst, 0)
	r.positive("configSyncPeriod", p.ConfigSyncPeriod)
	r.positive("stalenessLimit", *own.StalenessLimit)
	for i, dir := range own.Manifests {
		if dir == "" {
			r.invalid(fmt.Sprintf("manifests[%d]", i), dir, "names no directory; give one or leave --manifests out")
		}
	}
	r.within("oomScoreAdj", *p.OOMScoreAdj, -1000, 1000)
	if p.HostnameOverride != "" && c.HostnameOverride == "" {
		r.invalid("hostnameOverride", p.HostnameOverride, "is only spaces; give the Node's name or leave it out")
	}
	if v := p.ShowHiddenMetricsForVersion; v != "" {
		r.hiddenMetrics(v)
	}
	if len(r.errs) > 0 {
		return nil, &InvalidError{r.errs}
	}
	return c, nil
}

func (r *resolver) servers(c *Config, p *v1alpha1.KubeProxyConfiguration) {
	var err error
	if c.BindAddress, err = parseAddr(p.BindAddress); err != nil {
		r.invalid("bindAddress", p.BindAddress, "is "+err.Error()+"; give one like 192.0.2.11, or 0.0.0.0 to use the Node's")
	}
	c.Healthz = r.server("healthzBindAddress", p.HealthzBindAddress)
	c.Metrics = r.server("metricsBindAddress", p.MetricsBindAddress)
}

// server parses the address of a server; empty means none.
func (r *resolver) server(path, value string) netip.AddrPort {
	if value == "" {
		return netip.AddrPort{}
	}
	a, err := parseAddrPort(value)
	if err != nil {
		r.invalid(path, value, err.Error()+"; give IP:port with a port from 1 to 65535")
	}
	return a
}

// preferred lists the modes that a configured mode names.
func preferred(mode string) []string {
	if mode == Auto {
		return AutoModes[:]
	}
	out := strings.Split(mode, ",")
	for i := range out {
		out[i] = strings.TrimSpace(out[i])
	}
	return out
}

// Choose returns the configuration with one mode of its Preference.
func (c *Config) Choose(mode string) (*Config, error) {
	if !slices.Contains(c.Preference, mode) {
		return nil, fmt.Errorf("mode %s is not among the configured %s", mode, strings.Join(c.Preference, ", "))
	}
	p := c.proxy.DeepCopy()
	if c.defaultNodePorts {
		p.NodePortAddresses = nil
	}
	defaultNodePorts := setPlatformDefaults(p, mode)
	next, err := resolve(p, c.own, c.Client.Master, mode)
	if err != nil {
		return nil, err
	}
	next.ModeDefault, next.defaultNodePorts = c.ModeDefault, defaultNodePorts
	return next, nil
}

// mode checks the mode's name and takes what depends on it from its section.
func (r *resolver) mode(c *Config, p *v1alpha1.KubeProxyConfiguration) {
	for i, m := range c.Preference {
		name := ""
		if len(c.Preference) > 1 {
			name = fmt.Sprintf("%q ", m)
		}
		if !slices.Contains(Modes[:], m) {
			r.invalid("mode", string(p.Mode), fmt.Sprintf("%sis not a mode; use %s, several of them in the order of preference, %s, or leave it empty for %s", name, strings.Join(Modes[:], ", "), Auto, defaultMode))
		}
		if slices.Contains(c.Preference[:i], m) {
			r.invalid("mode", string(p.Mode), m+" is there twice; keep one")
		}
	}
	if c.Mode == IPVS && !gate(p.FeatureGates, gateIPVS, true) {
		r.invalid("mode", c.Mode, "is switched off by the feature gate "+gateIPVS+"=false; remove the gate or choose another mode")
	}
	section, bit := "iptables", p.IPTables.MasqueradeBit
	sync, minSync := p.IPTables.SyncPeriod, p.IPTables.MinSyncPeriod
	c.MasqueradeAll = p.IPTables.MasqueradeAll
	switch c.Mode {
	case IPVS:
		section, sync, minSync = "ipvs", p.IPVS.SyncPeriod, p.IPVS.MinSyncPeriod
		c.IPVS = r.ipvs(&p.IPVS)
	case NFTables:
		section, sync, minSync = "nftables", p.NFTables.SyncPeriod, p.NFTables.MinSyncPeriod
		bit, c.MasqueradeAll = p.NFTables.MasqueradeBit, p.NFTables.MasqueradeAll
		r.within("nftables.masqueradeBit", *p.NFTables.MasqueradeBit, 0, 31)
	}
	r.within("iptables.masqueradeBit", *p.IPTables.MasqueradeBit, 0, 31)
	c.MasqueradeBit = int(*bit)
	c.SyncPeriod = r.positive(section+".syncPeriod", sync)
	c.MinSyncPeriod = r.notNegative(section+".minSyncPeriod", minSync)
	if c.MinSyncPeriod > c.SyncPeriod {
		r.invalid(section+".minSyncPeriod", c.MinSyncPeriod.String(), fmt.Sprintf("must not be greater than %s.syncPeriod, %s", section, c.SyncPeriod))
	}
}

func (r *resolver) ipvs(p *v1alpha1.KubeProxyIPVSConfiguration) IPVSOptions {
	o := IPVSOptions{
		Scheduler: p.Scheduler, StrictARP: p.StrictARP,
		TCPTimeout:    r.notNegative("ipvs.tcpTimeout", p.TCPTimeout),
		TCPFinTimeout: r.notNegative("ipvs.tcpFinTimeout", p.TCPFinTimeout),
		UDPTimeout:    r.notNegative("ipvs.udpTimeout", p.UDPTimeout),
	}
	for i, s := range p.ExcludeCIDRs {
		o.ExcludeCIDRs = append(o.ExcludeCIDRs, r.prefix(at("ipvs.excludeCIDRs", i), s, ""))
	}
	return o
}

// node parses what concerns the node's addresses and pods.
func (r *resolver) node(c *Config, p *v1alpha1.KubeProxyConfiguration) {
	c.Local.Mode = LocalMode(p.DetectLocalMode)
	switch c.Local.Mode {
	case ClusterCIDR:
		c.Local.CIDRs = r.clusterCIDR(p.ClusterCIDR)
	case NodeCIDR:
	case BridgeInterface:
		c.Local.Interface = r.interfaceName("detectLocal.bridgeInterface", p.DetectLocal.BridgeInterface)
	case InterfaceNamePrefix:
		c.Local.Interface = r.interfaceName("detectLocal.interfaceNamePrefix", p.DetectLocal.InterfaceNamePrefix)
	default:
		r.invalid("detectLocalMode", string(p.DetectLocalMode), "is not known; use ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	}
	keywords := map[string]bool{}
	for i, s := range p.NodePortAddresses {
		path := at("nodePortAddresses", i)
		switch s {
		case Primary, Localhost, All:
			if keywords[s] {
				r.invalid(path, s, "is there twice; keep one")
			}
			keywords[s] = true
			c.NodePortAddresses = append(c.NodePortAddresses, NodePortAddress{Keyword: s})
		default:
			c.NodePortAddresses = append(c.NodePortAddresses, NodePortAddress{Range: r.prefix(path, s, ", or one of the words primary, localhost, all")})
		}
	}
}

func (r *resolver) clusterCIDR(value string) []netip.Prefix {
	if value == "" {
		return nil
	}
	var out []netip.Prefix
	for _, s := range strings.Split(value, ",") {
		out = append(out, r.prefix("clusterCIDR", s, ", or one of each family with a comma between"))
	}
	if len(out) > 2 || len(out) == 2 && out[0].Addr().Is4() == out[1].Addr().Is4() {
		r.invalid("clusterCIDR", value, "holds more than one CIDR of a family; give one, or one IPv4 and one IPv6")
	}
	return out
}

// interfaceName accepts names of up to 15 bytes, the kernel's limit.
func (r *resolver) interfaceName(path, value string) string {
	switch {
	case value == "":
		r.invalid(path, value, "must not be empty with this detectLocalMode; name the interface")
	case len(value) > 15 || strings.ContainsAny(value, "/ \t\n"):
		r.invalid(path, value, "cannot be an interface's name: at most 15 bytes, without spaces and slashes")
	}
	return value
}

func (r *resolver) conntrack(c *Config, p *v1alpha1.KubeProxyConfiguration) {
	r.atLeast("conntrack.maxPerCore", *p.Conntrack.MaxPerCore, 0)
	r.atLeast("conntrack.min", *p.Conntrack.Min, 0)
	c.Conntrack = Conntrack{
		MaxPerCore: int(*p.Conntrack.MaxPerCore), Min: int(*p.Conntrack.Min),
		TCPEstablished: r.notNegative("conntrack.tcpEstablishedTimeout", *p.Conntrack.TCPEstablishedTimeout),
		TCPCloseWait:   r.notNegative("conntrack.tcpCloseWaitTimeout", *p.Conntrack.TCPCloseWaitTimeout),
		UDP:            r.notNegative("conntrack.udpTimeout", p.Conntrack.UDPTimeout),
		UDPStream:      r.notNegative("conntrack.udpStreamTimeout", p.Conntrack.UDPStreamTimeout),
		TCPBeLiberal:   p.Conntrack.TCPBeLiberal,
	}
}

func (r *resolver) logging(c *Config, p *v1alpha1.KubeProxyConfiguration) {
	switch p.Logging.Format {
	case "text":
	case "json":
		c.Log.JSON = true
	default:
		r.invalid("logging.format", p.Logging.Format, "is not a format; use text or json")
	}
	c.Log.Verbosity = int(p.Logging.Verbosity)
	c.Log.VModule = p.Logging.VModule
	for i, m := range p.Logging.VModule {
		if m.FilePattern == "" || strings.ContainsAny(m.FilePattern, "=,") {
			r.invalid(at("logging.vmodule", i), m.FilePattern, "is not a file pattern; give a file's name without .go, with * and ? as wanted")
		}
	}
}

// hiddenMetrics accepts any minor version: there is nothing to show.
func (r *resolver) hiddenMetrics(version string) {
	var major, minor int
	if n, err := fmt.Sscanf(version, "%d.%d", &major, &minor); n != 2 || err != nil {
		r.invalid("showHiddenMetricsForVersion", version, "is not of the form MAJOR.MINOR; remove it, svcproxy hides no metrics")
	}
}

func (r *resolver) invalid(path, value, why string) {
	r.errs = append(r.errs, field.Invalid(field.NewPath(path), value, why))
}

func (r *resolver) prefix(path, value, or string) netip.Prefix {
	p, err := parsePrefix(value)
	if err != nil {
		r.invalid(path, value, "is "+err.Error()+"; give one like 192.0.2.0/24 or 2001:db8::/64"+or)
	}
	return p
}

func (r *resolver) within(path string, value, low, high int32) {
	if value < low || value > high {
		r.invalid(path, fmt.Sprint(value), fmt.Sprintf("must be from %d to %d", low, high))
	}
}

func (r *resolver) atLeast(path string, value, low int32) {
	if value < low {
		r.invalid(path, fmt.Sprint(value), fmt.Sprintf("must not be less than %d", low))
	}
}

func (r *resolver) positive(path string, d metav1.Duration) time.Duration {
	if d.Duration <= 0 {
		r.invalid(path, d.Duration.String(), "must be greater than 0")
	}
	return d.Duration
}

func (r *resolver) notNegative(path string, d metav1.Duration) time.Duration {
	if d.Duration < 0 {
		r.invalid(path, d.Duration.String(), "must not be less than 0")
	}
	return d.Duration
}

func at(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }
