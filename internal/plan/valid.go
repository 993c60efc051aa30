package plan

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Validate says what of a Service port no kernel can have: a protocol, an address of
// the other family, port 0.
func (sp *ServicePort) Validate() error {
	switch sp.ID.Protocol {
	case TCP, UDP, SCTP:
	default:
		return fmt.Errorf("protocol %s: want TCP, UDP or SCTP", sp.ID.Protocol)
	}
	family := sp.ID.Family
	for _, f := range sp.Frontends {
		if f.Kind != NodePort && (!f.Addr.IsValid() || FamilyOf(f.Addr) != family) {
			return fmt.Errorf("%s %s: not an %s address", f.Kind, f.Addr, family)
		}
		if f.Port == 0 {
			return fmt.Errorf("%s %s: port 0", f.Kind, f.Addr)
		}
	}
	for _, pool := range sp.Pools {
		for _, e := range pool {
			if !e.Addr.IsValid() || FamilyOf(e.Addr.Addr()) != family || e.Addr.Port() == 0 {
				return fmt.Errorf("endpoint %s: want an %s address and a port", e.Addr, family)
			}
		}
	}
	if len(sp.Frontends) == 0 {
		return errors.New("it has no frontends")
	}
	return nil
}

// Prefixes are those of the family, in canonical form.
func (f Family) Prefixes(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		if FamilyOf(p.Addr()) == f {
			out = append(out, p.Masked())
		}
	}
	return out
}

// In reduces l to what tells pods apart in one family: without a prefix of the family
// nothing does. The error names a name that no interface can have.
func (l LocalTraffic) In(f Family) (LocalTraffic, error) {
	switch l.Kind {
	case LocalPrefix:
		own := f.Prefixes(l.Prefixes)
		if len(own) == 0 {
			return LocalTraffic{}, nil
		}
		return LocalTraffic{Kind: l.Kind, Prefixes: own}, nil
	case LocalInterface, LocalInterfacePrefix:
		const longest = 15
		if l.Name == "" || len(l.Name) > longest || strings.ContainsAny(l.Name, " \t\n\"'\\/*") {
			return LocalTraffic{}, fmt.Errorf("local traffic: %q is no interface name: give 1 to %d characters without spaces, quotes, '/' and '*'", l.Name, longest)
		}
		return LocalTraffic{Kind: l.Kind, Name: l.Name}, nil
	}
	return LocalTraffic{}, nil
}
