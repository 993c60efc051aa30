package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// Top-level chains, under the names that kube-proxy gave them.
const (
	chainServices      = "KUBE-SERVICES"
	chainExternal      = "KUBE-EXTERNAL-SERVICES"
	chainNodePorts     = "KUBE-NODEPORTS"
	chainPostrouting   = "KUBE-POSTROUTING"
	chainMarkMasq      = "KUBE-MARK-MASQ"
	chainForward       = "KUBE-FORWARD"
	chainProxyFirewall = "KUBE-PROXY-FIREWALL"
	chainCanary        = "KUBE-PROXY-CANARY"

	// Chains of our own. Those in nat begin like the chains per Service, because
	// kube-proxy removes such leftovers when it comes back.
	chainExternalPorts = "KUBE-EXTERNAL-NODEPORTS" // filter: verdicts on node ports
	chainInvalid       = "KUBE-PROXY-INVALID"      // filter: INVALID packets of endpoints
	chainAccept        = "KUBE-PROXY-ACCEPT"       // filter: forwarded with the client's own address
	chainMasqOthers    = "KUBE-SVC-MARK-OTHERS"    // nat: masquerade all but this node's pods

	chainFirewall = "KUBE-FIREWALL" // kubelet's and kube-proxy's; never written here
)

// Prefixes of chains per Service, per endpoint and of the dispatch.
const (
	prefixService  = "KUBE-SVC-"    // nat: the cluster pool of a Service port
	prefixLocal    = "KUBE-SVL-"    // nat: its pool on this node
	prefixEndpoint = "KUBE-SEP-"    // nat
	prefixExternal = "KUBE-EXT-"    // nat: traffic to external frontends
	prefixSources  = "KUBE-FW-"     // nat and filter: source ranges
	prefixAddr     = "KUBE-SVC-IP-" // nat and filter: dispatch by address
	prefixPort     = "KUBE-SVC-NP-" // nat: dispatch by node port
	prefixExtAddr  = "KUBE-EXT-IP-" // filter: verdicts by external address
	prefixExtPort  = "KUBE-EXT-NP-" // filter: verdicts by node port
	prefixFWAddr   = "KUBE-FW-IP-"  // filter: source ranges by address
)

// nameHash is the part of a chain's name that kube-proxy makes of what the chain
// is for: the first 16 characters of the SHA-256 sum in base 32.
func nameHash(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		h.Write([]byte(p))
	}
	return base32.StdEncoding.EncodeToString(h.Sum(nil))[:16]
}

// protoName is the protocol's name in iptables' language.
func protoName(p plan.Protocol) string { return rule.Proto(p).String() }

// portHash is the hash of a Service port's chains.
func portHash(id plan.ID) string { return nameHash(id.String(), protoName(id.Protocol)) }

// endpointChain is the name of the chain of one endpoint of a Service port.
func endpointChain(id plan.ID, ep netip.AddrPort) string {
	return prefixEndpoint + nameHash(id.String(), protoName(id.Protocol), ep.String())
}

// poolChain is the name of the chain that chooses among a pool's endpoints.
func poolChain(id plan.ID, p plan.Pool) string {
	if p == plan.Local {
		return prefixLocal + portHash(id)
	}
	return prefixService + portHash(id)
}

// natChains and filterChains are the top-level chains of ours and of kube-proxy of
// any age, in ipvs and userspace mode too.
func natChains() []string {
	return []string{
		chainServices, chainNodePorts, chainPostrouting, chainMarkMasq, chainCanary, chainMasqOthers,
		"KUBE-MARK-DROP", "KUBE-PORTALS-CONTAINER", "KUBE-PORTALS-HOST", "KUBE-NODEPORT-CONTAINER",
		"KUBE-NODEPORT-HOST", "KUBE-LOAD-BALANCER", "KUBE-NODE-PORT",
	}
}

func filterChains() []string {
	return []string{
		chainServices, chainExternal, chainNodePorts, chainForward, chainProxyFirewall, chainCanary,
		chainExternalPorts, chainInvalid, chainAccept, "KUBE-NODEPORT-NON-LOCAL", "KUBE-NODE-PORT",
		"KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	}
}

// ours reports whether a chain was made by svcproxy or by a kube-proxy, so that it
// may be rewritten and removed. Chains that kubelet makes too are not.
func ours(t sys.Table, chain string) bool {
	if !strings.HasPrefix(chain, "KUBE-") {
		return false
	}
	var fixed, prefixes []string
	switch t {
	case sys.NAT:
		fixed = natChains()
		prefixes = []string{prefixService, prefixLocal, prefixEndpoint, prefixExternal, prefixSources, "KUBE-XLB-"}
	case sys.Filter:
		fixed = filterChains()
		prefixes = []string{prefixAddr, prefixExtAddr, prefixExtPort, prefixSources}
	case sys.Mangle:
		return chain == chainCanary
	}
	for _, name := range fixed {
		if chain == name {
			return true
		}
	}
	for _, p := range prefixes {
		if strings.HasPrefix(chain, p) {
			return true
		}
	}
	return false
}

// jump is a rule of a built-in chain that leads to one of our chains. Its text is
// kube-proxy's, so that either takes over from the other without a gap.
type jump struct {
	table sys.Table
	from  string // built-in chain
	to    string
	match string // before "-j"
}

func (j jump) jumping() rule.Jumping {
	return rule.Jumping{From: j.from, Rule: j.match + " " + rule.Jump(j.to)}
}

// jumps lists the jumps of a table in the order in which they are put in front of
// their chain: the last one comes first.
func jumps(t sys.Table) []jump {
	const isNew = "-m conntrack --ctstate NEW "
	comment := func(text string) string { return `-m comment --comment "` + text + `"` }
	portals := comment("kubernetes service portals")
	external := isNew + comment("kubernetes externally-visible service portals")
	firewall := isNew + comment("kubernetes load balancer firewall")
	if t == sys.NAT {
		return []jump{
			{t, "OUTPUT", chainServices, portals},
			{t, "PREROUTING", chainServices, portals},
			{t, "POSTROUTING", chainPostrouting, comment("kubernetes postrouting rules")},
		}
	}
	return []jump{
		{t, "INPUT", chainExternal, external},
		{t, "FORWARD", chainExternal, external},
		{t, "INPUT", chainNodePorts, comment("kubernetes health check service ports")},
		{t, "FORWARD", chainServices, isNew + portals},
		{t, "OUTPUT", chainServices, isNew + portals},
		{t, "FORWARD", chainForward, comment("kubernetes forwarding rules")},
		{t, "INPUT", chainProxyFirewall, firewall},
		{t, "OUTPUT", chainProxyFirewall, firewall},
		{t, "FORWARD", chainProxyFirewall, firewall},
	}
}
