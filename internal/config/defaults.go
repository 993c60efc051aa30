package config

import (
	"net"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

const (
	apiVersion = "kubeproxy.config.k8s.io/v1alpha1"
	kind       = "KubeProxyConfiguration"

	healthzPort = 10256
	metricsPort = 10249

	defaultMode      = IPTables
	defaultOOMScore  = -999
	defaultMasqBit   = 14
	defaultSync      = 30 * time.Second
	defaultMinSync   = time.Second
	protobufTypeName = "application/vnd.kubernetes.protobuf"
)

// setDefaults fills in what a file, or nobody, has set. Zero sync periods count as
// not set, except the minimum period of the ipvs mode.
func setDefaults(c *v1alpha1.KubeProxyConfiguration) {
	c.APIVersion, c.Kind = apiVersion, kind
	orDefault(&c.BindAddress, "0.0.0.0")
	any, loopback := "0.0.0.0", "127.0.0.1"
	if a, err := parseAddr(c.BindAddress); err == nil && a.Is6() {
		any, loopback = "::", "::1"
	}
	orDefault(&c.HealthzBindAddress, any)
	orDefault(&c.MetricsBindAddress, loopback)
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, healthzPort)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, metricsPort)

	orPointer(&c.OOMScoreAdj, defaultOOMScore)
	orPointer(&c.IPTables.MasqueradeBit, defaultMasqBit)
	orPointer(&c.IPTables.LocalhostNodePorts, true)
	orPeriod(&c.IPTables.SyncPeriod, defaultSync)
	orPeriod(&c.IPTables.MinSyncPeriod, defaultMinSync)
	orPeriod(&c.IPVS.SyncPeriod, defaultSync)
	orPointer(&c.NFTables.MasqueradeBit, defaultMasqBit)
	orPeriod(&c.NFTables.SyncPeriod, defaultSync)
	orPeriod(&c.NFTables.MinSyncPeriod, defaultMinSync)

	orPointer(&c.Conntrack.MaxPerCore, 32768)
	orPointer(&c.Conntrack.Min, 131072)
	orPointer(&c.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	orPointer(&c.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})
	orPeriod(&c.ConfigSyncPeriod, 15*time.Minute)

	orDefault(&c.ClientConnection.ContentType, protobufTypeName)
	orDefault(&c.ClientConnection.QPS, 5)
	orDefault(&c.ClientConnection.Burst, 10)
	logsapi.SetRecommendedLoggingConfiguration(&c.Logging)
}

// setPlatformDefaults makes the choices that depend on the mode. It comes after
// flags and file are merged. mode is the one that was chosen of several, "" for the
// first. It reports whether it chose the node-port addresses.
func setPlatformDefaults(c *v1alpha1.KubeProxyConfiguration, mode string) (nodePorts bool) {
	if c.Mode == "" {
		c.Mode = defaultMode
	}
	if c.DetectLocalMode == "" {
		c.DetectLocalMode = v1alpha1.LocalMode(ClusterCIDR)
	}
	if len(c.NodePortAddresses) > 0 {
		return false
	}
	if mode == "" {
		mode = preferred(string(c.Mode))[0]
	}
	if mode == NFTables {
		c.NodePortAddresses = []string{Primary}
	}
	return true
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func orPointer[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}

func orPeriod(field *metav1.Duration, value time.Duration) {
	if field.Duration == 0 {
		field.Duration = value
	}
}

// withPort completes an address that is only an IP; everything else is returned
// as it is, for validation to judge.
func withPort(address string, port int) string {
	if a, err := parseAddr(address); err == nil {
		return net.JoinHostPort(a.String(), strconv.Itoa(port))
	}
	return address
}
