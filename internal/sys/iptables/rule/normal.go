package rule

import (
	"bytes"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Normal brings a rule, as any version of iptables-save prints it, into a form in
// which equal rules are equal: without what is implied, in a fixed order.
func Normal(rule string) string {
	var options []string
	current := ""
	negated := false
	end := func() {
		if o := normalOption(current); o != "" {
			options = append(options, o)
		}
		current = ""
	}
	for _, word := range Tokens(rule) {
		switch {
		case word == "!":
			end()
			negated = true
		case len(word) > 1 && word[0] == '-':
			end()
			current = word
			if negated {
				current, negated = "! "+word, false
			}
		default:
			current += " " + word
		}
	}
	end()
	slices.Sort(options)
	return strings.Join(options, " ")
}

// normalOption is one option with its values; "" for one that says nothing.
func normalOption(o string) string {
	name, value, _ := strings.Cut(o, " ")
	switch name {
	case "-m", "--match", "--rsource":
		return ""
	case "--mask":
		if value == "255.255.255.255" || value == "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff" {
			return ""
		}
	case "--reject-with":
		if value == "icmp-port-unreachable" || value == "icmp6-port-unreachable" || value == "port-unreach" {
			return ""
		}
	case "--probability":
		if p, err := strconv.ParseFloat(value, 64); err == nil {
			return name + " " + strconv.FormatFloat(math.Round(p*(1<<31)), 'f', 0, 64)
		}
	case "-s", "-d", "--ctorigdst":
		return name + " " + strings.TrimSuffix(strings.TrimSuffix(value, "/32"), "/128")
	case "--set-mark":
		return "--set-xmark " + value + "/0xffffffff"
	case "--or-mark":
		return "--set-xmark " + value + "/" + value
	case "--xor-mark":
		return "--set-xmark " + value + "/0x0"
	}
	return o
}

// Tokens splits a rule into words; quotes hold words together.
func Tokens(rule string) []string {
	var out []string
	var b strings.Builder
	quoted, started := false, false
	for i := 0; i < len(rule); i++ {
		c := rule[i]
		switch {
		case c == '"':
			quoted, started = !quoted, true
		case c == '\\' && quoted && i+1 < len(rule):
			i++
			b.WriteByte(rule[i])
		case c == ' ' && !quoted:
			if started {
				out = append(out, b.String())
			}
			b.Reset()
			started = false
		default:
			b.WriteByte(c)
			started = true
		}
	}
	if started {
		out = append(out, b.String())
	}
	return out
}

// Target returns the chain or target to which a rule leads, "" if to none.
func Target(rule string) string {
	words := Tokens(rule)
	for i, w := range words {
		if (w == "-j" || w == "-g") && i+1 < len(words) {
			return words[i+1]
		}
	}
	return ""
}

// NormalText is the normal form of a chain's lines.
func NormalText(text []byte) string {
	var b strings.Builder
	for line := range bytes.Lines(text) {
		b.WriteString(Normal(strings.TrimSuffix(string(line), "\n")))
		b.WriteByte('\n')
	}
	return b.String()
}
