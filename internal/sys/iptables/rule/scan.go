package rule

import (
	"bytes"
	"context"
	"slices"
	"strings"

	"github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// Scan reads a table and tells chains of one's own from others.
type Scan struct {
	Table iptables.Table
	Own   func(chain string) bool
	// Each is told every chain of one's own with its rules. The text is valid during
	// the call.
	Each func(c Chain, text []byte) error

	// What Read found besides: rules of built-in chains that lead to one's own
	// chains, and chains of one's own to which rules in other chains lead.
	Jumps  []Jumping
	Pinned []Chain

	declared map[string]bool // chains of one's own; whether rules were seen
	current  string
	text     []byte
}

// Jumping is a rule of a built-in chain.
type Jumping struct{ From, Rule string }

// Read reads the table once.
func (s *Scan) Read(ctx context.Context, tables iptables.Tables) error {
	s.declared = map[string]bool{}
	if err := tables.Save(ctx, s.Table, s.line); err != nil {
		return err
	}
	if err := s.finish(); err != nil {
		return err
	}
	for name, filled := range s.declared {
		if !filled {
			if err := s.Each(In(s.Table, name), nil); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *Scan) line(line []byte) error {
	switch {
	case line[0] == ':':
		name, _, _ := strings.Cut(string(line[1:]), " ")
		if s.Own(name) {
			s.declared[name] = false
		}
	case bytes.HasPrefix(line, []byte("-A ")):
		return s.rule(line)
	}
	return nil
}

func (s *Scan) rule(line []byte) error {
	name, rest, _ := bytes.Cut(line[len("-A "):], []byte(" "))
	if string(name) != s.current {
		if err := s.finish(); err != nil {
			return err
		}
		s.current = string(name)
	}
	if _, own := s.declared[s.current]; own {
		s.text = append(append(s.text, line...), '\n')
		return nil
	}
	if !bytes.Contains(rest, []byte("KUBE-")) {
		return nil
	}
	target := Target(string(rest))
	if !s.Own(target) {
		return nil
	}
	if slices.Contains(s.Table.Builtin(), s.current) {
		s.Jumps = append(s.Jumps, Jumping{s.current, string(rest)})
	} else {
		s.Pinned = append(s.Pinned, In(s.Table, target))
	}
	return nil
}

// finish hands over the chain read last.
func (s *Scan) finish() error {
	if _, own := s.declared[s.current]; !own || len(s.text) == 0 {
		return nil
	}
	s.declared[s.current] = true
	err := s.Each(In(s.Table, s.current), s.text)
	s.text, s.current = s.text[:0], ""
	return err
}
