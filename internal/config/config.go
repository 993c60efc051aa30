// Package config turns a command line and a configuration file into one [Config]
// value. It understands every flag of kube-proxy 1.37 and every field of its
// KubeProxyConfiguration (group kubeproxy.config.k8s.io/v1alpha1), those that
// kube-proxy has dropped since its beginnings, and a few of svcproxy's own.
//
// Nothing here touches the kernel, the network or the clock; files are read only
// where a function takes a way to read them. Windows-only settings are accepted
// and have no effect.
package config

import (
	"net/netip"
	"time"

	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Names of the proxy modes.
const (
	Userspace = "userspace"
	IPTables  = "iptables"
	IPVS      = "ipvs"
	NFTables  = "nftables"
	EBPF      = "ebpf"
)

// Modes lists all names that a mode may have. Which of them work is for the
// program to say.
var Modes = [...]string{Userspace, IPTables, IPVS, NFTables, EBPF}

// Auto in place of a mode's name stands for [AutoModes].
const Auto = "auto"

// AutoModes are the modes that Auto tries, in order.
var AutoModes = [...]string{NFTables, IPVS, IPTables, Userspace}

// LocalMode is a way of recognising traffic of this node's pods, by the name that
// kube-proxy gives it.
type LocalMode string

const (
	ClusterCIDR         LocalMode = "ClusterCIDR"
	NodeCIDR            LocalMode = "NodeCIDR"
	BridgeInterface     LocalMode = "BridgeInterface"
	InterfaceNamePrefix LocalMode = "InterfaceNamePrefix"
)

// Keywords of NodePortAddresses.
const (
	Primary   = "primary"   // the Node's primary address of each family
	Localhost = "localhost" // 127.0.0.0/8 and ::1
	All       = "all"       // every address of the node
)

// Config is the complete configuration: defaults applied, every value parsed and
// within its range. Immutable once returned by [Flags.Load].
type Config struct {
	Mode        string   // one of Modes; with several in Preference the one that was chosen, at first the first
	Preference  []string // the modes to try in this order; one, unless the choice is left to the host
	ModeDefault bool     // nobody chose the mode
	// HostnameOverride is the Node's name, "" for the host's own name.
	HostnameOverride string
	Client           Client
	// Manifests are the directories of Kubernetes objects to serve, besides or
	// instead of an API server.
	Manifests []string
	// ServiceProxyName: serve the Services labelled
	// service.kubernetes.io/service-proxy-name with this value; "" serves those
	// without the label.
	ServiceProxyName string
	// Staleness is the time after which a source that stays silent counts as
	// stale and is asked again.
	Staleness time.Duration

	BindAddress         netip.Addr     // replaces the Node's address of its family; unspecified: does not
	Healthz, Metrics    netip.AddrPort // invalid: no such server
	BindAddressHardFail bool           // a server that cannot listen ends the process
	Profiling           bool

	SyncPeriod    time.Duration // > 0
	MinSyncPeriod time.Duration // from 0 to SyncPeriod
	MasqueradeAll bool
	MasqueradeBit int // of the packet mark, 0 to 31
	// LocalhostNodePorts: node ports answer on loopback when NodePortAddresses
	// cover it.
	LocalhostNodePorts bool
	IPVS               IPVSOptions

	Local             Local
	NodePortAddresses []NodePortAddress // empty: the mode's default
	AllowExternalIPs  bool              // feature gate AllowServiceExternalIPs
	ExternalAddresses ExternalAddresses // which of them are served

	OOMScoreAdj      int
	Conntrack        Conntrack
	ConfigSyncPeriod time.Duration
	HealthCheck      HealthCheck
	Userspace        UserspaceOptions
	Log              Log

	defaultNodePorts bool                            // nobody chose NodePortAddresses
	proxy            v1alpha1.KubeProxyConfiguration // the same, as in a file, defaults applied
	own              OwnConfiguration
}

// Client says how to reach the API server.
type Client struct {
	Kubeconfig         string // file; "": in-cluster
	Master             string // URL, wins over the kubeconfig's
	AcceptContentTypes string
	ContentType        string
	QPS                float32
	Burst              int
}

// Configured reports whether somebody named an API server.
func (c Client) Configured() bool { return c.Kubeconfig != "" || c.Master != "" }

// Local says how this node's pods are recognised.
type Local struct {
	Mode LocalMode
	// CIDRs are the pod ranges for ClusterCIDR, at most one per family; none: pods
	// are not recognised.
	CIDRs []netip.Prefix
	// Interface is the name for BridgeInterface and the beginning of the name for
	// InterfaceNamePrefix.
	Interface string
}

// NodePortAddress is one entry of nodePortAddresses: a keyword, or a range.
type NodePortAddress struct {
	Keyword string // Primary, Localhost, All, or "" for a range
	Range   netip.Prefix
}

// ExternalAddresses says which external and load-balancer addresses are served.
type ExternalAddresses struct {
	// RefuseClusterRanges: none of this node, of pods or of Services.
	RefuseClusterRanges bool
	Refuse              []netip.Prefix // none in these either
	Allow               []netip.Prefix // where there are some of a family, none outside of them
}

func (a NodePortAddress) String() string {
	if a.Keyword != "" {
		return a.Keyword
	}
	return a.Range.String()
}

// IPVSOptions are the settings that only the ipvs mode has.
type IPVSOptions struct {
	Scheduler    string // "": rr
	ExcludeCIDRs []netip.Prefix
	StrictARP    bool
	// Idle timeouts; 0 leaves the kernel's.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// DrainTimeout is how long flows to endpoints that are gone may go on; 0: the
	// mode's default.
	DrainTimeout time.Duration
}

// Conntrack holds the connection tracking settings. Zero leaves the kernel's.
type Conntrack struct {
	MaxPerCore, Min                              int
	TCPEstablished, TCPCloseWait, UDP, UDPStream time.Duration
	TCPBeLiberal                                 bool
}

// HealthCheck is about the health checks of endpoints.
type HealthCheck struct {
	Default         plan.HealthCheck // of Services that choose none; the zero value: off
	ProbesPerSecond int              // at most, of all endpoints together; at least 1
}

// Log says how much is logged and in which form.
type Log struct {
	JSON      bool
	Verbosity int // of -v: 0 is normal, 4 and more is for debugging
	VModule   []logsapi.VModuleItem
}
