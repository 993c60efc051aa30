package planner

import "github.com/svcproxy/svcproxy/internal/plan"

// Held counts what p remembers of Services.
func Held(p *Planner) int {
	n := len(p.services) + len(p.claims.owner) + len(p.claims.losers) + len(p.claims.uses) + len(p.held) + len(p.touched)
	for _, count := range p.claims.nodePorts {
		n += count
	}
	return n
}

// Chosen is what annotations choose for TCP ports, and how many warnings they give.
func Chosen(annotations map[string]string) (p plan.Policy, warnings int) {
	c := parseAnnotations(annotations, plan.HealthCheck{})
	if c.tcp != nil {
		p = *c.tcp
	}
	return p, len(c.warnings)
}

// ParseWeights returns the weights in s by group, and whether it could be read.
func ParseWeights(s string) (groups int, ok bool) {
	w, err := parseWeights(s)
	return len(w), err == nil
}
