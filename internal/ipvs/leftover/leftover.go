// Package leftover removes what kube-proxy's ipvs mode has and svcproxy's has not.
package leftover

import (
	"errors"
	"log/slog"

	"github.com/svcproxy/svcproxy/internal/sys/ipset"
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
