package iptables

import (
	"iter"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// mostCovered bounds how many rules a scope takes that only has to be about right.
const mostCovered = 64

// toInvalid leads INVALID TCP packets to the chain that drops those of endpoints.
// Without that an endpoint's packet far outside the window would pass untranslated
// and make the client reset its connection (kubernetes/kubernetes#74839). Others'
// INVALID packets, of asymmetric routes, are none of our business (#94861).
const toInvalid = `-p tcp -m comment --comment "untranslated packets of endpoints" -m conntrack --ctstate INVALID -j ` + chainInvalid

// ends renders the chain that depends on all endpoints.
func (r *renderer) ends(services iter.Seq[*plan.ServicePort]) {
	if r.liberal {
		return
	}
	sources := rule.NewSources(mostCovered)
	for sp := range services {
		if sp.ID.Protocol != plan.TCP {
			continue
		}
		for _, pool := range sp.Pools {
			for i := range pool {
				sources.Add(pool[i].Addr)
			}
		}
		for _, ep := range sp.Draining {
			sources.Add(ep)
		}
	}
	r.Begin(rule.Filter(chainInvalid))
	for _, match := range sources.Matches() {
		r.Add(match, rule.Drop)
	}
}
