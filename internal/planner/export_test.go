package planner

// Held counts what p remembers of Services.
func Held(p *Planner) int {
	n := len(p.services) + len(p.claims.owner) + len(p.claims.losers) + len(p.claims.uses) + len(p.held) + len(p.touched)
	for _, count := range p.claims.nodePorts {
		n += count
	}
	return n
}
