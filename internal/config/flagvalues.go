package config

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// ipFlag is an IP address; "" keeps the default.
type ipFlag struct{ to *string }

func (f ipFlag) Type() string   { return "IP" }
func (f ipFlag) String() string { return deref(f.to) }
func (f ipFlag) Set(s string) error {
	if s == "" {
		return nil
	}
	if _, err := parseAddr(s); err != nil {
		return fmt.Errorf("%q is %w; give one like 192.0.2.11 or 2001:db8::11", s, err)
	}
	*f.to = s
	return nil
}

// ipPortFlag is an IP address with or without a port; "" keeps the default.
type ipPortFlag struct{ to *string }

func (f ipPortFlag) Type() string   { return "IP[:port]" }
func (f ipPortFlag) String() string { return deref(f.to) }
func (f ipPortFlag) Set(s string) error {
	if s == "" {
		return nil
	}
	if _, err := parseAddr(s); err != nil {
		if _, err := parseAddrPort(s); err != nil {
			return fmt.Errorf("%w; give an IP address, or one with a port like 0.0.0.0:10256 or [::]:10256", err)
		}
	}
	*f.to = s
	return nil
}

// gateFlag is --feature-gates; repeated flags add up.
type gateFlag struct{ values map[string]bool }

func (f *gateFlag) Type() string { return "name=bool,..." }

func (f *gateFlag) String() string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(f.values)) {
		out = append(out, fmt.Sprintf("%s=%t", name, f.values[name]))
	}
	return strings.Join(out, ",")
}

func (f *gateFlag) Set(s string) error {
	for _, part := range strings.Split(s, ",") {
		if part == "" {
			continue
		}
		name, value, found := strings.Cut(part, "=")
		if !found {
			return fmt.Errorf("gate %q has no value; write %s=true or %s=false", part, part, part)
		}
		on, err := strconv.ParseBool(strings.TrimSpace(value))
		if err != nil {
			return fmt.Errorf("gate %s: %q is neither true nor false", name, value)
		}
		f.values[strings.TrimSpace(name)] = on
	}
	return nil
}

func (f *gateFlag) copy() map[string]bool { return maps.Clone(f.values) }

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
