package iptables

// HasLegacy reports whether the legacy store has the table in this network namespace;
// no program is executed for that.
func (p *Finder) HasLegacy(f Family, t Table) bool { return legacyHas(p.Proc, f, t) }
