package plan

// MayMeetItself returns the test for endpoints whose packets to the ServicePort can
// lead back to themselves by way of this node with their own source address. A mode
// has to masquerade these; for the others no packet would match. l is the local
// traffic of the ServicePort's family.
//
// An endpoint known to run elsewhere comes this way only as a pod, where a range of
// the whole cluster covers it, or where some route keeps others' addresses too.
func (sp *ServicePort) MayMeetItself(l LocalTraffic) func(Endpoint) bool {
	unmasked := false
	for i := range sp.Frontends {
		f := &sp.Frontends[i]
		for o, rt := range f.Route {
			if rt.Verdict == Forward && !rt.SNAT && (Origin(o) == FromOutside || f.Kind != ClusterIP && rt.Pool == Cluster) {
				unmasked = true
			}
		}
	}
	return func(e Endpoint) bool {
		return !e.Elsewhere || unmasked || l.Kind == LocalPrefix && contains(l.Prefixes, e.Addr.Addr())
	}
}
