package app

import (
	"fmt"

	"github.com/svcproxy/svcproxy/internal/planner"
)

// checkedPlanner is a planner that also waits for the own Node where manifests
// hold Nodes, but not this one: with a wrong name every endpoint would count as
// remote.
type checkedPlanner struct {
	*planner.Planner
	node    string
	hasNode func() bool
	sources *sources
}

func (p checkedPlanner) Ready() (ok bool, missing []string) {
	ok, missing = p.Planner.Ready()
	if ok && !p.hasNode() && p.sources.otherNodes() {
		return false, []string{fmt.Sprintf("there is no Node named %q among the manifests, but there are others: add it, or set --hostname-override to the name that this node has there", p.node)}
	}
	return ok, missing
}

// otherNodes reports whether any directory of manifests holds Nodes that are not
// this one.
func (s *sources) otherNodes() bool {
	for _, f := range s.files {
		if f.OtherNodes() {
			return true
		}
	}
	return false
}
