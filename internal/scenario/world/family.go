// Package world is the small world of a scenario as data: its hosts, the addresses
// of both families that they and Services have, the words of the script that name
// them, and the Kubernetes objects in it. It makes nothing; a stage does.
package world

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// Families is the set of address families that one run of a scenario uses.
type Families uint8

// The family sets, in the order in which a header line names them.
const (
	AsWritten Families = iota // no header line: addresses are what they are
	Only4                     // single-stack IPv4
	Only6                     // IPv4 literals stand for their IPv6 counterparts
	Dual                      // objects are dual-stack and every flow is checked in both families
)

func (f Families) String() string { return [...]string{"", "4", "6", "dual"}[f] }

// Twins returns the counterparts of a text that is one IPv4 address or range, nil if it
// is none.
func Twins(s string) []string {
	if a, err := netip.ParseAddr(s); err == nil && a.Is4() {
		return []string{Counterpart(a).String()}
	}
	var out []string
	if p, err := netip.ParsePrefix(s); err == nil && p.Addr().Is4() {
		for _, c := range counterparts(p) {
			out = append(out, c.String())
		}
	}
	return out
}

// Twin returns the counterpart of a text if it is an IPv4 address or range, else the
// text.
func Twin(s string) (string, error) {
	switch t := Twins(s); len(t) {
	case 0:
		return s, nil
	case 1:
		return t[0], nil
	default:
		return s, fmt.Errorf("range %s has no counterpart that is one IPv6 range: only a list can have it", s)
	}
}

var literal = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+(/\d+|:\d+)?`)

// MapText replaces the IPv4 addresses, ranges and address:port pairs in a text by
// their counterparts.
func MapText(s string) (string, error) {
	var first error
	out := literal.ReplaceAllStringFunc(s, func(m string) string {
		host, port, hasPort := strings.Cut(m, ":")
		t, err := Twin(host)
		switch {
		case err != nil && first == nil:
			first = err
		case t != host && hasPort:
			return "[" + t + "]:" + port
		case t == host:
			return m
		}
		return t
	})
	return out, first
}

// MapTree replaces every string of a decoded YAML document that is an IPv4 address
// or range, or names the family, by its counterpart, one in a list by all of them.
func MapTree(v any) (any, error) {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			m, err := MapTree(e)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", k, err)
			}
			v[k] = m
		}
	case []any:
		return mapList(v)
	case string:
		if v == "IPv4" {
			return "IPv6", nil
		}
		parts := strings.Split(v, ",") // clusterCIDR is a list in one string
		for i, p := range parts {
			p = strings.TrimSpace(p)
			t, err := Twin(p)
			if err != nil {
				return nil, err
			}
			if t != p {
				parts[i] = t
			}
		}
		return strings.Join(parts, ","), nil
	}
	return v, nil
}

// mapList maps a list; an address or family that is in it already, as in a list that was
// written for both, is left out.
func mapList(list []any) (any, error) {
	out := make([]any, 0, len(list))
	for i, e := range list {
		s, isText := e.(string)
		mapped := []any{}
		for _, t := range Twins(strings.TrimSpace(s)) {
			mapped = append(mapped, t)
		}
		if len(mapped) == 0 {
			m, err := MapTree(e)
			if err != nil {
				return nil, fmt.Errorf("%d: %w", i, err)
			}
			mapped = append(mapped, m)
		}
		for _, m := range mapped {
			if !isText || !slices.Contains(out, m) {
				out = append(out, m)
			}
		}
	}
	return out, nil
}
