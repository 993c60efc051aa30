// Package leftover tells and removes what kube-proxy's ipvs mode has and svcproxy's has
// not.
package leftover

import (
	"errors"
	"log/slog"

	"github.com/svcproxy/svcproxy/internal/sys/ipset"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
)

// kubeProxySets are the IP sets of kube-proxy's ipvs mode, for IPv4 and IPv6. Names end
// after 31 bytes.
func kubeProxySets() []string {
	var out []string
	for _, name := range [...]string{
		"LOOP-BACK", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "LOAD-BALANCER", "LOAD-BALANCER-LOCAL", "LOAD-BALANCER-FW",
		"LOAD-BALANCER-SOURCE-CIDR", "LOAD-BALANCER-SOURCE-IP", "NODE-PORT-TCP", "NODE-PORT-UDP", "NODE-PORT-LOCAL-TCP",
		"NODE-PORT-LOCAL-UDP", "NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH", "HEALTH-CHECK-NODE-PORT", "IPVS-IPS",
	} {
		const longest = 31
		six := "KUBE-6-" + name
		out = append(out, "KUBE-"+name, six[:min(len(six), longest)])
	}
	return out
}

// NodePorts are the node ports of a kube-proxy in ipvs mode. Its virtual servers for them
// are on no address of its own, by which they could be told from others'.
type NodePorts map[nodePort]bool

type nodePort struct {
	family   ipvs.Family
	protocol ipvs.Protocol
	port     uint16
}

// Has reports whether a virtual server is for one of the node ports.
func (n NodePorts) Has(k ipvs.Key) bool {
	return k.Mark == 0 && n[nodePort{k.Family, k.Protocol, k.Addr.Port()}]
}

// ReadNodePorts reads the node ports off kube-proxy's IP sets, as long as these are there.
func ReadNodePorts(sets ipset.Sets) (NodePorts, error) {
	out := NodePorts{}
	if sets == nil {
		return out, nil
	}
	for family, prefix := range map[ipvs.Family]string{ipvs.IPv4: "KUBE-", ipvs.IPv6: "KUBE-6-"} {
		for protocol, name := range map[ipvs.Protocol]string{
			ipvs.TCP: "NODE-PORT-TCP", ipvs.UDP: "NODE-PORT-UDP", ipvs.SCTP: "NODE-PORT-SCTP-HASH",
		} {
			ports, err := sets.Ports(prefix + name)
			if err != nil {
				return nil, err
			}
			for _, p := range ports {
				out[nodePort{family, protocol, p}] = true
			}
		}
	}
	return out, nil
}

// RemoveSets destroys kube-proxy's IP sets. One in use stays, with a word in the log:
// its rules are removed with those of mode iptables.
func RemoveSets(log *slog.Logger, sets ipset.Sets) error {
	if sets == nil {
		return nil
	}
	removed := 0
	var errs []error
	for _, name := range kubeProxySets() {
		existed, err := sets.Destroy(name)
		switch {
		case errors.Is(err, ipset.ErrBusy):
			log.Warn("an IP set of kube-proxy stays, because a rule refers to it", "set", name)
		case err != nil:
			errs = append(errs, err)
		case existed:
			removed++
		}
	}
	if removed > 0 {
		log.Info("removed IP sets of kube-proxy", "count", removed)
	}
	return errors.Join(errs...)
}
